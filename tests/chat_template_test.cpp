// Chat templates against what transformers renders (scripts/judges/chat_template.py wrote the vectors), the marks on
// what came from outside, and templates that mean harm.
#include "io/chat_template.h"

#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "support/temp_folder.h"

namespace fut {
namespace {

using jinja::Text;
using jinja::Value;
using nlohmann::json;
using test::expect_refused;

Value values(const std::string& text) { return jinja::value_from_json(text, "values"); }

Text rendered(const std::string& source, const Value& variables = values("{}")) {
  return ChatTemplate(source, "t.jinja").render(variables);
}

std::string text_of(const std::string& source, const std::string& variables = "{}") {
  return std::string(rendered(source, values(variables)).bytes());
}

// ---- transformers' own output ---------------------------------------------------------------------------------------

struct Vectors {
  bool own = true;  ///< this tree's; a judge may give others, however few
  json file;
  std::map<std::string, Value> contexts;
  std::tm now{};
};

Vectors read_vectors() {
  const char* given = std::getenv("FUT_TEMPLATE_VECTORS");
  const std::string path = given ? given : FUT_SOURCE_DIR "/tests/chat_template_vectors.json";
  Vectors vectors{!given, json::parse(test::read_file(path)), {}, {}};
  const auto contexts = nlohmann::ordered_json::parse(test::read_file(path))["contexts"];  // in the file's order
  for (const auto& [name, context] : contexts.items()) vectors.contexts.emplace(name, values(context.dump()));
  const std::vector<int> now = vectors.file["now"];
  vectors.now.tm_year = now[0] - 1900, vectors.now.tm_mon = now[1] - 1, vectors.now.tm_mday = now[2];
  vectors.now.tm_hour = now[3], vectors.now.tm_min = now[4], vectors.now.tm_sec = now[5];
  timegm(&vectors.now);  // fills in the day of the week and of the year
  return vectors;
}

TEST(ChatTemplateVectors, SameAsTransformers) {
  const Vectors vectors = read_vectors();
  ASSERT_GT(vectors.file["cases"].size(), vectors.own ? 100u : 0u);
  size_t refused = 0;
  for (const json& c : vectors.file["cases"]) {
    const std::string file = c.value("template", ""), context = c["context"];
    const std::string source =
        file.empty() ? c["source"].get<std::string>() : test::read_file(FUT_SOURCE_DIR "/tests/chat_templates/" + file);
    const std::string name = (file.empty() ? c.value("name", source) : file) + " over " + context;
    try {
      const Text text = ChatTemplate(source, name).render(vectors.contexts.at(context), vectors.now);
      if (c["expected"].is_null()) {
        ADD_FAILURE() << name << ": transformers refuses, this gives \"" << text.bytes() << "\"";
      } else {
        EXPECT_EQ(text.bytes(), c["expected"].get<std::string>()) << name;
      }
    } catch (const Error& error) {
      ++refused;
      EXPECT_TRUE(c["expected"].is_null()) << error.what();
      EXPECT_EQ(std::string(error.what()).find('\n', name.size()), std::string::npos) << error.what();
    }
  }
  std::printf("%zu cases, %zu of them refusals\n", vectors.file["cases"].size(), refused);
}

// ---- messages name the file, the line and the construct -------------------------------------------------------------

void expect_template_refused(const std::string& source, const std::vector<std::string>& words,
                             const std::string& variables = "{}") {
  std::vector<std::string> all = words;
  all.insert(all.begin(), "t.jinja: line ");
  expect_refused([&] { text_of(source, variables); }, all);
}

TEST(ChatTemplate, RefusesUnknownConstructsByNameAndLine) {
  expect_template_refused("a\n{% extends 'x' %}", {"line 2", "{% extends %}"});
  for (const char* block :
       {"include", "import", "from", "block", "call", "filter", "with", "autoescape", "do", "trans"}) {
    expect_template_refused(cat("\n\n{% ", block, " x %}"), {"line 3", cat("{% ", block, " %}")});
  }
  expect_template_refused("\n{% for x in y recursive %}{% endfor %}", {"line 2", "recursive"});
  expect_template_refused("\n\n{{ 'x'|pprint }}", {"line 3", "pprint"});
  expect_template_refused("{{ 'x' is filter }}", {"\"filter\""});
  expect_template_refused("{{ lipsum() }}", {"\"lipsum\""});
  expect_template_refused("{{ 'x'.encode() }}", {"a text", "\"encode\""});
  expect_template_refused("{{ f(*a) }}", {"*"});
  expect_template_refused("{{ '%s' % 1 }}", {"%"});
  expect_template_refused("{{ x[1, 2] }}", {"indices"});
  expect_template_refused("{{ {1: 2} }}", {"key"});
  expect_template_refused("{{ 'É'|lower }}", {"lower", "ASCII"});
  expect_template_refused("{{ '<'|safe ~ '>' }}", {"safe"});
  expect_template_refused("{{ 0x10 }}", {"0x"});
  expect_template_refused("{{ '\\N{DASH}' }}", {"\\N"});
  expect_template_refused("{% set x | upper %}{% endset %}", {"filter"});
  expect_template_refused("{{ 99999999999999999999 }}", {"too large"});
  expect_template_refused("{{ 9223372036854775807 + 1 }}", {"too large"});
  expect_template_refused("{{ loop.index }}", {"\"loop\" is undefined"});
  expect_template_refused("{% for x in [1] %}{{ loop.changed(x) }}{% endfor %}", {"loop.changed"});
  expect_template_refused("{% set loop = 1 %}", {"loop"});
  expect_template_refused("{{ tojson }}{{ [range] }}", {"the function range"});
  // Reached only where it is needed: a plain conversation passes by.
  EXPECT_EQ(text_of("{% if tools %}{{ tools|pprint }}{% endif %}x"), "x");
}

TEST(ChatTemplate, TemplatesOwnRefusalIsOneLine) {
  expect_template_refused("\n{{ raise_exception('roles\nmust alternate') }}", {"line 2", "roles\\x0amust alternate"});
}

TEST(ChatTemplate, ErrorsNameTheLineOfTheExpression) {
  expect_template_refused("{% if true %}\n{{ 'a'\n+ 1 }}{% endif %}", {"line 3", "a text + an integer"});
  expect_template_refused("{# \n\n #}\n{% for m in [1] -%}\n\n  {{ m.x.y }}{% endfor %}",
                          {"line 6", "\"x\" is undefined"});
  expect_template_refused("{% for x in y %}\n\n", {"line 2", "endfor", "line 1"});
}

// ---- marks ----------------------------------------------------------------------------------------------------------

/// The bytes that came from outside as they are, the template's own as dots.
std::string data_of(const Text& text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) shown += text.is_data(i) ? text.bytes()[i] : '.';
  return shown;
}

TEST(ChatTemplateMarks, FollowTextThroughEveryOperation) {
  const Value variables = values(R"({"u": " <end>\n", "list": ["a<end>", "b"], "d": {"k": "v\"w"}})");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[{{ u }}]", ". <end>\n."},
      {"{{ '<end>' + u|trim + '<end>' }}", ".....<end>....."},
      {"{{ u.strip()[1:-1] ~ '<end>' }}", "end....."},
      {"{{ u.strip()|upper }}", "<END>"},
      {"{{ u|replace('end', 'END') }}", " <...>\n"},
      {"{{ 'xuy'|replace('u', u.strip()) }}", ".<end>."},
      {"{{ list|join('<end>') }}", "a<end>.....b"},
      {"{{ list }}", "..a<end>....b.."},
      {"{{ d|tojson }}", "..k....v\\\"w.."},
      {"{% for c in list[0] %}{{ c }}-{% endfor %}", "a.<.e.n.d.>."},
      {"{{ list[0].split('<')[1] }}{{ list[0][::-1] }}", "end>>dne<a"},
      {"{% set x %}<end>{{ u.strip() }}{% endset %}{{ x }}", ".....<end>"},
      {"{% macro m(a) %}<end>{{ a }}{% endmacro %}{{ m(list[1]) * 2 }}", ".....b.....b"},
      {"{{ list|map('capitalize')|last }}{{ d.items()|list|first|first }}{{ u.lstrip()|indent(1, true) }}",
       "Bk.<end>\n"},
      {"{{ 'own'|string }}{{ 5 }}{{ none }}", "........"},
  };
  for (const auto& [source, expected] : cases) EXPECT_EQ(data_of(rendered(source, variables)), expected) << source;
}

