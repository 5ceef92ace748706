"""Chat templates of ours in the shapes that other publishers' have: calls, thoughts and ends as these write them."""

# ruff: noqa: E501 (templates)

from __future__ import annotations


def _chat(
    turn: str,
    *,
    user: str = "'<|im_start|>user\\n' + m.content + '<|im_end|>\\n'",
    opening: str = "'<|im_start|>assistant\\n'",
) -> str:
    """A template whose assistant's turns are written by `turn`, from the message `m`."""
    return (
        "{%- if tools %}{{- '<tools>' + (tools | tojson) + '</tools>' }}{%- endif %}{%- for m in messages %}"
        "{%- if m.role != 'assistant' %}{{- " + user + " }}{%- else %}" + turn + "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- " + opening + " }}{%- endif %}"
    )  # fmt: skip


def _each(call: str, between: str = "''") -> str:
    """Each call `c`, with what stands between two."""
    return (
        "{%- for t in m.tool_calls or [] %}{%- set c = t.function %}{%- if not loop.first %}{{- "
        + between
        + " }}{%- endif %}"
        + call
        + "{%- endfor %}"
    )


_JSON = """{{- '{"name": "' + c.name + '", "arguments": ' + (c.arguments if c.arguments is string else c.arguments | tojson) + '}' }}"""
_PAIRS = """{%- for k, v in c.arguments.items() %}{{- ', ' if not loop.first }}{{- k + '=' + (v | tojson) }}{%- endfor %}"""
_QUOTED = """{%- for k, v in c.arguments.items() %}{{- k + '=' }}{%- if v is string %}{{- "'" + v + "'" }}{%- else %}{{- v | tojson }}{%- endif %}{{- ', ' if not loop.last }}{%- endfor %}"""
_TAIL = "{{- '<|im_end|>\\n' }}"

