#include "io/chat_template.h"

#include <algorithm>

#include "base/error.h"
#include "io/jinja_runtime.h"
#include "io/mapped_file.h"

namespace fut {
namespace jinja {
namespace {

constexpr size_t kMaxSourceBytes = 1 << 20;

enum class Flow { on, leave_loop, next_round };

/// One rendering. Statements write to out_, expressions give values; line_ is where the trouble is if there is any.
class Rendering {
 public:
  Rendering(const Value& variables, const std::optional<std::tm>& now) : now_(now), scope_(std::make_shared<Scope>()) {
    for (const char* name : {"range", "dict", "namespace", "raise_exception", "strftime_now"}) {
      scope_->names[name] = Value::object(std::make_shared<Function>(name));
    }
    for (const auto& [name, value] : variables.as_dict()->entries) scope_->names[std::string(name.bytes())] = value;
    enter();
  }

  Text run(const Block& block) {
    execute(block);
    return std::move(out_);
  }

  int line() const { return line_; }

 private:
  class Deeper {
   public:
    explicit Deeper(int& depth) : depth_(depth) {
      FUT_CHECK(++depth_ <= Limits::kMaxRecursion, "the template recurses deeper than ", Limits::kMaxRecursion);
    }
    ~Deeper() { --depth_; }

   private:
    int& depth_;
  };

  /// A scope for as long as it lives.
  class Inner {
   public:
    Inner(Rendering& rendering, std::shared_ptr<Scope> parent) : rendering_(rendering), outer_(rendering.scope_) {
      rendering_.scope_ = std::make_shared<Scope>();
      rendering_.scope_->parent = std::move(parent);
    }
    ~Inner() { rendering_.scope_ = outer_; }

   private:
    Rendering& rendering_;
    std::shared_ptr<Scope> outer_;
  };

  void enter() {
    auto inner = std::make_shared<Scope>();
    inner->parent = std::move(scope_);
    scope_ = std::move(inner);
  }

  // ---- statements

  Flow execute(const Block& block) {
    const Deeper deeper(depth_);
    for (const Statement& statement : block) {
      const Flow flow = execute(statement);
      if (flow != Flow::on) return flow;
    }
    return Flow::on;
  }

  Flow execute(const Statement& statement) {
    limits_.step();
    line_ = statement.line;
    switch (statement.kind) {
      case Statement::Kind::data: write(Text(statement.text)); return Flow::on;
      case Statement::Kind::print: {
        const Value value = evaluate(*statement.expression);
        line_ = statement.line;
        write(to_text(value));
        return Flow::on;
      }
      case Statement::Kind::condition: {
        for (const auto& branch : statement.branches) {
          if (!branch.condition || evaluate(*branch.condition).truth()) return execute(branch.body);
        }
        return Flow::on;
      }
      case Statement::Kind::loop: return execute_loop(statement);
      case Statement::Kind::assign: {
        Value value = evaluate(*statement.expression);
        line_ = statement.line;
        if (statement.name.empty()) {
          bind(statement.targets, std::move(value));
        } else {
          assign_attribute(statement, std::move(value));
        }
        return Flow::on;
      }
      case Statement::Kind::assign_body:
        scope_->names[statement.targets[0]] = Value::text(captured(statement.body, scope_));
        return Flow::on;
      case Statement::Kind::macro:
        scope_->names[statement.name] = Value::object(std::make_shared<Macro>(&statement, scope_));
        return Flow::on;
      case Statement::Kind::scope: {
        const Inner inner(*this, scope_);
        return execute(statement.body);
      }
      case Statement::Kind::leave: return statement.name == "break" ? Flow::leave_loop : Flow::next_round;
    }
    return Flow::on;
  }

  void write(const Text& text) {
    limits_.bytes(text.size());
    require_short(out_.size() + text.size());
    out_.append(text);
  }

