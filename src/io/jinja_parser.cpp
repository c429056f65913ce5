// Recursive descent over the tokens. Every construct that Jinja has and this subset has not is refused by its name; the
// depth of trees and blocks is bounded, so that whoever walks them needs no check.
#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "io/jinja_ast.h"
#include "io/jinja_lexer.h"
#include "io/mapped_file.h"

namespace fut::jinja {
namespace {

using Kind = Expression::Kind;

constexpr int kMaxBlockDepth = 60, kMaxExpressionDepth = 200, kMaxBrackets = 60;

class Parser {
 public:
  Parser(std::string_view source, const std::string& what) : what_(what), tokens_(tokenize_template(source, what)) {}

  Block run() {
    Block block = parse_block({});
    return block;
  }

 private:
  /// Counts how deep the parser is, in blocks or in brackets.
  class Deeper {
   public:
    Deeper(const Parser& parser, int& depth, int limit, const char* what) : depth_(depth) {
      if (++depth_ > limit) parser.refuse(what, " nest deeper than ", limit);
    }
    ~Deeper() { --depth_; }

   private:
    int& depth_;
  };

  // ---- tokens

  const Token& token() const { return tokens_[at_]; }
  Token take() { return tokens_[token().kind == Token::Kind::end ? at_ : at_++]; }

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail(what_, ": line ", token().line, ": ", parts...);
  }

  std::string found() const {
    switch (token().kind) {
      case Token::Kind::data: return "text";
      case Token::Kind::print_begin: return "{{";
      case Token::Kind::print_end: return "}}";
      case Token::Kind::block_begin: return "{%";
      case Token::Kind::block_end: return "%}";
      case Token::Kind::end: return "the end";
      case Token::Kind::text: return "a text";
      default: return printable(token().text);
    }
  }

  bool is_sign(std::string_view sign) const { return token().kind == Token::Kind::sign && token().text == sign; }
  bool is_name(std::string_view name) const { return token().kind == Token::Kind::name && token().text == name; }
  bool skip_sign(std::string_view sign) { return is_sign(sign) ? ++at_, true : false; }
  bool skip_name(std::string_view name) { return is_name(name) ? ++at_, true : false; }
  void expect_sign(std::string_view sign) {
    if (!skip_sign(sign)) refuse("expected ", sign, ", found ", found());
  }
  void expect_block_end() {
    if (token().kind != Token::Kind::block_end) refuse("expected %}, found ", found());
    ++at_;
  }
  std::string expect_name(const char* what) {
    if (token().kind != Token::Kind::name) refuse("expected ", what, ", found ", found());
    return take().text;
  }

  // ---- statements

  /// Up to a block that begins with one of `ends`, whose name is then left in ended_by_; with none, to the end.
  Block parse_block(const std::vector<std::string>& ends, int opened = 1) {
    const Deeper deeper(*this, block_depth_, kMaxBlockDepth, "blocks");
    Block block;
    for (;;) {
      const int line = token().line;
      switch (token().kind) {
        case Token::Kind::data:
          block.push_back({.kind = Statement::Kind::data, .line = line, .text = take().text});
          break;
        case Token::Kind::print_begin: {
          ++at_;
          Statement print{.kind = Statement::Kind::print, .line = line, .expression = parse_tuple(true)};
          if (token().kind != Token::Kind::print_end) refuse("expected }}, found ", found());
          ++at_;
          block.push_back(std::move(print));
          break;
        }
        case Token::Kind::block_begin: {
          ++at_;
          const std::string name = expect_name("the name of a block");
          if (std::find(ends.begin(), ends.end(), name) != ends.end()) return ended_by_ = name, std::move(block);
          parse_statement(name, line, block);
          break;
        }
        default:
          if (!ends.empty()) refuse("no ", ends.back(), " for the block of line ", opened);
          return block;
      }
    }
  }

