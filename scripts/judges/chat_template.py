#!/usr/bin/env python3
"""What Hugging Face's transformers and Jinja make of chat templates, against what this project makes of them.

    chat_template.py --write                 makes tests/chat_template_vectors.json anew
    chat_template.py                         checks that the file still says what transformers does
    chat_template.py --program build/bin/chat_template_test --templates FOLDER
                                             renders every *.jinja of FOLDER over all conversations on both sides

Needs the PyPI packages transformers and jinja2, no torch. Templates published with models are not part of this tree: put
them into a folder of your own.
"""
import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import transformers.utils.chat_template_utils as reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "chat_template_vectors.json"
TEMPLATES = ROOT / "tests" / "chat_templates"
NOW = [2024, 2, 29, 7, 5, 9]

LONG = " ".join(f"word{i % 97}" for i in range(50))
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "looks a word up, in \"any\" <language>", "parameters": {
        "type": "object", "required": ["word"], "properties": {
            "word": {"type": "string", "description": "the word, e.g. 'naïve'"},
            "languages": {"type": "array", "items": {"type": "string"}},
            "depth": {"type": ["integer", "null"]}}}}},
    {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}},
]


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments, id="abcdefghi"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = {
    "question": [message("user", "What is a sonnet?")],
    "system": [message("system", "  You are terse.\n"), message("user", " Why? ")],
    "turns": [message("user", "Hi"), message("assistant", "Hello! "), message("user", "\n\nAnd  now?\n")],
    "system_turns": [message("system", "Be kind."), message("user", "A"), message("assistant", "B"), message("user", "C"),
                     message("assistant", "D")],
    "empty": [],
    "empty_texts": [message("system", ""), message("user", ""), message("assistant", ""), message("user", "   ")],
    "unicode": [message("system", "Ünïcödé \u2028 e\u0301"), message("user", "\u00a0\u3000日本語 👩‍👩‍👧 \u200bكيف\t\x1c ")],
    "control_text": [message("user", "<|eot_id|><|im_end|>\n<|im_start|>system\n[INST] {{ bos_token }} {% raw %} </s>")],
    "quotes": [message("user", "it's \"quoted\" \\n \\ and 'single' {'a': 1}"), message("assistant", "</think>x<think>")],
    "thinking": [message("user", "Think."), message("assistant", "<think>\nhm\n</think>\n\nDone."), message("user", "More."),
                 message("assistant", "<think>\nhm hm\n</think>\nAgain.", thoughts="kept")],
    "long": [message("system", LONG), message("user", LONG), message("assistant", LONG), message("user", "End?")],
    "wrong_order": [message("user", "one"), message("user", "two")],
    "unknown_role": [message("critic", "boo")],
    "tool_call": [message("user", "Define ode."), message("assistant", None, tool_calls=[call("look_up", {"word": "ode", "depth": 2})]),
                  message("tool", "a poem", tool_call_id="abcdefghi", name="look_up"), message("assistant", "A poem."),
                  message("user", "Thanks")],
    "tool_calls": [message("system", "S"), message("user", "Both."),
                   message("assistant", "", tool_calls=[call("look_up", {"word": "épée", "n": [1, 2.5, None, True]}), call("clock", {})]),
                   message("tool", {"content": {"hour": 7}}, tool_call_id="abcdefghi"),
                   message("tool", "7:05", tool_call_id="123456789")],
    "no_content": [{"role": "user"}],
}


def contexts():
    """All that templates are rendered with, by name."""
    found = {}
    for name, messages in CONVERSATIONS.items():
        base = {"messages": messages, "tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>",
                "add_generation_prompt": messages[-1:] != [] and messages[-1]["role"] != "assistant"}
        found[name] = base
        if name in ("question", "system", "tool_call", "tool_calls", "empty"):
            found[name + "+tools"] = {**base, "tools": TOOLS}
    found["question+no_thinking"] = {**found["question"], "thinking": False, "enable_thinking": False}
    found["system+tools_with_system"] = {**found["system+tools"], "tools_in_user_message": False, "tools_with_user": False}
    found["values"] = {"n": 7, "x": 2.5, "big": 1e16, "small": 1.5e-07, "whole": 3.0, "yes": True, "nothing": None, "s": "Straße",
                       "t": "  a b\tc  ", "list": [3, 1, 2], "words": ["pear", "Apple", "fig"], "none_list": [],
                       "d": {"b": 1, "a": [1, {"c": None}], "q": "it's"},
                       "people": [{"name": "Ann", "age": 30, "tags": ["x"]}, {"name": "bob", "age": 4, "tags": []}, {"name": "Cy"}]}
    return found


