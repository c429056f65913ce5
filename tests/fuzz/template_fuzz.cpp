// Chat templates, which are programs from strangers, over conversations from users. Beside what every parser promises:
// the marks of the result tell whatever came from a message from what the template wrote.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "io/chat_template.h"
#include "mutate.h"

namespace fut::fuzz {
namespace {

constexpr char kTemplate[] = "template.jinja", kConversation[] = "conversation.json";
constexpr char kSecret[] = "Qz7~secret~7zQ";  // in messages only

const std::vector<std::string> kTokens = {"{%",
                                          "%}",
                                          "{{",
                                          "}}",
                                          "{#",
                                          "#}",
                                          "{%-",
                                          "-%}",
                                          "{{-",
                                          "-}}",
                                          "{%+",
                                          "|",
                                          ".",
                                          ",",
                                          ":",
                                          "(",
                                          ")",
                                          "[",
                                          "]",
                                          "{",
                                          "}",
                                          "=",
                                          "==",
                                          "!=",
                                          "<",
                                          "<=",
                                          ">",
                                          ">=",
                                          "+",
                                          "-",
                                          "*",
                                          "**",
                                          "/",
                                          "//",
                                          "%",
                                          "~",
                                          "if",
                                          "elif",
                                          "else",
                                          "endif",
                                          "for",
                                          "in",
                                          "endfor",
                                          "set",
                                          "endset",
                                          "macro",
                                          "endmacro",
                                          "raw",
                                          "endraw",
                                          "generation",
                                          "endgeneration",
                                          "break",
                                          "continue",
                                          "recursive",
                                          "and",
                                          "or",
                                          "not",
                                          "is",
                                          "true",
                                          "false",
                                          "none",
                                          "loop",
                                          "loop.index",
                                          "loop.last",
                                          "loop.cycle",
                                          "namespace",
                                          "range",
                                          "dict",
                                          "raise_exception",
                                          "strftime_now",
                                          "messages",
                                          "message",
                                          "tools",
                                          "bos_token",
                                          "add_generation_prompt",
                                          "role",
                                          "content",
                                          "x",
                                          "ns",
                                          "0",
                                          "1",
                                          "-1",
                                          "2",
                                          "100000",
                                          "100001",
                                          "9223372036854775807",
                                          "9223372036854775806",
                                          "9223372036854775808",
                                          "1.5",
                                          "1e308",
                                          "'a'",
                                          "\"b\"",
                                          "''",
                                          "'\\n'",
                                          "'%Y-%m-%d'",
                                          "'%'",
                                          "trim",
                                          "tojson",
                                          "length",
                                          "count",
                                          "default",
                                          "d",
                                          "join",
                                          "first",
                                          "last",
                                          "string",
                                          "safe",
                                          "list",
                                          "upper",
                                          "lower",
                                          "capitalize",
                                          "title",
                                          "int",
                                          "float",
                                          "replace",
                                          "items",
                                          "dictsort",
                                          "sort",
                                          "reverse",
                                          "unique",
                                          "indent",
                                          "select",
                                          "reject",
                                          "selectattr",
                                          "rejectattr",
                                          "map",
                                          "abs",
                                          "round",
                                          "sum",
                                          "min",
                                          "max",
                                          "batch",
                                          "slice",
                                          "wordcount",
                                          "defined",
                                          "undefined",
                                          "mapping",
                                          "iterable",
                                          "sequence",
                                          "number",
                                          "integer",
                                          "boolean",
                                          "odd",
                                          "even",
                                          "divisibleby",
                                          "eq",
                                          "equalto",
                                          "strip",
                                          "lstrip",
                                          "rstrip",
                                          "split",
                                          "rsplit",
                                          "find",
                                          "rfind",
                                          "startswith",
                                          "endswith",
                                          "keys",
                                          "values",
                                          "get",
                                          "indent=2",
                                          "ensure_ascii=true",
                                          "separators=(',',':')",
                                          "attribute='role'",
                                          "case_sensitive=true",
                                          "reverse=true"};

/// Programs whose cost grows faster than their text; `n` says how much of each.
std::string bomb(Random& random) {
  const size_t n = random.chance(50) ? random.below(20) : random.below(300);
  const auto repeat = [n](std::string_view part) {
    std::string all;
    for (size_t i = 0; i < n; ++i) all += part;
    return all;
  };
  const auto far = [&random]() -> std::string {
    constexpr const char* kEnds[] = {
        "9223372036854775807", "9223372036854775806", "9223372036854775800", "0", "1", "5", "1000"};
    return (random.chance(40) ? "-" : "") + std::string(random.pick(kEnds));
  };
  switch (random.below(12)) {
    case 0: return "{% set x = [messages] %}" + repeat("{% set x = [x, x] %}") + "{{ x }}";
    case 1: return "{% set x = {'a': 1} %}" + repeat("{% set x = {'a': x, 'b': x} %}") + "{{ x | tojson }}";
    case 2: return "{% set x = 'ab' %}" + repeat("{% set x = x ~ x %}") + "{{ x }}";
    case 3: return "{% set x = [1] %}" + repeat("{% set x = [x, x] %}") + "{{ x == x }}{{ x in [x] }}";
    case 4: return repeat("{% for a in range(1000) %}") + "x" + repeat("{% endfor %}");
    case 5: return "{{ " + repeat("(") + "1" + repeat(")") + " }}";
    case 6: return "{{ 1" + repeat(" + 1") + repeat(" | string | length") + " }}";
    case 7: return "{% macro m(k) %}{{ m(k ~ k) }}x{{ m(k) }}{% endmacro %}{{ m('a') }}";
    case 8: return "{{ " + repeat("not ") + repeat("-") + "x" + repeat("[0]") + repeat(".a") + " }}";
    case 9: return "{% set x = 'a,' * " + std::to_string(odd_number(random) >> 1) + " %}{{ x.split(',') | join(x) }}";
    case 10: return "{{ range(" + far() + ", " + far() + ", " + far() + ") | length }}";
    default: return repeat("{% if messages %}") + "{{ messages" + repeat(" | list") + " }}" + repeat("{% endif %}");
  }
}

/// Words, numbers, quotations and signs of a template; text between tags is cut like the rest.
std::vector<std::string> tokens_of(const std::string& source) {
  const auto is_word = [](char c) { return isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  std::vector<std::string> tokens;
  for (size_t at = 0; at < source.size();) {
    size_t end = at + 1;
    if (is_word(source[at])) {
      while (end < source.size() && is_word(source[end])) ++end;
    } else if (source[at] == '\'' || source[at] == '"') {
      end = std::min(source.find(source[at], end), source.size() - 1) + 1;
    } else if (end < source.size() && (source[at] == '{' || source[end] == '}')) {
      ++end;
    }
    tokens.push_back(source.substr(at, end - at));
    at = end;
  }
  return tokens;
}

/// The first place from `at` on where a statement may stand.
size_t after_tag(const std::vector<std::string>& tokens, size_t at) {
  while (at > 0 && at < tokens.size() && tokens[at - 1] != "%}" && tokens[at - 1] != "}}") ++at;
  return at;
}

void change_tokens(std::vector<std::string>& tokens, Random& random, const std::vector<std::string>& others) {
  if (tokens.empty()) return;
  const size_t at = random.below(tokens.size()), count = std::min(1 + random.below(12), tokens.size() - at);
  const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(at);
  const auto end = begin + static_cast<std::ptrdiff_t>(count);
  switch (random.below(50) == 0 ? 8 : random.below(8)) {  // what takes long comes seldom
    case 0: tokens.erase(begin, end); break;
    case 1: {
      const std::vector<std::string> copy(begin, end);
      tokens.insert(tokens.begin() + static_cast<std::ptrdiff_t>(random.below(tokens.size() + 1)), copy.begin(),
                    copy.end());
      break;
    }
    case 2: std::swap(*begin, tokens[random.below(tokens.size())]); break;
    case 3:
    case 4: *begin = random.pick(kTokens); break;
    case 5: tokens.insert(begin, " " + random.pick(kTokens) + " "); break;
    case 6: {
      const size_t from = random.below(others.size()), length = std::min(1 + random.below(40), others.size() - from);
      tokens.insert(begin, others.begin() + static_cast<std::ptrdiff_t>(from),
                    others.begin() + static_cast<std::ptrdiff_t>(from + length));
      break;
    }
    case 7: *begin = random.pick(tokens); break;
    default: tokens.insert(tokens.begin() + static_cast<std::ptrdiff_t>(after_tag(tokens, at)), bomb(random));
  }
}

const std::vector<std::string> kWords = {"messages",
                                         "role",
                                         "content",
                                         "user",
                                         "assistant",
                                         "system",
                                         "tool",
                                         "tools",
                                         "tool_calls",
                                         "function",
                                         "name",
                                         "arguments",
                                         "add_generation_prompt",
                                         "bos_token",
                                         "eos_token",
                                         "enable_thinking",
                                         kSecret};

class TemplateTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {kTemplate, kConversation}; }
  double most_seconds() const override { return 20; }             // 10 million steps are allowed
  size_t most_bytes() const override { return size_t{1} << 30; }  // 256 MiB of text, each byte of it with a mark

