"""Writes golden.json: what Python's jinja2 gives for the templates in cases.json, set up as transformers does.

Run it in this folder with jinja2 installed; the tests read golden.json only.
"""

import datetime
import json

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = datetime.datetime(2026, 3, 7, 9, 5, 3)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_content")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _content(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception
env.globals["strftime_now"] = lambda fmt: NOW.strftime(fmt)

variables = json.load(open("vars.json"))
out = []
for case in json.load(open("cases.json")):
    case = dict(case)
    try:
        case["want"] = env.from_string(case["template"]).render(**variables)
    except Exception as e:  # whatever jinja2 refuses, we refuse
        case["error"] = f"{type(e).__name__}: {e}"
    out.append(case)
json.dump(out, open("golden.json", "w"), ensure_ascii=False, indent=1)
print(len(out), "cases,", sum("error" in c for c in out), "errors")