// ---- templates that mean harm ---------------------------------------------------------------------------------------

std::string times(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(ChatTemplateLimits, NestingIsBounded) {
  expect_template_refused("{{ " + times("(", 5000) + times(")", 5000) + "}}", {"deeper"});
  expect_template_refused("{{ " + times("[", 5000) + times("]", 5000) + "}}", {"deeper"});
  expect_template_refused("{{ " + times("{'a':", 5000) + "1" + times("}", 5000) + " }}", {"deeper"});
  expect_template_refused("{{ " + times("-", 5000) + "1 }}", {"deeper"});
  expect_template_refused("{{ " + times("not ", 5000) + "1 }}", {"deeper"});
  expect_template_refused("{{ " + times("f(", 5000) + times(")", 5000) + " }}", {"deeper"});
  expect_template_refused("{{ " + times("x[", 5000) + "x" + times("]", 5000) + " }}", {"deeper"});
  expect_template_refused("{{ " + times("1 if 1 else ", 5000) + "1 }}", {"deeper"});
  expect_template_refused("{{ 1" + times(" + 1", 5000) + " }}", {"deeper"});
  expect_template_refused("{{ x" + times(".x", 5000) + " }}", {"deeper"});
  expect_template_refused("{{ x" + times("|trim", 5000) + " }}", {"deeper"});
  expect_template_refused("{{ x" + times("()", 5000) + " }}", {"deeper"});
  expect_template_refused(times("{% if 1 %}", 5000), {"deeper"});
  expect_template_refused(times("{% for x in y %}", 5000), {"deeper"});
  EXPECT_EQ(text_of("{{ 1" + times(" + 1", 150) + " }}"), "151");
  EXPECT_EQ(text_of(times("{% if 1 %}", 50) + "x" + times("{% endif %}", 50)), "x");
  EXPECT_EQ(text_of("{{ " + times("(", 25) + "1" + times(")", 25) + " }}"), "1");
}

TEST(ChatTemplateLimits, RecursionIsBounded) {
  expect_template_refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {"recurses deeper"});
  expect_template_refused(
      "{% macro f(x) %}{{ g(x) }}{% endmacro %}{% macro g(x) %}{{ f([x]) }}{% endmacro %}{{ f(1) }}", {"deeper"});
  expect_template_refused("{% set ns = namespace(x=1) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}",
                          {"nest deeper"});
  expect_template_refused("{% set ns = namespace() %}{% set ns.x = ns %}", {"a namespace in a namespace"});
  expect_template_refused("{% set ns = namespace() %}{% set ns.x = [ns] %}", {"a namespace in a list"});
  expect_template_refused("{% for x in [1] %}{{ {'a': loop} }}{% endfor %}", {"a loop in a dictionary"});
  expect_template_refused("{% set ns = namespace() %}{% macro m() %}{% endmacro %}{% set ns.m = m %}", {"the macro m"});
  EXPECT_EQ(text_of("{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}").size(), 52u);
}