  void parse_statement(const std::string& name, int line, Block& block) {
    if (name == "if") return parse_if(line, block);
    if (name == "for") return parse_for(line, block);
    if (name == "set") return parse_set(line, block);
    if (name == "macro") return parse_macro(line, block);
    if (name == "generation") {
      expect_block_end();
      Statement scope{.kind = Statement::Kind::scope, .line = line, .body = parse_block({"endgeneration"}, line)};
      expect_block_end();
      return block.push_back(std::move(scope));
    }
    if (name == "break" || name == "continue") {
      if (loop_depth_ == 0) refuse(name, " outside a loop");
      expect_block_end();
      return block.push_back({.kind = Statement::Kind::leave, .line = line, .name = name});
    }
    refuse("{% ", printable(name), " %} is not supported or has no place here");
  }

  void parse_if(int line, Block& block) {
    Statement statement{.kind = Statement::Kind::condition, .line = line};
    ended_by_ = "if";
    while (ended_by_ != "endif") {
      const bool last = ended_by_ == "else";
      ExpressionPtr condition = last ? nullptr : parse_tuple(false);
      expect_block_end();
      Block body = last ? parse_block({"endif"}, line) : parse_block({"elif", "else", "endif"}, line);
      statement.branches.push_back({std::move(condition), std::move(body)});
    }
    expect_block_end();
    block.push_back(std::move(statement));
  }

  std::vector<std::string> parse_targets() {
    std::vector<std::string> targets;
    const bool brackets = skip_sign("(");
    do {
      targets.push_back(expect_name("a variable"));
      refuse_reserved(targets.back());
    } while (skip_sign(","));
    if (brackets) expect_sign(")");
    return targets;
  }

  void refuse_reserved(const std::string& name) const {
    for (const char* reserved : {"true", "false", "none", "True", "False", "None", "loop"}) {
      if (name == reserved) refuse("cannot assign to ", name);
    }
  }

  void parse_for(int line, Block& block) {
    Statement loop{.kind = Statement::Kind::loop, .line = line, .targets = parse_targets()};
    if (!skip_name("in")) refuse("expected in, found ", found());
    loop.expression = parse_tuple(false);
    if (skip_name("if")) loop.filter = parse_expression();
    if (is_name("recursive")) refuse("a recursive loop is not supported");
    expect_block_end();
    ++loop_depth_;
    loop.body = parse_block({"else", "endfor"}, line);
    --loop_depth_;
    if (ended_by_ == "else") {
      expect_block_end();
      loop.otherwise = parse_block({"endfor"}, line);
    }
    expect_block_end();
    block.push_back(std::move(loop));
  }

  void parse_set(int line, Block& block) {
    Statement set{.kind = Statement::Kind::assign, .line = line, .targets = parse_targets()};
    if (set.targets.size() == 1 && skip_sign(".")) {
      set.name = set.targets[0];
      set.targets[0] = expect_name("an attribute");
    }
    if (skip_sign("=")) {
      set.expression = parse_tuple(true);
      expect_block_end();
    } else {
      if (set.targets.size() != 1 || !set.name.empty()) refuse("expected =, found ", found());
      if (is_sign("|")) refuse("{% set NAME | filter %} is not supported");
      expect_block_end();
      set.kind = Statement::Kind::assign_body;
      set.body = parse_block({"endset"}, line);
      expect_block_end();
    }
    block.push_back(std::move(set));
  }

  void parse_macro(int line, Block& block) {
    Statement macro{.kind = Statement::Kind::macro, .line = line, .name = expect_name("the macro's name")};
    refuse_reserved(macro.name);
    expect_sign("(");
    while (!is_sign(")")) {
      if (!macro.targets.empty()) expect_sign(",");
      macro.targets.push_back(expect_name("a parameter"));
      refuse_reserved(macro.targets.back());
      if (skip_sign("=")) {
        macro.standards.push_back(parse_expression());
      } else if (!macro.standards.empty()) {
        refuse("parameter ", macro.targets.back(), " needs a default value as the one before has");
      }
    }
    expect_sign(")");
    expect_block_end();
    const int outer_loops = std::exchange(loop_depth_, 0);
    macro.body = parse_block({"endmacro"}, line);
    loop_depth_ = outer_loops;
    expect_block_end();
    block.push_back(std::move(macro));
  }

  // ---- expressions, from the loosest operator to the tightest

