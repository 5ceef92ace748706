"""Requests that no honest client sends, made to be expensive, endless or unreadable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


class Bomb(NamedTuple):
    """One request. `allowed`: the statuses that it may have."""

    name: str
    path: str
    body: bytes
    allowed: tuple[int, ...] = (400,)
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)


KINDS = ("unreadable", "floods", "tools", "numbers", "grammars", "elsewhere")


def bombs(model: str, *kinds: str, max_body_bytes: int = 4 * 1024 * 1024) -> Iterator[Bomb]:
    """Those of some kinds, or all. model: a name that the server knows; max_body_bytes: what it takes."""
    most = max_body_bytes - 1024
    by_kind = {
        "unreadable": _unreadable(model, max_body_bytes),
        "floods": _floods(model, most),
        "tools": _tools(model, most),
        "numbers": _numbers(model),
        "grammars": _grammars(model),
        "elsewhere": _elsewhere(model),
    }
    for kind in kinds or KINDS:
        yield from by_kind[kind]


def _unreadable(model: str, most: int) -> Iterator[Bomb]:
    head = b'{"model":"%s","prompt":' % model.encode()
    yield Bomb("10 MB text", COMPLETIONS, head + b'"' + b"a" * 10_000_000 + b'"}', (413,))
    yield Bomb("10 MB of brackets", COMPLETIONS, b"[" * 10_000_000, (413,))
    yield Bomb("empty", COMPLETIONS, b"")
    yield Bomb("null", COMPLETIONS, b"null")
    yield Bomb("not JSON", CHAT, b"max_tokens=3&prompt=a")
    yield Bomb("cut off", COMPLETIONS, head + b'"a')
    yield Bomb("two documents", COMPLETIONS, head + b'"a"}{}')
    yield Bomb("bad UTF-8", COMPLETIONS, head + b'"\xff\xfe\x80"}')
    yield Bomb("UTF-16", COMPLETIONS, (head + b'"a"}').decode().encode("utf-16"))
    yield Bomb("byte order mark", COMPLETIONS, b"\xef\xbb\xbf" + head + b'"a"}')
    yield Bomb("half a surrogate pair", COMPLETIONS, head + b'"\\ud800"}', (200, 400))
    yield Bomb("NUL", COMPLETIONS, head + b'"\\u0000","max_tokens":1}', (200, 400))
    yield Bomb("raw NUL", COMPLETIONS, head + b'"\x00"}')
    for character in (b"[", b'{"a":'):
        yield Bomb(f"100,000 times {character.decode()}", COMPLETIONS, head + character * 100_000)
    yield Bomb("as many brackets as fit", CHAT, b"[" * most)
    deep = b"[" * 100_000 + b"]" * 100_000
    yield Bomb("deep unknown field", COMPLETIONS, head + b'"a","x":' + deep + b"}")
    yield Bomb(
        "deep metadata", CHAT, b'{"model":"m","messages":[{"role":"user","content":"a","x":' + deep + b"}]}"
    )
    yield Bomb("a key twice", COMPLETIONS, head + b'"a","prompt":[],"max_tokens":1}')
    yield Bomb(
        "a long key", COMPLETIONS, head + b'"a","' + b"k" * (most // 2) + b'":1,"max_tokens":1}', (200, 400)
    )


def _floods(model: str, most: int) -> Iterator[Bomb]:
    prompt = b'{"model":"%s","prompt":' % model.encode()
    small = prompt + b'"a","max_tokens":1,'
    chat = b'{"model":"%s","max_tokens":1,"messages":' % model.encode()
    for item in (b"1", b'""', b"[1]", b"null", b"1.5", b"{}", b'[""]', b"true", b'"a"'):
        yield Bomb(f"prompts of {item.decode()}", COMPLETIONS, prompt + _list_of(item, most) + b"}")
        few = _list_of(item, min(most, 250_000))
        yield Bomb(f"some prompts of {item.decode()}", COMPLETIONS, prompt + few + b"}", (400, 429))
        yield Bomb(f"messages of {item.decode()}", CHAT, chat + few + b"}")
        yield Bomb(f"stops of {item.decode()}", COMPLETIONS, small + b'"stop":' + few + b"}")
        content = chat + b'[{"role":"user","content":' + few + b"}]}"
        yield Bomb(f"parts of {item.decode()}", CHAT, content)
    yield Bomb("a million stops", COMPLETIONS, small + b'"stop":' + _list_of(b'"a"', most) + b"}")
    yield Bomb("one text that fills the body", COMPLETIONS, prompt + b'"' + b"a" * (most - 99) + b'"}')
    spaces = prompt + b'"' + b" \\n" * (most // 3 - 99) + b'"}'
    yield Bomb("one text of white space", COMPLETIONS, spaces)
    message = b'[{"role":"user","content":"' + "ä".encode() * (most // 2 - 99) + b'"}]}'
    yield Bomb("one message that fills the body", CHAT, chat + message)
    yield Bomb("many messages", CHAT, chat + _list_of(b'{"role":"user","content":"a"}', 250_000) + b"}")
    for value in (b"1", b"1000", b'"x"', b"null"):
        biases = b",".join(b'"%d":%s' % (token, value) for token in range(200_000))
        flood = small + b'"logit_bias":{' + biases + b"}}"
        yield Bomb(f"biases of {value.decode()}", COMPLETIONS, flood)
    keys = b",".join(b'"k%d":1' % number for number in range(200_000))
    yield Bomb("unknown fields", COMPLETIONS, small + keys + b"}", (200, 400))
    yield Bomb("choices", COMPLETIONS, small + b'"n":128,"prompt":' + _list_of(b'"a"', 4000) + b"}")


def _tools(model: str, most: int) -> Iterator[Bomb]:
    chat = (
        b'{"model":"%s","max_tokens":1,"messages":[{"role":"user","content":"a"}],"tools":' % model.encode()
    )
    responses = b'{"model":"%s","max_output_tokens":1,"input":' % model.encode()
    tool = b'{"type":"function","function":{"name":"%s","parameters":%s}}'
    for n in (129, 10_000):
        yield Bomb(f"{n} tools", CHAT, chat + _list_of(tool % (b"f", b"{}"), n * 70) + b"}")
    distinct = b",".join(tool % (b"f%d" % index, b'{"type":"object"}') for index in range(128))
    for choice in (b"auto", b"required"):
        end = b',"tool_choice":"%s"}' % choice
        yield Bomb(f"128 tools, {choice.decode()}", CHAT, chat + b"[" + distinct + b"]" + end, (200, 400))
        for depth in (50, 150, 1000, 20_000):
            deep = b'{"properties":{"a":' * depth + b"{}" + b"}}" * depth
            body = chat + b"[" + tool % (b"f", deep) + b"]" + end
            yield Bomb(f"a tool {depth} deep, {choice.decode()}", CHAT, body, (200, 400))
        wide = b",".join(b'"k%d":{"pattern":"(a{99}){99}"}' % index for index in range(2000))
        body = chat + b"[" + tool % (b"f", b'{"properties":{' + wide + b"}}") + b"]" + end
        yield Bomb(f"a wide tool, {choice.decode()}", CHAT, body, (200, 400))
        again = b'{"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}}}'
        body = chat + b"[" + tool % (b"f", again) + b"]" + end
        yield Bomb(f"a tool of itself, {choice.decode()}", CHAT, body, (200, 400))
    for name in (b"", b"a b", b"\\u0000", b"\\u001b[2J", b"a\\nb", "ä".encode(), b"a" * 200, b"<tool_call>"):
        yield Bomb(f"a tool named {name!r:.20}", CHAT, chat + b"[" + tool % (name, b"{}") + b"]}")
    yield Bomb(
        "a description that fills the body",
        CHAT,
        chat + b'[{"type":"function","function":{"name":"f","description":"' + b"a" * (most - 999) + b'"}}]}',
    )
    kwargs = b'[],"chat_template_kwargs":{"a":' + b"[" * 150 + b"]" * 150 + b"}}"
    yield Bomb("deep template variables", CHAT, chat + kwargs, (200, 400))
    items = _list_of(b'{"role":"user","content":"a"}', 300_000)
    yield Bomb("many items of input", RESPONSES, responses + items + b"}")
    calls = _list_of(b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}', 300_000)
    yield Bomb("many calls", RESPONSES, responses + calls + b"}")
    yield Bomb("an unknown response", RESPONSES, responses + b'"a","previous_response_id":"x"}')
    flood = b'{"tokens":' + _list_of(b"65", most) + b"}"
    yield Bomb("tokens", "/detokenize", flood)
    yield Bomb("tokens that are none", "/detokenize", b'{"tokens":[99999999999999999999]}')
    yield Bomb(
        "a text to cut that fills the body",
        "/tokenize",
        b'{"prompt":"' + b"a" * (most - 99) + b'"}',
        (200, 400),
    )


def _numbers(model: str) -> Iterator[Bomb]:
    small = b'{"model":"%s","prompt":"a",' % model.encode()
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "logprobs", "repetition_penalty")
    for name in (*names, "presence_penalty", "frequency_penalty"):
        for value in (
            "NaN",
            "-1e999",
            "1e999",
            "-5",
            "1e-400",
            '"1"',
            "true",
            "[]",
            "9" * 5000,
            "1" + "0" * 400,
        ):
            allowed = (200, 400)  # what is infinite to one field is in range for another
            body = small + f'"{name}":{value},"stop":"z"}}'.encode()
            yield Bomb(f"{name} {value[:9]}", COMPLETIONS, body, allowed)
    for seed in ("0", "-1", str(2**64), "1" + "0" * 4000):
        yield Bomb(
            f"seed {seed[:9]}", COMPLETIONS, small + f'"max_tokens":1,"seed":{seed}}}'.encode(), (200,)
        )
    yield Bomb("logit_bias NaN", COMPLETIONS, small + b'"logit_bias":{"5":NaN}}')
    yield Bomb("logit_bias of no token", COMPLETIONS, small + b'"logit_bias":{"999999999":1}}')
    yield Bomb("logit_bias of a huge token", COMPLETIONS, small + b'"logit_bias":{"' + b"9" * 5000 + b'":1}}')
    yield Bomb("token ids out of range", COMPLETIONS, b'{"model":"%s","prompt":[-1]}' % model.encode())
    huge = b'{"model":"%s","prompt":[%s]}' % (model.encode(), b"9" * 4000)
    yield Bomb("a huge token id", COMPLETIONS, huge)


def _grammars(model: str) -> Iterator[Bomb]:
    for name, schema in schema_bombs().items():
        wanted = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}
        body = {"model": model, "prompt": "a", "max_tokens": 8, "response_format": wanted}
        yield Bomb(f"schema: {name}", COMPLETIONS, json.dumps(body).encode(), (200, 400, 429))
    for pattern in PATTERNS:
        wanted = {"regex": pattern}
        body = {"model": model, "prompt": "a", "max_tokens": 8, "structured_outputs": wanted}
        yield Bomb(f"regex: {pattern[:30]}", COMPLETIONS, json.dumps(body).encode(), (200, 400, 429))


def _elsewhere(model: str) -> Iterator[Bomb]:
    yield Bomb("a long path", "/v1/models/" + "x" * 7000, b"", (404, 414), "GET", ())
    yield Bomb("a path upwards", "/v1/models/..%2f..%2fetc%2fpasswd", b"", (404,), "GET", ())
    yield Bomb("a broken escape", "/v1/models/%ff%zz%00", b"", (400, 404), "GET", ())
    yield Bomb("another method", COMPLETIONS, b"{}", (405,), "DELETE", ())
    other = (("Content-Type", "text/plain"),)
    fair = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
    yield Bomb("another content type", COMPLETIONS, fair, (200, 400, 415), headers=other)


PATTERNS = (
    *("((((a{100}){100}){100}){100})", "(a{1000}){1000}", "(a?){1000}a{1000}", "(a|a)*(a*)*b(a+)+c"),
    *("(.*a){20}", "(a|b)*a(a|b){20}", ".*a.{30}", "(" * 3000 + ")" * 3000, "[a-z]{1,99999999999}", "(?=a)b"),
    *(r"(a)\1", "((((", "[", "\\", "a{2,1}", "(?P<n>a)(?P<n>b)", "\\p{Han}{500}", "x" * 100_000),
)


def schema_bombs() -> dict[str, Any]:
    """Schemas that grow when they are compiled, contradict themselves, or name what is not there."""
    text = {"type": "string"}
    bombs: dict[str, Any] = {f"pattern {pattern[:20]}": {**text, "pattern": pattern} for pattern in PATTERNS}
    for n in (200, 1000, 10_000):
        bombs[f"a chain of {n}"] = _chain(n, lambda follow: {"properties": {"x": follow}, "required": ["x"]})
        bombs[f"{n} references in a row"] = _chain(n, lambda follow: follow)
        bombs[f"{n} properties"] = {"properties": {f"p{index}": text for index in range(n)}}
        bombs[f"an enum of {n}"] = {"enum": [f"v{index}" for index in range(n)]}
    for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
        bombs[f"{key} doubles"] = _chain(40, lambda follow, key=key: {key: [follow, follow]})  # type: ignore[misc]
        parts = [
            {key: [{"properties": {f"p{i}": {"const": j}}, "required": [f"p{i}"]} for j in range(3)]}
            for i in range(12)
        ]
        bombs[f"allOf {key}"] = {"allOf": parts}
    bombs |= {
        "nested": json.loads('{"properties":{"a":' * 60 + "{}" + "}}" * 60),
        "itself": {"$ref": "#"},
        "itself, required": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "itself in allOf": {"allOf": [{"$ref": "#"}]},
        "another file": {"$ref": "file:///etc/passwd"},
        "another host": {"$ref": "http://127.0.0.1:1/x.json"},
        "nothing there": {"$ref": "#/$defs/none"},
        "an enum that fills the body": {"enum": ["x" * 1000] * 2000},
        "minLength": {**text, "minLength": 10**9},
        "minItems": {"type": "array", "minItems": 10**18},
        "numbers": {"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 1e-200},
        "multipleOf": {"type": "integer", "multipleOf": 982451653},
        "patternProperties": {"patternProperties": {f".*a{index}.*b{index}.*": text for index in range(200)}},
        "never": {"type": "string", "enum": [1, 2]},
        "no type": {"type": "banana"},
        "a key of 100 kB": {"properties": {"k" * 100_000: text}, "required": ["k" * 100_000]},
        "a special token": {"const": "<|im_end|><|endoftext|></s>"},
        "options": {"x-guidance": {"whitespace_pattern": "((a{99}){99}){99}", "lenient": True}},
    }
    return bombs


def _chain(n: int, link: Any) -> dict[str, Any]:
    definitions = {f"d{index}": link({"$ref": f"#/$defs/d{index + 1}"}) for index in range(n - 1)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{n - 1}": {"type": "null"}}}


def _list_of(item: bytes, n_bytes: int) -> bytes:
    return b"[" + b",".join([item] * (n_bytes // (len(item) + 1) - 1)) + b"]"