  /// What a block writes, instead of writing it.
  Text captured(const Block& block, const std::shared_ptr<Scope>& parent) {
    const Inner inner(*this, parent);
    return captured_here(block);
  }
  Text captured_here(const Block& block) {
    Text outer = std::exchange(out_, Text());
    execute(block);
    return std::exchange(out_, std::move(outer));
  }

  void bind(const std::vector<std::string>& targets, Value value) {
    if (targets.size() == 1) {
      scope_->names[targets[0]] = std::move(value);
      return;
    }
    const Items items = iterate(value, limits_);
    FUT_CHECK(items.size() == targets.size(), "expected ", targets.size(), " values to unpack, found ", items.size());
    for (size_t i = 0; i < targets.size(); ++i) scope_->names[targets[i]] = items[i];
  }

  void assign_attribute(const Statement& statement, Value value) {
    auto* space = look_up(statement.name).as<Namespace>();
    FUT_CHECK(space, "cannot set ", statement.name, ".", statement.targets[0], ": ", statement.name,
              " is no namespace");
    FUT_CHECK(!value.is_object(), value.kind(), " in a namespace is not supported");
    space->values[statement.targets[0]] = std::move(value);
  }

  Flow execute_loop(const Statement& statement) {
    auto loop = std::make_shared<Loop>();
    const Value over = evaluate(*statement.expression);
    line_ = statement.line;
    loop->items = iterate(over, limits_);
    if (statement.filter) {
      Items kept;
      for (const Value& item : loop->items) {
        const Inner inner(*this, scope_);
        bind(statement.targets, item);
        if (evaluate(*statement.filter).truth()) kept.push_back(item);
      }
      loop->items = std::move(kept);
    }
    const bool none = loop->items.empty();
    for (loop->index = 0; loop->index < loop->items.size(); ++loop->index) {
      const Inner inner(*this, scope_);
      limits_.step(4);
      line_ = statement.line;
      scope_->names["loop"] = Value::object(loop);
      bind(statement.targets, loop->items[loop->index]);
      if (execute(statement.body) == Flow::leave_loop) break;
    }
    if (!none) return Flow::on;
    const Inner inner(*this, scope_);
    return execute(statement.otherwise);
  }

  // ---- expressions

  Value look_up(const std::string& name) const {
    for (const Scope* scope = scope_.get(); scope; scope = scope->parent.get()) {
      if (const auto found = scope->names.find(name); found != scope->names.end()) return found->second;
    }
    return Value::undefined(name);
  }

  Value evaluate(const Expression& node) {
    const Deeper deeper(depth_);
    limits_.step();
    line_ = node.line;
    switch (node.kind) {
      case Expression::Kind::constant: return node.value;
      case Expression::Kind::name: return look_up(node.name);
      case Expression::Kind::list: return Value::list(evaluate_parts(node, 0), node.name == "tuple");
      case Expression::Kind::dict: return evaluate_dict(node);
      case Expression::Kind::attribute: {
        const Value value = evaluate(*node.parts[0]);
        line_ = node.line;
        return get_attribute(value, node.name);
      }
      case Expression::Kind::item: {
        const Value value = evaluate(*node.parts[0]), key = evaluate(*node.parts[1]);
        line_ = node.line;
        return get_item(value, key);
      }
      case Expression::Kind::slice: return evaluate_slice(node);
      case Expression::Kind::call: return evaluate_call(node);
      case Expression::Kind::filter:
      case Expression::Kind::test: {
        const Value input = evaluate(*node.parts[0]);
        const Arguments arguments = evaluate_arguments(node);
        line_ = node.line;
        if (node.kind == Expression::Kind::filter) return apply_filter(node.name, input, arguments, limits_);
        return Value::boolean(apply_test(node.name, input, arguments, limits_));
      }
      case Expression::Kind::unary: {
        const Value value = evaluate(*node.parts[0]);
        line_ = node.line;
        if (node.name == "not") return Value::boolean(!value.truth());
        return node.name == "-" ? negative(value) : negative(negative(value));
      }
      case Expression::Kind::binary: return evaluate_binary(node);
      case Expression::Kind::compare: return evaluate_compare(node);
      case Expression::Kind::conditional: {
        if (evaluate(*node.parts[1]).truth()) return evaluate(*node.parts[0]);
        return node.parts[2] ? evaluate(*node.parts[2]) : Value::undefined("the missing else of an inline if");
      }
    }
    return Value();
  }