# One expression or statement each, over the context "values". What Jinja refuses must be refused, too.
SNIPPETS = """
{{ n }} {{ x }} {{ big }} {{ small }} {{ whole }} {{ yes }} {{ nothing }} {{ missing }}|
{{ list }} {{ d }} {{ words }} {{ [] }} {{ {} }} {{ (1, 'a') }} {{ (1,) }} {{ 1, 2 }}
{{ 1 + 2 * 3 - 4 / 8 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }}
{{ 'a' + 'b' }} {{ 'a' ~ 1 ~ none ~ 2.0 ~ missing ~ [1] }} {{ 'ab' * 3 }} {{ 2 * 'x' }} {{ [1] * 2 }} {{ [1] + [2] }} {{ true + 1 }}
{{ 'a' + 1 }}
{{ missing + 'a' }}
{{ missing.x }}
{{ missing() }}
{{ nothing.x }}{{ nothing['x'] }}{{ n.x }}{{ list.x }}{{ list[9] }}{{ s[99] }}|
{{ d.b }} {{ d['a'] }} {{ d.a[1].c }} {{ d.a.0 }} {{ list[-1] }} {{ list[0] }} {{ s[0] }} {{ s[-1] }} {{ s[4] }}
{{ list[1:] }} {{ list[:-1] }} {{ list[::-1] }} {{ list[::2] }} {{ s[1:3] }} {{ s[::-1] }} {{ s[:-2] }} {{ s[10:] }}| {{ list[5:1] }} {{ list[-100:100] }}
{{ list[::0] }}
{{ n[1:] }}
{{ 1 < 2 }} {{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' < 'b' }} {{ 'a' == 1 }} {{ none == none }} {{ [1] == [1] }} {{ [1] == (1,) }}
{{ 1 < 'a' }}
{{ missing < 1 }}
{{ missing == missing }} {{ missing == none }} {{ missing != 1 }}
{{ 'tra' in s }} {{ 'x' not in s }} {{ 3 in list }} {{ 'b' in d }} {{ 'z' in d }} {{ 'x' in missing }} {{ 1 in [true] }} {{ '' in s }}
{{ 'x' in n }}
{{ 1 in s }}
{{ not true }} {{ not missing }} {{ true and 'x' }} {{ false or 'y' }} {{ '' or 'z' }} {{ 0 and 1 }} {{ not n == 7 }} {{ not 'a' in s and true }}
{{ 'y' if yes else 'n' }} {{ 'y' if none_list }}| {{ 'a' if false else 'b' if false else 'c' }} {{ ('x' if yes) ~ 'z' }}
{{ -n }} {{ +x }} {{ - -3 }} {{ -yes }} {{ -x|int }} {{ -list|length if false }}|
{{ -s }}
{{ t|trim }}| {{ t.strip() }}| {{ t.lstrip() }}| {{ t.rstrip() }}| {{ 'xxaxx'.strip('x') }} {{ 'abcba'|trim('ab') }} {{ 'été'.strip('é') }} {{ missing|trim }}| {{ n|trim }}
{{ list|length }} {{ s|length }} {{ d|count }} {{ missing|length }}
{{ n|length }}
{{ missing|default('d') }} {{ ''|d('e') }}| {{ ''|d('e', true) }} {{ nothing|default('f') }} {{ nothing|default('g', boolean=true) }} {{ d.zzz|default(5) }}
{{ words|join(', ') }} {{ list|join }} {{ people|join('-', attribute='name') }} {{ 'abc'|join('.') }} {{ [none, 1.5, missing]|join('/') }}
{{ 'aBc d'|upper }} {{ 'aBc D'|lower }} {{ 'aBC dE'|capitalize }} {{ 'ab'.upper() }} {{ 'AB'.lower() }} {{ "they're x1y a-b"|string }} {{ 'ab cd'.title() }}
{{ list|first }} {{ list|last }} {{ s|first }} {{ s|last }} {{ []|first }}| {{ d|first }} {{ ''|last }}|
{{ n|string + 'a' }} {{ list|string }} {{ nothing|string }} {{ d|string }}
{{ s|list }} {{ d|list }} {{ 'abc'|reverse }} {{ list|reverse|list }} {{ missing|list }}
{{ words|map('upper')|list }} {{ people|map(attribute='name')|list }} {{ people|map(attribute='age', default=0)|list }} {{ people[:2]|map(attribute='tags.0')|list }} {{ ['a', 'b']|map('replace', 'a', 'c')|join }}
{{ list|select('gt', 1)|list }} {{ list|reject('odd')|list }} {{ [0, 1, '']|select|list }} {{ people|selectattr('age')|map(attribute='name')|list }} {{ people|selectattr('age', 'defined')|list|length }} {{ people|rejectattr('name', 'equalto', 'bob')|map(attribute='name')|join(',') }} {{ people|selectattr('name', 'in', ['Cy', 'bob'])|list|length }}
{{ d|tojson }} {{ s|tojson }} {{ '</script>&\\'"\\n\\t\\x01\\x7fé😀\\u2028'|tojson }} {{ [1.0, 1e16, 2.5, true, none]|tojson }} {{ {}|tojson }} {{ [[]]|tojson }}
{{ d|tojson(indent=2) }} {{ d|tojson(indent=0) }} {{ d|tojson(sort_keys=true) }} {{ d|tojson(separators=(',', ':')) }} {{ 'é😀\\x7f'|tojson(ensure_ascii=true) }} {{ [{}, []]|tojson(indent=4) }} {{ d|tojson(true) }}
{{ missing|tojson }}
{{ '12'|int }} {{ ' -3 '|int }} {{ 'x'|int }} {{ 'x'|int(9) }} {{ 3.9|int }} {{ '4.7'|int }} {{ true|int }} {{ none|int }} {{ '1.5'|float }} {{ 'x'|float }} {{ 2|float }}
{{ 'aXbXc'|replace('X', '-') }} {{ 'aaa'|replace('a', 'b', 2) }} {{ 'aXbX'.replace('X', '') }} {{ 'aaa'.replace('a', 'bb', 1) }}
{{ d|items|list }} {{ missing|items|list }} {{ d|dictsort }} {{ {'b': 2, 'A': 1, 'c': 0}|dictsort }} {{ {'b': 2, 'a': 3}|dictsort(by='value') }} {{ {'b': 2, 'a': 3}|dictsort(reverse=true) }}
{{ words|sort }} {{ words|sort(case_sensitive=true) }} {{ list|sort(reverse=true) }} {{ people|sort(attribute='name')|map(attribute='name')|join(' ') }} {{ ['a', 'A', 'b', 'a']|unique|list }}
{{ 'a\\nb\\n\\nc'|indent }}| {{ 'a\\nb'|indent(2, true) }}| {{ 'a\\n\\nb'|indent(width=1, blank=true) }}| {{ 'a\\nb'|indent('> ') }}| {{ 'a\\n'|indent }}|
{{ '  a  b '.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'abc'.split('x') }} {{ ''.split(',') }} {{ ''.split() }} {{ 'a--b'.split('--')[-1] }}
{{ 'abc'.split('') }}
{{ s.startswith('St') }} {{ s.endswith('x') }} {{ s.startswith(('a', 'S')) }} {{ s.find('ß') }} {{ s.find('e') }} {{ s.find('zz') }} {{ 'abab'.rfind('ab') }} {{ 'abab'.count('ab') }} {{ ', '.join(words) }} {{ 'aXb'.lower().upper() }}
{{ d.items()|list }} {{ d.keys()|list }} {{ d.values()|list }} {{ d.get('b') }} {{ d.get('z') }} {{ d.get('z', 5) }}
{{ d.nomethod() }}
{{ list.append(4) }}
{{ missing is defined }} {{ n is defined }} {{ n is not defined }} {{ missing is undefined }} {{ nothing is none }} {{ s is string }} {{ d is mapping }} {{ list is iterable }} {{ s is iterable }} {{ n is iterable }} {{ d is sequence }} {{ n is number }} {{ yes is number }} {{ yes is integer }} {{ x is float }} {{ yes is boolean }} {{ yes is true }} {{ n is true }} {{ yes is false }} {{ range is callable }} {{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }} {{ n is divisibleby(2) }} {{ n is equalto 7 }} {{ n is eq(8) }} {{ n is ne 8 }} {{ n is gt 3 }} {{ n is le(7) }} {{ 3 is in list }} {{ 3 is not in list }} {{ not n is odd }}
{{ '<a>'|safe }}{% set x = d|tojson|safe %}{{ x }}{{ x if true else 'y' }} {{ none|map('upper')|list }} {{ none|selectattr('a')|list }}
{{ n is nosuchtest }}
{{ n|nosuchfilter }}
{{ nosuchfunction(1) }}
{{ range(3)|list }} {{ range(1, 4)|list }} {{ range(5, 0, -2)|list }} {{ range(0)|list }} {{ dict(a=1, b='x') }}
{{ range(1, 2, 0) }}
{{ range(10000000) }}
{{ 1 // 0 }}
{{ 1 / 0 }}
{{ 'abc' 'def' "ghi" }} {{ 'it\\'s' }} {{ "a\\"b" }} {{ '\\x41\\u00e9\\U0001F600\\101\\n\\t\\\\|\\q' }}
{{ 1.5 }} {{ 0.1 + 0.2 }} {{ 1e3 if false else 100.0 }} {{ 1 / 3 }} {{ 10 / 2 }} {{ 123456789012345680.0 }} {{ 0.00001 }}
{{ {'a': 1, 'b': {'c': [1, 2]}}.b.c[1] }} {{ {'a': 1}['a'] }} {{ {'x': 1,}|length }} {{ [1, 2,]|length }} {{ ((1)) }}
{% for i in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }};{% endfor %}
{% for i in list if i > 1 %}{{ i }}/{{ loop.length }} {% else %}none{% endfor %} {% for i in none_list %}x{% else %}none{% endfor %} {% for i in list if i > 9 %}x{% else %}none{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %} {% for k in d %}{{ k }}{% endfor %} {% for c in s %}{{ c }}.{% endfor %} {% for x in missing %}x{% endfor %}| {% for (a, b) in [(1, 2), [3, 4]] %}{{ a + b }} {% endfor %}
{% for x in n %}{% endfor %}
{% for a, b in [[1, 2, 3]] %}{% endfor %}
{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in [1, 2] %}{% for j in [3, 4] %}{{ loop.index }}{{ loop.depth }}{% endfor %}{{ loop.index }} {% endfor %}
{% set a = 1 %}{% for i in list %}{{ a }}{% set a = i %}{{ a }} {% endfor %}{{ a }} {% if true %}{% set a = 9 %}{% endif %}{{ a }}
{% set a, b = 1, 'x' %}{{ a }}{{ b }} {% set (c, e) = [2, 3] %}{{ c }}{{ e }} {% set f %}[{{ a }}]{% endset %}{{ f }}{{ f|length }}
{% set ns = namespace(x=1) %}{% for i in list %}{% set ns.x = ns.x + i %}{% set ns.y = i %}{% endfor %}{{ ns.x }} {{ ns.y }} {{ ns.z }}| {{ ns['x'] }}
{% set d.x = 1 %}
{% set ns = namespace() %}{% set ns.t = '' %}{% for w in words %}{% set ns.t = ns.t ~ w[0] %}{% endfor %}{{ ns.t }}
{% macro m(a, b=2, c=a) %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(1, c=4) }} {{ m() }} {{ m(b=5, a=6) }} {{ m(1)|length }}
{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{% endmacro %}{{ m(z=2) }}
{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}
{% set late = 1 %}{% macro m() %}{{ late }}{% endmacro %}{% set late = 2 %}{{ m() }} {% for i in [7] %}{% set late = 3 %}{{ m() }}{% endfor %}
{% if n == 1 %}a{% elif n == 7 %}b{% elif true %}c{% else %}d{% endif %} {% if false %}{% else %}e{% endif %} {% if n is odd and not none_list %}f{% endif %}
{% raw %}{{ n }} {% if %} {# c #}{% endraw %}|{%- raw -%}  x  {%- endraw -%}  |
{% generation %}{{ n }}{% set inner = 1 %}{% endgeneration %}{{ inner }}|
{{ raise_exception('no') }}
{{ strftime_now('%d %b %Y %H:%M') }}
{% if true %}
{% if true %}{% endfor %}
{% for i in list %}
{{ n
{{ n }
{{ }}
{% endif %}
{% nosuchblock %}
{{ 'unclosed }}
{# unclosed
{% raw %} unclosed
{{ (1 }}
{{ [1) }}
{{ n is }}
{{ n | }}
{{ n. }}
{{ 1 2 }}
{{ * 2 }}
{% set %}
{% set 1 = 2 %}
{% for in list %}{% endfor %}
{% break %}
{{ ? }}
""".strip("\n").split("\n")