  ExpressionPtr make(Kind kind, int line, std::string name, std::vector<ExpressionPtr> parts) {
    auto node = std::make_unique<Expression>(Expression{.kind = kind, .line = line, .name = std::move(name)});
    for (const ExpressionPtr& part : parts) {
      if (part) node->depth = std::max(node->depth, part->depth + 1);
    }
    if (node->depth > kMaxExpressionDepth) refuse("an expression is nested deeper than ", kMaxExpressionDepth);
    node->parts = std::move(parts);
    return node;
  }

  template <class... Parts>
  ExpressionPtr make(Kind kind, int line, std::string name, ExpressionPtr first, Parts... more) {
    std::vector<ExpressionPtr> parts;
    parts.push_back(std::move(first));
    (parts.push_back(std::move(more)), ...);
    return make(kind, line, std::move(name), std::move(parts));
  }

  /// One expression, or several with commas between, which are a tuple.
  ExpressionPtr parse_tuple(bool with_conditional) {
    const int line = token().line;
    const auto one = [&] { return with_conditional ? parse_expression() : parse_or(); };
    ExpressionPtr first = one();
    if (!is_sign(",")) return first;
    std::vector<ExpressionPtr> parts;
    parts.push_back(std::move(first));
    while (skip_sign(",")) {
      if (token().kind == Token::Kind::print_end || token().kind == Token::Kind::block_end || is_sign(")")) break;
      parts.push_back(one());
    }
    return make(Kind::list, line, "tuple", std::move(parts));
  }

  ExpressionPtr parse_expression() {
    const Deeper deeper(*this, bracket_depth_, kMaxBrackets, "brackets");
    ExpressionPtr value = parse_or();
    while (is_name("if")) {
      const int line = take().line;
      ExpressionPtr condition = parse_or();
      ExpressionPtr otherwise = skip_name("else") ? parse_expression() : nullptr;
      value = make(Kind::conditional, line, "", std::move(value), std::move(condition), std::move(otherwise));
    }
    return value;
  }

  ExpressionPtr parse_or() {
    ExpressionPtr left = parse_and();
    while (is_name("or")) left = join(std::move(left), &Parser::parse_and);
    return left;
  }

  ExpressionPtr parse_and() {
    ExpressionPtr left = parse_not();
    while (is_name("and")) left = join(std::move(left), &Parser::parse_not);
    return left;
  }

  /// The operator at hand between `left` and what `next` parses.
  ExpressionPtr join(ExpressionPtr left, ExpressionPtr (Parser::*next)()) {
    const Token sign = take();
    ExpressionPtr right = (this->*next)();
    return make(Kind::binary, sign.line, sign.text, std::move(left), std::move(right));
  }

  ExpressionPtr parse_not() {
    if (!is_name("not")) return parse_compare();
    const Deeper deeper(*this, bracket_depth_, kMaxBrackets, "operators");
    const int line = take().line;
    return make(Kind::unary, line, "not", parse_not());
  }

  /// The comparison at hand, "not in" as one; empty if there is none.
  std::string take_comparison() {
    for (const char* sign : {"==", "!=", "<", "<=", ">", ">="}) {
      if (skip_sign(sign)) return sign;
    }
    if (skip_name("in")) return "in";
    const bool not_in = is_name("not") && tokens_[at_ + 1].kind == Token::Kind::name && tokens_[at_ + 1].text == "in";
    if (not_in) at_ += 2;
    return not_in ? "not in" : "";
  }

  ExpressionPtr parse_compare() {
    const int line = token().line;
    std::vector<ExpressionPtr> parts;
    std::vector<std::string> signs;
    parts.push_back(parse_sum());
    for (std::string sign = take_comparison(); !sign.empty(); sign = take_comparison()) {
      signs.push_back(std::move(sign));
      parts.push_back(parse_sum());
    }
    if (signs.empty()) return std::move(parts[0]);
    ExpressionPtr node = make(Kind::compare, line, "", std::move(parts));
    node->names = std::move(signs);
    return node;
  }

  ExpressionPtr parse_sum() {
    ExpressionPtr left = parse_concatenation();
    while (is_sign("+") || is_sign("-")) left = join(std::move(left), &Parser::parse_concatenation);
    return left;
  }

  ExpressionPtr parse_concatenation() {
    ExpressionPtr left = parse_product();
    while (is_sign("~")) left = join(std::move(left), &Parser::parse_product);
    return left;
  }