VARIANTS = {
    # A mark before each call and none behind, roles in plain words, a space before ends of text alone.
    "a mark before each call": _chat(
        "{%- if m.tool_calls %}{{- '\\nASSISTANT:' }}" + _each("{{- '<function_call> ' }}" + _JSON) + "{{- '<|endoftext|>' }}"
        "{%- else %}{{- '\\nASSISTANT: ' + m.content + ' <|endoftext|>' }}{%- endif %}",
        user="'\\nUSER: ' + m.content", opening="'\\nASSISTANT: '",
    ),
    "two tokens before each call": _chat(
        "{{- '<|im_start|>assistant\\n' + (m.content or '') }}" + _each("{{- '<|action_start|><|plugin|>\\n' }}" + _JSON + "{{- '<|action_end|>' }}") + _TAIL
    ),
    "a list between tags": _chat(
        "{%- if m.tool_calls %}{{- (m.content or '') + '<tool_calls>[' }}" + _each(_JSON, "', '") + "{{- ']</tool_calls>' }}"
        "{%- else %}{{- '助手：' + m.content }}{%- endif %}{{- '<|eos|>' }}",
        user="'用户：' + m.content + '<|extra_0|>'", opening="''",
    ),
    # Thoughts, text and calls are turns of their own, told apart by the role.
    "turns of roles": _chat(
        "{%- if m.reasoning_content %}{{- '<|im_start|>assistant/think\\n' + m.reasoning_content + '<|im_end|>\\n' }}{%- endif %}"
        "{%- if m.content %}{{- '<|im_start|>assistant\\n' + m.content + '<|im_end|>' + ('\\n' if m.tool_calls else '<|endofturn|>\\n') }}{%- endif %}"
        "{%- if m.tool_calls %}{{- '<|im_start|>assistant -> tool/function_call\\n[' }}" + _each(_JSON, "', '") + "{{- ']<|im_end|><|stop|>\\n' }}{%- endif %}",
        opening="'<|im_start|>assistant'",
    ),
    "python in a fence, text behind": _chat(
        "{{- '<|im_start|>assistant\\n' }}{%- if m.thought %}{{- '<|thought_start|>\\n' + m.thought + '\\n<|thought_end|>\\n' }}{%- endif %}"
        "{%- if m.tool_calls %}{{- '<|tool_call_start|>\\n```python\\n' }}" + _each("{{- c.name + '(' }}" + _PAIRS + "{{- ')\\n' }}") + "{{- '```\\n<|tool_call_end|>\\n' }}{%- endif %}{{- m.content or '' }}" + _TAIL
    ),
    "python in lines": _chat(
        "{{- '<|im_start|>assistant\\n' }}{%- if m.tool_calls %}{{- '<function_calls>\\n' }}" + _each("{{- c.name + '(' }}" + _QUOTED + "{{- ')' }}", "'\\n'")
        + "{{- '\\n</function_calls>' }}{%- else %}{{- m.content }}{%- endif %}" + _TAIL
    ),
    "bare objects": _chat(
        "{{- '<|assistant|>\\n' }}{%- if m.content %}{{- m.content }}{%- else %}" + _each(_JSON, "',\\n'") + "{%- endif %}{{- '<|end|>\\n' }}",
        user="'<|user|>\\n' + m.content + '<|end|>\\n'", opening="'<|assistant|>\\n'",
    ),
    "a bare list": _chat(
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- if m.tool_calls %}{{- '[' }}" + _each(_JSON, "', '") + "{{- ']' }}"
        "{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|eot_id|>' }}",
        opening="'<|start_header_id|>assistant<|end_header_id|>\\n\\n'",
    ),
    "a list with ids of nine": _chat(
        "{%- if m.tool_calls %}{{- '[TOOL_CALLS] [' }}" + _each(
            "{%- if t.id | length < 9 %}{{- raise_exception('nine') }}{%- endif %}{{- (c | tojson)[:-1] + ', \"id\": \"' + t.id[-9:] + '\"}' }}", "', '")
        + "{{- ']' + eos_token }}{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}",
        user="'[INST] ' + m.content + '[/INST]'", opening="''",
    ),
    "a fence for each call": _chat(
        "{{- '<|assistant|>' + (m.content or '') }}{%- if m.tool_calls %}{{- '<|calls_begin|>' }}"
        + _each("{{- '<|call_begin|>function<|sep|>' + c.name + '\\n```json\\n' + (c.arguments | tojson) + '\\n```<|call_end|>' }}", "'\\n'")
        + "{{- '<|calls_end|>' }}{%- endif %}{{- '<|eos|>' }}",
        user="'<|user|>' + m.content", opening="'<|assistant|><think>\\n'",
    ),
    "an action": _chat(
        "{{- '<|CHATBOT|>' }}{%- if m.tool_calls %}{{- 'Action: ```json\\n[\\n' }}"
        + _each("""{{- '    {\\n        "tool_name": "' + c.name + '",\\n        "parameters": ' + (c.arguments | tojson) + '\\n    }' }}""", "',\\n'")
        + "{{- '\\n]```' }}{%- else %}{{- m.content }}{%- endif %}{{- '<|END|>' }}",
        user="'<|USER|>' + m.content + '<|END|>'", opening="'<|CHATBOT|>'",
    ),
    "a response between tags": _chat(
        "{{- '<|im_start|>assistant\\n' }}{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
        "{%- if m.content %}{{- '<response>\\n' + m.content + '\\n</response>\\n' }}{%- endif %}"
        + _each("{{- '\\n<tool_call>\\n' }}" + _JSON + "{{- '\\n</tool_call>\\n' }}") + _TAIL
    ),
    "a tag with the name": _chat(
        "{{- '<|im_start|>assistant\\n' + (m.content or '') }}" + _each("{{- '<function=' + c.name + '>' + (c.arguments | tojson) + '</function>' }}") + "{{- '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}"
    ),
    "messages of kinds": _chat(
        "{%- if m.reasoning_content %}{{- '<|begin|>assistant<|think|>' + m.reasoning_content + '<|end|>' }}{%- endif %}"
        "{%- if m.content %}{{- '<|begin|>assistant<|content|>' + m.content + '<|end|>' }}{%- endif %}"
        "{%- if m.tool_calls %}{{- '<|begin|>assistant<|tool_calls|>' }}"
        + _each("{{- '<|call:begin|>' + t.id + '<|call:name|>' + c.name + '<|call:args|>' + (c.arguments | tojson) + '<|call:end|>' }}")
        + "{{- '<|calls|>' }}{%- endif %}",
        user="'<|begin|>user<|content|>' + m.content + '<|end|>'", opening="'<|begin|>assistant'",
    ),
    "recipients": _chat(
        "{{- '<|a|>' }}{%- if m.content %}{{- '>>>all\n' + m.content }}{%- endif %}" + _each("{{- '>>>' + c.name + '\n' + (c.arguments | tojson) }}") + "{{- '<|eot_id|>' }}",
        opening="'<|a|>'",
    ),
    "a bare name": _chat(
        "{%- if m.tool_calls %}" + _each("{{- '<|assistant|>' + c.name + '\n' + (c.arguments | tojson) }}") + "{%- else %}{{- '<|assistant|>\n' + m.content }}{%- endif %}",
        user="'<|user|>\n' + m.content", opening="'<|assistant|>'",
    ),
    "an element for each key": _chat(
        "{{- '<|im_start|>assistant\\n' + (m.content or '') }}{%- if m.tool_calls %}{{- '<calls>' }}"
        + _each("{{- '<invoke name=\"' + c.name + '\">' }}{%- for k, v in c.arguments.items() %}{{- '<' + k + '>' + (v if v is string else v | tojson) + '</' + k + '>' }}{%- endfor %}{{- '</invoke>' }}")
        + "{{- '</calls>' }}{%- endif %}" + _TAIL
    ),
}  # fmt: skip