TEST(ChatTemplateLimits, RangesAtTheEndOfTheNumbers) {
  EXPECT_EQ(text_of("{{ range(9223372036854775806, 9223372036854775807, 5) | list }}"), "[9223372036854775806]");
  EXPECT_EQ(text_of("{{ range(-9223372036854775806, -9223372036854775807, -5) | list }}"), "[-9223372036854775806]");
  expect_template_refused("{{ range(-9223372036854775807, 9223372036854775807) }}", {"range"});
}

TEST(ChatTemplateLimits, WorkAndOutputAreBounded) {
  const auto start = std::chrono::steady_clock::now();
  const std::string many = "{% for a in range(99999) %}";
  expect_template_refused(many + many + "{% endfor %}{% endfor %}", {"steps"});
  expect_template_refused("{% for a in range(100000) %}{% set x = range(100000) %}{% endfor %}", {"steps"});
  expect_template_refused("{% for a in range(1000000) %}{% endfor %}", {"range"});
  expect_template_refused("{{ 'x' * 1000000000 }}", {"too large"});
  expect_template_refused("{{ [1] * 1000000000 }}", {"too large"});
  expect_template_refused(
      "{% set ns = namespace(x='x' * 1000) %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
      {"MiB"});
  expect_template_refused(
      "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", {"steps"});
  expect_template_refused("{% set x = 'x' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}", {"MiB"});
  expect_template_refused(
      "{% set x = 'a' * 4000000 %}{% for i in range(100) %}{{ ('a' * 2000000 ~ 'b') in x }}{% endfor %}", {"template"});
  expect_template_refused(
      "{% set x = ['a' * 1000000] * 1000 %}{{ x == x + [1] }}{% for i in range(99) %}{{ x == x }}{{ x|join|length }}{% "
      "endfor %}",
      {"template"});
  expect_template_refused("{% set x = range(99999)|list %}{% for i in x %}{{ i in x }}{% endfor %}", {"steps"});
  std::string twice = "{% set x = [1] %}";  // a list of a few bytes whose text has 2^60
  for (int i = 0; i < 60; ++i) twice += "{% set x = [x, x] %}";
  expect_template_refused(twice + "{{ x }}", {"MiB"});
  expect_template_refused(twice + "{{ x | tojson }}", {"MiB"});
  expect_template_refused(twice + "{{ x == [x] or x in [[x]] or x | string | length }}", {"template"});
  expect_template_refused("{{ ('a,' * 8000000).split(',') | length }}", {"steps"});
  expect_template_refused("{{ ['a' * 9000000, 'a' * 9000000] | join('') | length }}", {"MiB"});
  expect_template_refused("{{ ('a' * 10000000).replace('a', 'bb') | length }}", {"template"});
  expect_template_refused("{{ strftime_now('%s' * 1000) }}", {"strftime_now"});
  expect_refused([] { text_of(std::string(2 << 20, 'x')); }, {"t.jinja", "2097152 bytes"});
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_LT(taken.count(), 60.0);  // seconds, of a machine that does other things and under sanitizers
}