  ExpressionPtr parse_product() {
    ExpressionPtr left = parse_power();
    while (is_sign("*") || is_sign("/") || is_sign("//") || is_sign("%"))
      left = join(std::move(left), &Parser::parse_power);
    return left;
  }

  ExpressionPtr parse_power() {
    ExpressionPtr left = parse_filtered();
    while (is_sign("**")) left = join(std::move(left), &Parser::parse_filtered);
    return left;
  }

  ExpressionPtr parse_filtered() { return with_filters(parse_unary()); }

  ExpressionPtr parse_unary() {
    if (!is_sign("-") && !is_sign("+")) return with_postfix(parse_primary());
    const Deeper deeper(*this, bracket_depth_, kMaxBrackets, "operators");
    const Token sign = take();
    return make(Kind::unary, sign.line, sign.text, parse_unary());
  }

  ExpressionPtr parse_primary() {
    const Token first = token();
    switch (first.kind) {
      case Token::Kind::name: return parse_name(take());
      case Token::Kind::text: {
        std::string text;
        while (token().kind == Token::Kind::text) text += take().text;  // neighbours are one text, as in Python
        return constant(Value::text(std::move(text)), first.line);
      }
      case Token::Kind::integer:
      case Token::Kind::number: return parse_number(take());
      default: break;
    }
    if (skip_sign("(")) return parse_brackets(first.line);
    if (skip_sign("[")) return make(Kind::list, first.line, "list", parse_items("]"));
    if (skip_sign("{")) return parse_dict(first.line);
    refuse("expected an expression, found ", found());
  }

  ExpressionPtr constant(Value value, int line) {
    ExpressionPtr node = make(Kind::constant, line, "", std::vector<ExpressionPtr>());
    node->value = std::move(value);
    return node;
  }

  ExpressionPtr parse_name(const Token& name) {
    if (name.text == "true" || name.text == "True") return constant(Value::boolean(true), name.line);
    if (name.text == "false" || name.text == "False") return constant(Value::boolean(false), name.line);
    if (name.text == "none" || name.text == "None") return constant(Value::none(), name.line);
    return make(Kind::name, name.line, name.text, std::vector<ExpressionPtr>());
  }

  ExpressionPtr parse_number(const Token& number) {
    const char *begin = number.text.data(), *end = begin + number.text.size();
    double value = 0;
    int64_t whole = 0;
    if (number.kind == Token::Kind::number) {
      std::from_chars(begin, end, value);
      return constant(Value::number(value), number.line);
    }
    if (std::from_chars(begin, end, whole).ec != std::errc())
      refuse("the number ", printable(number.text), " is too large");
    return constant(Value::integer(whole), number.line);
  }

  ExpressionPtr parse_brackets(int line) {
    const Deeper deeper(*this, bracket_depth_, kMaxBrackets, "brackets");
    if (skip_sign(")")) return make(Kind::list, line, "tuple", std::vector<ExpressionPtr>());
    ExpressionPtr inner = parse_tuple(true);
    expect_sign(")");
    return inner;
  }

  std::vector<ExpressionPtr> parse_items(std::string_view close) {
    std::vector<ExpressionPtr> items;
    while (!is_sign(close)) {
      if (!items.empty()) expect_sign(",");
      if (is_sign(close)) break;
      items.push_back(parse_expression());
    }
    expect_sign(close);
    return items;
  }

  ExpressionPtr parse_dict(int line) {
    std::vector<ExpressionPtr> parts;
    while (!is_sign("}")) {
      if (!parts.empty()) expect_sign(",");
      if (is_sign("}")) break;
      parts.push_back(parse_expression());
      expect_sign(":");
      parts.push_back(parse_expression());
    }
    expect_sign("}");
    return make(Kind::dict, line, "", std::move(parts));
  }

