"""Templates in the syntax of four model families, and conversations to render with them."""

from __future__ import annotations

from typing import Any

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_STYLE = """{{- bos_token }}
{%- set today = date_string if date_string is defined else "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + today + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}}
        {%- endfor %}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
QWEN_STYLE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.looking = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set reasoning = reasoning.lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.last or loop.index0 > ns.last_query %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>' ~ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MISTRAL_STYLE = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{% for message in loop_messages %}
    {% if message["role"] == "user" %}
        {% if loop.last and system_message is defined %}
            {{ "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {% else %}
            {{ "[INST] " + message["content"] + "[/INST]" }}
        {% endif %}
    {% else %}
        {% generation %}{{ " " + message["content"] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
{# a comment #}
{%- for name, value in {"b": 1, "a": [1.5, none, true]}.items() %}{{ name }}={{ value }};{% endfor %}
{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice("m") }}{{ missing }}{{ missing ~ "!" }}
{% for x in range(9) %}
{%- if x == 5 %}{% break %}{% endif %}{{ loop.cycle("o", "e") }}{{ loop.revindex }}{{ loop.last }}
{% endfor %}
{{ [3, 1, 2] | sort | join("-") }}{{ "%s and %d" | format("x", 3) }}{{ "a {} b".format(1) }}
{{ "x" * 3 }}{{ 7 // 2 }}{{ "%05.1f" % 2.25 }}{{ "ab".center(6) }}{{ none }}{{ 1.0 }}{{ [1, "a"] }}
{{ messages | selectattr("role", "equalto", "user") | map(attribute="content") | list | length }}
{{ "a\\nb" | indent(2) }}{{ " x " | trim | upper | replace("X", "<>&'") }}{{ {"é": "<a href='x'>"} | tojson }}
"""
TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3_STYLE, "qwen": QWEN_STYLE, "mistral": MISTRAL_STYLE}

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "required": ["größe"]}},
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "<b>&'\"\\ {{ x }} 😀"}],
    [{"role": "user", "content": "one\n\ntwo  "}, {"role": "assistant",
     "content": "<think>\nhm\n</think>\n\nyes"}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>"}, {"role": "user",
     "content": "c" * 1000}, {"role": "assistant", "content": "<think>d</think>e"}],
]  # fmt: skip
WITH_TOOLS: list[dict[str, Any]] = [
    *CONVERSATIONS[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"größe": 1}}}],
    },
    {"role": "tool", "content": "sunny"},
]


def chats_for(name: str) -> list[dict[str, Any]]:
    """Keyword arguments of transformers' apply_chat_template, for one of TEMPLATES."""
    chats = [
        {"conversation": conversation, "add_generation_prompt": prompt}
        for conversation in CONVERSATIONS
        for prompt in (False, True)
    ]
    if name in ("llama3", "qwen"):
        chats.append({"conversation": WITH_TOOLS, "tools": [TOOL], "add_generation_prompt": True})
        chats.append(
            {"conversation": CONVERSATIONS[0], "enable_thinking": False, "add_generation_prompt": True}
        )
    return chats