TEST(ChatTemplateLimits, LongConversationsFit) {
  std::string messages;
  for (int i = 0; i < 2000; ++i) {
    messages +=
        cat(i ? "," : "", R"({"role":")", i % 2 ? "assistant" : "user", R"(","content":")", times("word ", 200), "\"}");
  }
  const std::string variables =
      R"({"bos_token":"<s>","eos_token":"</s>","add_generation_prompt":true,"tools":null,"messages":[)" + messages +
      "]}";
  for (const char* name : {"headers.jinja", "chatml_thinking.jinja", "inst_strict.jinja", "macros.jinja"}) {
    const std::string source = test::read_file(cat(FUT_SOURCE_DIR "/tests/chat_templates/", name));
    EXPECT_GT(text_of(source, variables).size(), 2'000'000u) << name;
  }
}

TEST(ChatTemplateLimits, AnyBytesGiveAnAnswerOrAnError) {
  const std::string pieces[] = {
      "{{",   "}}",   "{%",  "%}",   "{#",    "#}",     "-",      "+",         " ",      "\n",   "if ", "for ", "in ",
      "set ", "x",    "=",   "'",    "\"",    "(",      ")",      "[",         "]",      "{",    "}",   "|",    "trim",
      "is ",  "not ", "end", "else", "endif", "endfor", "macro ", "raw",       "endraw", ":",    ",",   ".",    "1",
      "2.5",  "~",    "*",   "\\",   "\xff",  "é",      "loop",   "namespace", "range",  "none", "\0"};
  uint64_t state = 88172645463325252u;
  const auto next = [&](size_t bound) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<size_t>(state % bound);
  };
  const Value variables = values(R"({"x": [1, {"a": "b"}, "é\n"], "messages": []})");
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string source;
    for (size_t n = 1 + next(14); n > 0; --n) source += pieces[next(std::size(pieces))];
    try {
      ChatTemplate(source, "t").render(variables);
      ++accepted;
    } catch (const Error& error) {
      ASSERT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(accepted, 200);
}

}  // namespace
}  // namespace fut