  ExpressionPtr with_postfix(ExpressionPtr value) {
    for (;;) {
      const int line = token().line;
      if (skip_sign(".")) {
        if (token().kind == Token::Kind::integer) {
          value = make(Kind::item, line, "", std::move(value), parse_number(take()));
        } else {
          value = make(Kind::attribute, line, expect_name("an attribute"), std::move(value));
        }
      } else if (skip_sign("[")) {
        value = parse_subscript(std::move(value), line);
      } else if (is_sign("(")) {
        value = with_arguments(Kind::call, line, "", std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr parse_subscript(ExpressionPtr value, int line) {
    std::vector<ExpressionPtr> parts;
    parts.push_back(std::move(value));
    bool is_slice = false;
    for (;;) {
      const bool absent = is_sign(":") || is_sign("]");
      parts.push_back(absent ? nullptr : parse_expression());
      if (parts.size() == 4 || !skip_sign(":")) break;
      is_slice = true;
    }
    if (!is_slice && !parts[1]) refuse("an index is missing");
    if (is_sign(",")) refuse("several indices at once are not supported");
    expect_sign("]");
    if (is_slice) parts.resize(4);
    return make(is_slice ? Kind::slice : Kind::item, line, "", std::move(parts));
  }

  /// `value` with the arguments in the brackets at hand.
  ExpressionPtr with_arguments(Kind kind, int line, std::string name, ExpressionPtr value) {
    std::vector<ExpressionPtr> parts;
    std::vector<std::pair<std::string, ExpressionPtr>> named;
    parts.push_back(std::move(value));
    int deepest = 0;
    expect_sign("(");
    for (bool first = true; !is_sign(")"); first = false) {
      if (!first) expect_sign(",");
      if (is_sign(")")) break;
      if (is_sign("*") || is_sign("**")) refuse("arguments with ", token().text, " are not supported");
      const bool by_name = token().kind == Token::Kind::name && tokens_[at_ + 1].kind == Token::Kind::sign &&
                           tokens_[at_ + 1].text == "=";
      if (by_name) {
        named.emplace_back(take().text, nullptr);
        ++at_;
        named.back().second = parse_expression();
        deepest = std::max(deepest, named.back().second->depth);
      } else {
        if (!named.empty()) refuse("an argument without a name after one with a name");
        parts.push_back(parse_expression());
      }
    }
    expect_sign(")");
    ExpressionPtr node = make(kind, line, std::move(name), std::move(parts));
    node->depth = std::max(node->depth, deepest + 1);
    node->named = std::move(named);
    return node;
  }

  ExpressionPtr with_filters(ExpressionPtr value) {
    for (;;) {
      const int line = token().line;
      if (skip_sign("|")) {
        value = parse_filter(std::move(value), line);
      } else if (skip_name("is")) {
        value = parse_test(std::move(value), line);
      } else if (is_sign("(")) {
        value = with_arguments(Kind::call, line, "", std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr parse_filter(ExpressionPtr value, int line) {
    std::string name = expect_name("a filter");
    if (is_sign("(")) return with_arguments(Kind::filter, line, std::move(name), std::move(value));
    return make(Kind::filter, line, std::move(name), std::move(value));
  }

  /// An argument may follow a test without brackets: "is divisibleby 3".
  ExpressionPtr parse_test(ExpressionPtr value, int line) {
    const bool negated = skip_name("not");
    std::string name = expect_name("a test");
    ExpressionPtr test;
    const Token::Kind kind = token().kind;
    const bool words =
        kind == Token::Kind::name && !is_name("else") && !is_name("or") && !is_name("and") && !is_name("is");
    if (is_sign("(")) {
      test = with_arguments(Kind::test, line, std::move(name), std::move(value));
    } else if (is_name("is")) {
      refuse("a test of a test is not supported");
    } else if (words || kind == Token::Kind::text || kind == Token::Kind::integer || kind == Token::Kind::number ||
               is_sign("[") || is_sign("{")) {
      ExpressionPtr argument = with_postfix(parse_primary());
      test = make(Kind::test, line, std::move(name), std::move(value), std::move(argument));
    } else {
      test = make(Kind::test, line, std::move(name), std::move(value));
    }
    return negated ? make(Kind::unary, line, "not", std::move(test)) : std::move(test);
  }

  const std::string& what_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  std::string ended_by_;
  int block_depth_ = 0, bracket_depth_ = 0, loop_depth_ = 0;
};

}  // namespace

Block parse_template(std::string_view source, const std::string& what) { return Parser(source, what).run(); }

}  // namespace fut::jinja
