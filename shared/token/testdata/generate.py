"""Writes chats.golden.json: the prompts that Python's jinja2 renders for chats.json, set up as transformers does.

Run it in this folder with jinja2 installed, and the folder of model files beside the repository; the tests read the
golden file only.
"""

import datetime
import json

import jinja2
import jinja2.ext
import jinja2.sandbox

MODELS = "../../../../shared/models/"
NOW = datetime.datetime(2026, 3, 7, 9, 5, 3)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
)
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception
env.globals["strftime_now"] = lambda fmt: NOW.strftime(fmt)


def config(folder):
    return json.load(open(MODELS + folder + "/tokenizer_config.json"))


templates = {
    "llama31": ({"bos_token": "<|begin_of_text|>"}, open("llama31.jinja").read()),
    "qwen3": ({}, config("tokenizers/qwen3")["chat_template"]),
    "tiny": ({"bos_token": "<|begin_of_text|>"}, config("meridian-tiny")["chat_template"]),
}
out = []
for chat in json.load(open("chats.json")):
    special, source = templates[chat["template"]]
    golden = {"name": chat["name"], "template": chat["template"]}
    try:
        golden["prompt"] = env.from_string(source).render(
            messages=chat["messages"], tools=chat["tools"], documents=None,
            add_generation_prompt=chat["add_generation_prompt"], **special, **chat["args"],
        )
    except jinja2.exceptions.TemplateError as e:
        golden["error"] = str(e)
    out.append(golden)
json.dump(out, open("chats.golden.json", "w"), ensure_ascii=False, indent=1)
print(len(out), "chats,", sum("error" in g for g in out), "errors")