# Over more lines than one: these are about white space between tags and lines.
LINES = [
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
    "a\n  {%- if true %}\n  b\n  {%- endif %}\nc\n\n",
    "a  {% if true -%}\n\n  b  {%- endif %}\n\nc",
    "a {#- c -#} b {# d #} c{#\n#}d {{- n -}} e {%- if true -%} f {%- endif -%} g",
    "y {% if true %}\nz\n{% endif %}   {{ n }}\n  {# comment #}\n  {%+ if true %}p{% endif +%}\n  q\n",
    "{{ n }}\n{%- for i in list %}\n\n{{ i }}\n{%- endfor %}\n\nend\n",
    "  {{ n }}\n  {{- n }}\n{{ n -}}\n  x\n",
    "{# one #}\n{# two -#}\n\n  {#- three #} x\n   {# four #}y\n",
    "\r\n{% if true %}\r\nx\ry{% endif %}\r\n",
    "{% for i in list %}\n  {{ i }}\n{% endfor %}\n",
    "{% for i in list -%}\n  {{ i }}\n{%- endfor %}\n\n\n",
    "  {%+ if true %}\n x\n  {%- endif +%}\n y",
    "\t{% set a = 1 %}\t{{ a }}\n \t {% set a = 2 %}{{ a }}",
    "{% raw %}\n {{ x }}\n{% endraw %}\n z {%- raw +%} {% endraw -%}\n w",
    "{{ {'a': {'b': 1}} }}{{ {'a': '}}'}['a'] }}{{ '%}' }}",
    "{{ 'a\nb' }}{{ 'a\r\nb' }}{{ 'x\\\ny' }}",
    "\u00a0 {% if true %}\u2003x\u2003{%- endif %}\u00a0",
]