  Items evaluate_parts(const Expression& node, size_t begin) {
    Items items;
    for (size_t i = begin; i < node.parts.size(); ++i) items.push_back(evaluate(*node.parts[i]));
    limits_.items(items.size());
    return items;
  }

  Value evaluate_dict(const Expression& node) {
    std::vector<std::pair<Text, Value>> entries;
    for (size_t i = 0; i < node.parts.size(); i += 2) {
      const Value key = evaluate(*node.parts[i]);
      FUT_CHECK(key.as_text(), "a dictionary's key is a text here, found ", key.kind());
      entries.emplace_back(*key.as_text(), evaluate(*node.parts[i + 1]));
    }
    limits_.items(entries.size() * 2);
    return Value::dict(std::move(entries));
  }

  Value evaluate_slice(const Expression& node) {
    const auto part = [&](size_t i) { return node.parts[i] ? evaluate(*node.parts[i]) : Value::none(); };
    const Value value = part(0), start = part(1), stop = part(2), step = part(3);
    line_ = node.line;
    return get_slice(value, start, stop, step, limits_);
  }

  Value evaluate_binary(const Expression& node) {
    Value left = evaluate(*node.parts[0]);
    if (node.name == "and") return left.truth() ? evaluate(*node.parts[1]) : left;
    if (node.name == "or") return left.truth() ? left : evaluate(*node.parts[1]);
    const Value right = evaluate(*node.parts[1]);
    line_ = node.line;
    return binary(node.name, left, right, limits_);
  }

  Value evaluate_compare(const Expression& node) {
    Value left = evaluate(*node.parts[0]);
    for (size_t i = 0; i < node.names.size(); ++i) {
      Value right = evaluate(*node.parts[i + 1]);
      line_ = node.line;
      if (!compare(node.names[i], left, right, limits_)) return Value::boolean(false);
      left = std::move(right);
    }
    return Value::boolean(true);
  }

  Arguments evaluate_arguments(const Expression& node) {
    Arguments arguments{evaluate_parts(node, 1), {}};
    for (const auto& [name, part] : node.named) arguments.named.emplace_back(name, evaluate(*part));
    return arguments;
  }

  Value evaluate_call(const Expression& node) {
    const Expression& callee = *node.parts[0];
    const bool is_attribute = callee.kind == Expression::Kind::attribute;
    const Value self = is_attribute ? evaluate(*callee.parts[0]) : Value();
    const Value target = is_attribute ? get_attribute(self, callee.name) : evaluate(callee);
    const Arguments arguments = evaluate_arguments(node);
    line_ = node.line;
    if (const auto* method = target.as<Method>()) return call_method(*method, arguments, limits_);
    if (const auto* macro = target.as<Macro>()) return call_macro(*macro, arguments);
    if (const auto* function = target.as<Function>()) return call_function(function->function, arguments);
    FUT_CHECK(!target.is_undefined() || !is_attribute, self.kind(), " has no method \"", printable(callee.name),
              "\", or it is not supported");
    FUT_CHECK(!target.is_undefined(), "the function \"", printable(target.missing_name()), "\" is not supported");
    fail(target.kind(), " cannot be called");
  }

  Value call_macro(const Macro& macro, const Arguments& arguments) {
    const Statement& statement = *macro.statement;
    const std::vector<std::string>& parameters = statement.targets;
    const std::shared_ptr<Scope> parent = macro.scope.lock();
    FUT_CHECK(parent, "the macro ", statement.name, " is called outside the block that defines it");
    const Bound bound(arguments, {parameters.begin(), parameters.end()}, 0, "macro " + statement.name);
    const Inner inner(*this, parent);
    const size_t without = parameters.size() - statement.standards.size();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Value* value = bound.find(parameters[i]);
      scope_->names[parameters[i]] = value          ? *value
                                     : i >= without ? evaluate(*statement.standards[i - without])
                                                    : Value::undefined(parameters[i]);
    }
    return Value::text(captured_here(statement.body));
  }