  /// The templates that the tests compare with transformers, over one conversation.
  std::vector<Input> more_seeds() const override {
    std::vector<Input> seeds;
    const std::string conversation = R"({"messages":[{"role":"system","content":"Be brief. Qz7~secret~7zQ"},)"
                                     R"({"role":"user","content":"Hi Qz7~secret~7zQ \u00e9"},)"
                                     R"({"role":"assistant","content":"Hello."},{"role":"user","content":"Bye."}],)"
                                     R"("add_generation_prompt":true,"bos_token":"<s>","eos_token":"</s>"})";
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(FUT_FUZZ_FOLDER "/../chat_templates"))
      paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    for (const auto& path : paths) {
      std::ifstream in(path, std::ios::binary);
      seeds.push_back({{kTemplate, {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()}},
                       {kConversation, conversation}});
    }
    return seeds;
  }

  void mutate(Input& input, Random& random, const std::vector<Input>& seeds) const override {
    std::string &source = input[kTemplate], &conversation = input[kConversation];
    const std::string& other = random.pick(seeds).at(kTemplate);
    if (random.chance(15)) conversation = mutated_json(conversation, random, kWords);
    if (random.chance(10)) return mutate_bytes(source, random, other);
    std::vector<std::string> tokens = tokens_of(source);
    const std::vector<std::string> others = tokens_of(other);
    for (size_t count = 1 + random.below(random.chance(70) ? 3 : 12); count > 0; --count) {
      change_tokens(tokens, random, others);
    }
    source.clear();
    for (const std::string& token : tokens) source += token;
  }

  std::string place(const std::string&) const override { return ".j"; }  // conversation.json or template.jinja

  void run(const Input& input, const std::string&) const override {
    const jinja::Value variables = jinja::value_from_json(input.at(kConversation), kConversation);
    const ChatTemplate chat(input.at(kTemplate), kTemplate);
    std::tm now{};
    now.tm_year = 124, now.tm_mday = 26;
    const jinja::Text text = chat.render(variables, now);
    const std::string_view bytes = text.bytes(), marks = text.marks();
    require(marks.empty() || marks.size() == bytes.size(), "marks of another length than the text");
    if (input.at(kTemplate).find("secret") != std::string::npos) return;
    for (size_t at = 0; (at = bytes.find(kSecret, at)) != std::string_view::npos; ++at) {
      for (size_t i = 0; i + 1 < sizeof kSecret; ++i)
        require(text.is_data(at + i), "a message's text counts as the template's own");
    }
  }
};

}  // namespace

std::unique_ptr<Target> template_target() { return std::make_unique<TemplateTarget>(); }

}  // namespace fut::fuzz