def render(source, context):
    """The text, or None where Jinja refuses."""
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(*NOW)

    real, reference.datetime = reference.datetime, Clock
    try:
        return reference._compile_jinja_template(source).render(**context)
    except Exception:  # whatever its kind: ours must refuse as well
        return None
    finally:
        reference.datetime = real


def own_cases():
    cases = []
    for path in sorted(TEMPLATES.glob("*.jinja")):
        for name, context in contexts().items():
            if name != "values":
                cases.append({"template": path.name, "context": name, "expected": render(path.read_text(), context)})
    for source in SNIPPETS + LINES:
        cases.append({"source": source, "context": "values", "expected": render(source, contexts()["values"])})
    return cases


def vectors(cases):
    return {"now": NOW, "contexts": contexts(), "cases": cases}


def foreign_cases(folder):
    CONVERSATIONS["long"] = [{**m, "content": m["content"] * 400} for m in CONVERSATIONS["long"]]
    cases = []
    for path in sorted(pathlib.Path(folder).glob("*.jinja")):
        source = path.read_bytes().decode()
        for name, context in contexts().items():
            if name != "values":
                cases.append({"name": path.name, "source": source, "context": name, "expected": render(source, context)})
    return cases


def run_program(program, data):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(data, file)
        file.flush()
        environment = {**os.environ, "FUT_TEMPLATE_VECTORS": file.name}
        return subprocess.run([program, "--gtest_filter=ChatTemplateVectors.*"], env=environment).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--templates", help="a folder of *.jinja files")
    parser.add_argument("--program", help="the built chat_template_test")
    arguments = parser.parse_args()
    own = vectors(own_cases())
    text = json.dumps(own, indent=1) + "\n"
    if arguments.write:
        VECTORS.write_text(text)
    elif VECTORS.read_text() != text:
        sys.exit(f"{VECTORS} is not what transformers renders: run with --write and look at the difference")
    print(f"{len(own['cases'])} cases of our own, {sum(c['expected'] is None for c in own['cases'])} of them refusals")
    if arguments.program and arguments.templates:
        cases = foreign_cases(arguments.templates)
        print(f"{len(cases)} cases of {len({c['name'] for c in cases})} templates in {arguments.templates}, "
              f"{sum(c['expected'] is None for c in cases)} of them refusals")
        sys.exit(run_program(arguments.program, vectors(cases)))


if __name__ == "__main__":
    main()
