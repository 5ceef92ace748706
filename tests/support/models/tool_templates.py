"""Chat templates of ours, one for each format of tool calls, and conversations that they write out."""

# ruff: noqa: E501 (templates)

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, NamedTuple

from phasewise.serving.text.chat_template import ChatTemplate
from phasewise.serving.text.turn_form import TurnForm
from phasewise.serving.tools.parts import Call, Part, Reasoning, Text
from phasewise.serving.tools.values import written

HERMES = """{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA_JSON = """{%- if tools %}{{- tools | tojson }}{%- endif %}{#- <|python_tag|> -#}
{%- for message in messages %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{%- if not loop.first %}{{- '; ' }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson }}{{- '}' }}{%- endfor %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

PYTHONIC = """{%- if tools %}{{- tools | tojson }}{%- endif %}{#- [func_name1(params_name1=value)] -#}
{%- for message in messages %}{{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' }}
{{- message.content }}
{%- if message.tool_calls %}{{- '[' }}
{%- for call in message.tool_calls %}{%- if not loop.first %}{{- ', ' }}{%- endif %}{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}{%- if not loop.first %}{{- ', ' }}{%- endif %}
{{- key + '=' }}{{- value | tojson }}{%- endfor %}{{- ')' }}{%- endfor %}{{- ']' }}{%- endif %}
{{- '<|eot|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}
{%- endif %}"""

MISTRAL_LIST = """{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- else %}{{- message.content }}{%- if message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{%- if not loop.first %}{{- ', ' }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{%- endfor %}{{- ']' }}{%- endif %}{{- eos_token }}{%- endif %}{%- endfor %}"""

MISTRAL_NAMED = """{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- else %}{{- message.content }}{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{- call.function.arguments | tojson }}{%- endfor %}
{{- eos_token }}{%- endif %}{%- endfor %}"""

GPT_OSS = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}{%- if message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- else %}{{- '<|start|>assistant' }}
{%- if message.reasoning_content %}
{{- '<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|><|start|>assistant' }}{%- endif %}
{%- if message.tool_calls %}{%- if message.content %}
{{- '<|channel|>commentary<|message|>' + message.content + '<|end|><|start|>assistant' }}{%- endif %}
{%- for call in message.tool_calls %}{%- if not loop.first %}{{- '<|start|>assistant' }}{%- endif %}
{{- '<|channel|>commentary to=functions.' + call.function.name + ' <|constrain|>json<|message|>' }}
{{- call.function.arguments | tojson }}{{- '<|call|>' }}{%- endfor %}
{%- else %}{{- '<|channel|>final<|message|>' + message.content + '<|return|>' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

_HEAD = """{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}"""
_TAIL = """{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

PARAMETERS = (
    _HEAD
    + """{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n<function=' + call.function.name + '>' }}
{%- for key, value in call.function.arguments.items() %}{{- '\\n<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}{{- '\\n</parameter>' }}{%- endfor %}
{{- '\\n</function>\\n</tool_call>' }}{%- endfor %}"""
    + _TAIL
)

SECTION_OF_PARAMETERS = (
    _HEAD
    + """{%- if message.tool_calls %}{{- '\\n<x:calls>' }}{%- for call in message.tool_calls %}
{{- '\\n<invoke name="' + call.function.name + '">' }}{%- for key, value in call.function.arguments.items() %}
{{- '\\n<parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}
{{- value if value is string else value | tojson }}{{- '</parameter>' }}{%- endfor %}{{- '\\n</invoke>' }}{%- endfor %}
{{- '\\n</x:calls>' }}{%- endif %}"""
    + _TAIL
)

KEYS_AND_VALUES = (
    _HEAD
    + """{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{- '<arg_key>' + key + '</arg_key><arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>' }}{%- endfor %}{{- '</call>' }}{%- endfor %}"""
    + _TAIL
)

NUMBERED = (
    _HEAD
    + """{%- if message.tool_calls %}{{- '<|calls|>' }}{%- for call in message.tool_calls %}
{{- '<|call|>functions.' + call.function.name + ':' ~ loop.index0 ~ '<|args|>' + (call.function.arguments | tojson) }}
{{- '<|/call|>' }}{%- endfor %}{{- '<|/calls|>' }}{%- endif %}"""
    + _TAIL
)

NAME_IS_KEY = (
    _HEAD
    + """{%- if message.tool_calls %}{{- '<|tools|>[' }}{%- for call in message.tool_calls %}
{%- if not loop.first %}{{- ', ' }}{%- endif %}{{- '{"' + call.function.name + '": ' + (call.function.arguments | tojson) + '}' }}
{%- endfor %}{{- ']<|/tools|>' }}{%- endif %}"""
    + _TAIL
)

ENDS = ("<|im_end|>\n", "<|eot_id|>", "<|eot|>", "</s>", "<|call|>", "<|return|>")

TEMPLATES = {
    "hermes": HERMES,
    "llama3-json": LLAMA_JSON,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL_LIST,
    "mistral-named": MISTRAL_NAMED,
    "gpt-oss": GPT_OSS,
    "parameters": PARAMETERS,
    "section-of-parameters": SECTION_OF_PARAMETERS,
    "keys-and-values": KEYS_AND_VALUES,
    "numbered": NUMBERED,
    "name-is-key": NAME_IS_KEY,
}
NAMES: dict[str, Any] = {"get_weather": {}, "search-web": {}, "f": {}, "set.value": {}}
_ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Paris"},
    {"city": "São Paulo", "unit": None, "days": 3},
    {"q": 'quotes " and \\ and \n lines', "n": -1.5},
    {"q": "</tool_call> [TOOL_CALLS] ]) }} {"},
    {"a": {"b": [1, 2, {"c": "d"}], "e": {}}, "f": []},
    {"on": True, "off": False, "big": 12345678901234567890, "small": 1e-9},
    {"emoji": "🙂👩‍💻", "tab": "\t", "slash": "a/b"},
    {"matrix": [[1, 2], [3, 4]], "empty": "", "spaces": "  a  "},
    {"nested": [[[{"deep": [True, None]}]]]},
    {"html": "<b>&amp;</b><!-- -->", "sql": "SELECT 'x'; --"},
    {"backslashes": "C:\\\\temp\\\\", "quote_at_end": 'say "hi"'},
    {"code": "def f(x):\n    return [x, '(']\n"},
]


_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        key: {"type": ["string", "null"] if value is None else _TYPES[type(value)]}
        for arguments in _ARGUMENTS
        for key, value in arguments.items()
    },
}
FUNCTIONS = dict.fromkeys(sorted(NAMES), SCHEMA)


class Pair(NamedTuple):
    """An answer as a model of a format would write it, and what it says."""

    format: str
    answer: str
    parts: list[Part]


def pairs() -> list[Pair]:
    """Answers of every format that its template wrote out, with one to three calls, text and thoughts."""
    return [pair for name in TEMPLATES for pair in _pairs_of(name)]


def _pairs_of(name: str) -> list[Pair]:
    only_calls = name in ("llama3-json", "pythonic")
    thinks = name not in ("llama3-json", "pythonic", "mistral", "mistral-named")
    thoughts = ("", "Let me see.\n\nWhat is <asked>?") if thinks else ("",)
    texts = ("",) if only_calls else ("", "I look it up: 1 < 2 & [3].")
    pairs = []
    for (index, arguments), text, thought in itertools.product(enumerate(_ARGUMENTS), texts, thoughts):
        names = sorted(NAMES)
        calls = [
            (
                names[(index + n) % len(names)],
                _ARGUMENTS[(index + n * 2) % len(_ARGUMENTS)] if n else arguments,
            )
            for n in range(1 + index % 3)
        ]
        if name == "gpt-oss":
            calls = calls[:1]
        pairs.append(_pair(name, text, thought, calls))
    plain = ("Hello.", "Use {braces} and [lists](x)", "a\n\nb < c > d")
    return pairs + [_pair(name, text, thoughts[-1], []) for text in plain]


@cache
def turn_form(name: str) -> TurnForm:
    """The form that is derived from one of them."""
    return _template(name).turn_form()


@cache
def _template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})


def _pair(name: str, text: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> Pair:
    template = _template(name)
    question = [{"role": "user", "content": "What?"}]
    answer: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": thought}
    if calls:
        answer["tool_calls"] = [
            {"id": f"call{n}0000", "type": "function", "function": {"name": called, "arguments": arguments}}
            for n, (called, arguments) in enumerate(calls)
        ]
    prompt = template.render(question)
    said = template.render([*question, answer], add_generation_prompt=False).removeprefix(prompt)
    for end in ENDS:
        said = said.removesuffix(end)
    parts: list[Part] = [Reasoning(thought)] if thought else []
    parts += [Text(text)] if text else []
    parts += [Call(called, written(arguments) or "") for called, arguments in calls]
    return Pair(name, said, parts)