  Value call_function(const std::string& name, const Arguments& arguments) {
    if (name == "raise_exception") {
      const Bound bound(arguments, {"message"}, 1, name);
      fail("the template refuses: ", printable(to_text(*bound.find("message")).bytes()));
    }
    if (name == "strftime_now")
      return Value::text(formatted_time(Bound(arguments, {"format"}, 1, name).text("format", "")));
    if (name == "range") return range(arguments);
    FUT_CHECK(arguments.positional.empty(), name, " takes only named arguments here");
    if (name == "namespace") {
      auto space = std::make_shared<Namespace>();
      for (const auto& [key, value] : arguments.named) {
        FUT_CHECK(!value.is_object(), value.kind(), " in a namespace is not supported");
        space->values[key] = value;
      }
      return Value::object(std::move(space));
    }
    std::vector<std::pair<Text, Value>> entries;
    for (const auto& [key, value] : arguments.named) entries.emplace_back(Text(key), value);
    return Value::dict(std::move(entries));
  }

  Value range(const Arguments& arguments) {
    FUT_CHECK(!arguments.positional.empty(), "range needs an argument");
    const bool only_stop = arguments.positional.size() == 1;
    const Bound bound(
        arguments,
        only_stop ? std::vector<std::string_view>{"stop"} : std::vector<std::string_view>{"start", "stop", "step"}, 1,
        "range");
    const int64_t start = bound.integer("start", 0), stop = bound.integer("stop", 0), step = bound.integer("step", 1);
    FUT_CHECK(step != 0, "range with step zero");
    const double distance = (static_cast<double>(stop) - static_cast<double>(start)) / static_cast<double>(step);
    FUT_CHECK(distance <= Limits::kMaxRange, "range of more than ", Limits::kMaxRange, " numbers");
    Items items;
    bool past_end = false;
    for (int64_t i = start; !past_end && (step > 0 ? i < stop : i > stop);) {
      items.push_back(Value::integer(i));
      past_end = __builtin_add_overflow(i, step, &i);
    }
    limits_.items(items.size());
    return Value::list(std::move(items));
  }

  std::string formatted_time(const std::string& format) const {
    std::tm now{};
    if (now_) {
      now = *now_;
    } else {
      const std::time_t seconds = std::time(nullptr);
      localtime_r(&seconds, &now);
    }
    char text[256];
    const size_t length = std::strftime(text, sizeof text, format.c_str(), &now);
    FUT_CHECK(length > 0 || format.empty(), "strftime_now(\"", printable(format), "\") gives no text");
    return std::string(text, length);
  }

  const std::optional<std::tm>& now_;
  std::shared_ptr<Scope> scope_;
  Limits limits_;
  Text out_;
  int line_ = 1, depth_ = 0;
};

}  // namespace
}  // namespace jinja

ChatTemplate::ChatTemplate(const std::string& source, const std::string& what) : what_(what) {
  FUT_CHECK(source.size() <= jinja::kMaxSourceBytes, what, ": ", source.size(), " bytes, expected at most ",
            jinja::kMaxSourceBytes);
  block_ = jinja::parse_template(source, what);
}

ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

jinja::Text ChatTemplate::render(const jinja::Value& variables, const std::optional<std::tm>& now) const {
  FUT_CHECK(variables.as_dict(), what_, ": the variables are ", variables.kind(), ", expected a dictionary");
  jinja::Rendering rendering(variables, now);
  try {
    return rendering.run(block_);
  } catch (const Error& error) {
    fail(what_, ": line ", rendering.line(), ": ", error.what());
  }
}

}  // namespace fut
