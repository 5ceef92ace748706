"""Finds the form of a template's turns from what it writes around sentinel thoughts, texts and calls."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from phasewise.serving.text.conversation_shapes import THOUGHTS, Write, shapes_lacked, takes_any_id
from phasewise.serving.text.turn_form import (
    CHANNELS,
    ID,
    INDEX,
    KEY,
    NAME,
    ArgumentForm,
    Around,
    CallForm,
    Kind,
    TurnForm,
)

_USER, _TEXT, _THOUGHT = "qusertextq", "qsaidtextq", "qthoughttextq"
_NAMES = ("qfirstnameq", "qsecondnameq")
_KEYS = ("qakeyq", "qbkeyq")
_VALUES = ("qfirstvalueq", "qlastvalueq")
_ARGUMENTS: Mapping[str, Any] = dict(zip(_KEYS, _VALUES, strict=True))
_IDS = ("qcallid01", "qcallid02")
_QUOTED = f"{_VALUES[0]}\"'\n\\{_VALUES[1]}"
_NUMBER = 771258
_LONGEST_END = 120
_LONGEST_TURN = 1 << 14
_ON: tuple[Mapping[str, Any], ...] = ({}, {"enable_thinking": True, "thinking": True})
_TAG = re.compile(r"<[^<>\n]{0,80}>|\[[^\[\]\n]{1,40}\]")
_TOKENS = re.compile(r"<[^<>\d\n]{0,80}>|\d+|\D")
_THINKS = re.compile(r"(?i)([<\[])/?([\w:]*think\w*)([>\]])")
_PROPERTIES = {key: {"type": "string", "description": "d"} for key in _KEYS}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": [*_KEYS]}
_TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": _PARAMETERS}}
    for name in _NAMES
)
"""Functions, as a conversation describes them, whose parameters are the sentinels' keys."""


class _Turn(NamedTuple):
    """A turn: the text from the user's last message on, where the answer starts, a next answer's opening."""

    text: str
    start: int
    opened: str


def _rendered(write: Write, variables: Mapping[str, Any] | None = None, **message: Any) -> _Turn | None:
    question = {"role": "user", "content": _USER}
    turn = {"role": "assistant", "content": "", **message}
    full = write([question, turn], _TOOLS, False, variables or {})
    prompt = write([question], _TOOLS, True, variables or {})
    if full is None or prompt is None or _USER not in prompt or _USER not in full:
        return None
    asked = prompt.rindex(_USER) + len(_USER)
    if len(full) - asked > _LONGEST_TURN:
        return None
    opening = prompt[asked:]
    if write([question], _TOOLS, False, variables or {}) == prompt and _TAG.search(opening):
        full = full.removesuffix(opening)  # the template opens an answer even if not asked to
    start = n_shared(full, prompt)
    begin = max(0, _whole_tags(full, start) - asked)
    return _Turn(full[asked:], begin, prompt[asked + begin :]) if start >= asked else None


def _rendered_calls(
    write: Write, arguments: Mapping[str, Any], n_calls: int = 1, /, *texts: str | None, **message: Any
) -> _Turn | None:
    """A turn with calls, rendered with the arguments as an object or as text, and with the first of
    `texts` (else none, or any) beside which the template writes calls."""
    shown = [value for value in _VALUES if value in json.dumps(arguments)]
    ways = itertools.product((arguments, json.dumps(arguments)), texts or ("", None, _TEXT))
    for given, content in ways:
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
            for call_id, name in list(zip(_IDS, _NAMES, strict=True))[:n_calls]
        ]
        turn = _rendered(write, tool_calls=calls, content=content, **message)
        if turn and _NAMES[0] in turn.text[turn.start :] and all(value in turn.text for value in shown):
            return turn
    return None


def form_of(write: Write, source: str) -> TurnForm:
    """The form of the turns that a template writes. `source`: the template's text."""
    lacks = shapes_lacked(write, _TOOLS)
    any_id = takes_any_id(write, _TOOLS, lacks)
    if all(mark in source for mark in ("<|channel|>", "<|message|>")):
        return CHANNELS._replace(any_id=any_id, lacks=lacks, opening=_opening(write))
    plain = _rendered(write, content=_TEXT)
    field, thought = _thought(write, plain, source)
    text, end = _text(plain, thought)
    call, end_of_calls = _calls(write, plain, thought, text)
    text = _closed_before_calls(write, call, text)
    marks = (mark.strip() for mark in (end, end_of_calls) if len(mark) <= _LONGEST_END)
    ends = tuple(dict.fromkeys(mark for mark in marks if mark))
    return TurnForm(call, thought, text, ends, field, any_id, lacks, _opening(write))


def _opening(write: Write) -> str:
    """The common beginning of the opening of a new answer and of an old answer's turn."""
    question, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _TEXT}
    openings, ends = list[str](), list[int]()
    for variables in (*_ON, {"enable_thinking": False, "thinking": False}):
        asked, prompt = (write([question], (), opens, variables) for opens in (False, True))
        old = write([question, answer, question], (), True, variables)
        if asked is None or prompt is None or old is None or _TEXT not in old:
            continue
        opening = prompt[_whole_tags(prompt, n_shared(asked, prompt)) :]
        before = old[: old.index(_TEXT)]
        before = before[before.find(_USER) :]
        openings.append(opening)
        ends.append(max(n for n in range(len(opening) + 1) if opening[:n] in before))
        ends.append(n_shared(opening, openings[0]))
    whole = [_whole_tags(opening, min(ends)) for opening in openings]
    return openings[0][: min(whole)].strip() if whole else ""


def _thought(write: Write, plain: _Turn | None, source: str) -> tuple[str, Around]:
    for variables in _ON:
        for field in THOUGHTS:
            for turn in (
                _rendered(write, variables, content=_TEXT, **{field: _THOUGHT}),
                _rendered_calls(write, _ARGUMENTS, **{field: _THOUGHT}),
            ):
                marks = _around_thought(turn.text, plain) if turn and _THOUGHT in turn.text else None
                if turn is not None and marks is not None:
                    said = turn.text[turn.start : turn.text.index(_THOUGHT)]
                    opening = said if said.strip() and marks[0].endswith(said) else marks[0]
                    return field, (opening or turn.opened, marks[1])
    return THOUGHTS[0], _thought_in_text(write, source)


def _around_thought(text: str, plain: _Turn | None) -> Around | None:
    before, behind = text.split(_THOUGHT, 1)
    said = plain.text if plain is not None and _TEXT in plain.text else _TEXT
    mirrored = _mirrored(before, behind)
    is_end = mirrored is not None and mirrored[1].strip() in said[said.rindex(_TEXT) :]
    if _TEXT not in behind or not (mirrored is None or is_end):
        return mirrored
    # Marks that do not mirror each other: tags that the turn has only with thoughts.
    between = behind[: behind.index(_TEXT)]
    said = said[: said.index(_TEXT)]
    head = _whole_tags(before, n_shared(before, said))
    head = min(head, plain.start) if plain is not None else head
    rest = said[head:] if said.startswith(before[:head]) else ""
    closing = between.removesuffix(rest) if rest.strip() and between.endswith(rest) else between
    return (before[head:], closing) if closing.strip() else None


def _mirrored(before: str, behind: str) -> Around | None:
    """Marks of thoughts sharing a word: `<think>` and `</think>`, `<|open|>think<|sep|>` and `<|close|>`."""
    tags = list(_TAG.finditer(behind))
    if not tags or behind[: tags[0].start()].strip():
        return None
    middle = behind[tags[0].end() : tags[1].start()] if len(tags) > 1 else ""
    for n_tags, said in ((1, tags[0][0]), (2, middle)):
        for word in sorted(re.findall(r"[^\W_]+", said), key=len, reverse=True):
            n_before = max(0, before.rfind(word, max(0, len(before) - 80)))
            begun = max(before.rfind("<", 0, n_before), before.rfind("[", 0, n_before))
            if begun >= 0 and len(_TAG.findall(before, begun)) == n_tags:
                return before[begun:], behind[: tags[n_tags - 1].end()]
    return None


def _thought_in_text(write: Write, source: str) -> Around:
    """The marks of thoughts that a template removes from old turns; its source names them."""
    marks = dict.fromkeys((m[1] + m[2] + m[3], f"{m[1]}/{m[2]}{m[3]}") for m in _THINKS.finditer(source))
    for opening, closing in marks:
        turn = _rendered(write, content=f"{opening}\n{_THOUGHT}\n{closing}\n\n{_TEXT}")
        if turn is not None and _TEXT in turn.text and _THOUGHT not in turn.text:
            return opening, closing
    return next((pair for pair in marks if pair[1] in source), ("", ""))


def _text(plain: _Turn | None, thought: Around) -> tuple[Around, str]:
    """The marks around text, and the end of a turn of text."""
    if plain is None or _TEXT not in plain.text[plain.start :]:
        return ("", ""), ""
    place = plain.text.index(_TEXT, plain.start)
    before, behind = plain.text[plain.start : place], plain.text[place + len(_TEXT) :]
    before = _behind(before, thought[1])
    tags = list(_TAG.finditer(behind))
    if before.strip() and len(tags) > 1:
        n_tags = max(1, min(len(_TAG.findall(before)), len(tags) - 1))
        cut = tags[n_tags - 1].end()
        return (before, behind[:cut]), behind[cut:]
    return (before if before.strip() else "", ""), behind


def _behind(text: str, mark: str) -> str:
    """The text after the last occurrence of a mark; the whole text if the mark is not in it."""
    return text.rpartition(mark.strip())[2] if mark.strip() else text


def _closed_before_calls(write: Write, call: CallForm | None, text: Around) -> Around:
    """The marks around text, with a closing mark where the template writes one between text and calls."""
    turn = _rendered_calls(write, _ARGUMENTS, 1, _TEXT) if call else None
    if call is None or turn is None or _TEXT not in turn.text or text[1].strip():
        return text
    opening = (call.section[0] + call.opening).partition(NAME)[0]
    behind = _pattern(turn.text[turn.text.rindex(_TEXT) + len(_TEXT) :].partition(_NAMES[0])[0])
    closing = behind.removesuffix(opening) if opening.strip() else ""
    return (text[0], closing) if closing != behind and closing.strip() else text


def _calls(write: Write, plain: _Turn | None, thought: Around, text: Around) -> tuple[CallForm | None, str]:
    """The form of calls, and the end of a turn with calls."""
    turn = _rendered_calls(write, _ARGUMENTS, 2)
    if turn is None or _NAMES[1] not in turn.text:
        turn = _rendered_calls(write, _ARGUMENTS)
    if turn is None:
        return None, ""
    body = turn.text
    place = body.index(_NAMES[0], turn.start)
    before = body[turn.start : place]
    for mark in (thought[1], text[0], _TEXT, text[1]):
        before = _behind(before, mark)
    for is_json in (True, False):
        if spans := list(_spans(body, place, is_json=is_json)):
            call, end = _around_calls(body, before, spans, plain)
            return call if is_json else _with_argument(write, call, body, spans), end
    return None, ""


class _Span(NamedTuple):
    """The positions of a call's name, and of the beginning and end of its arguments."""

    name: int
    begin: int
    end: int


def _spans(body: str, place: int, *, is_json: bool) -> Iterator[_Span]:
    """The spans of calls in a rendered turn: arguments are a JSON object or a JSON string of one, or are
    written one by one, from the first key to the end of the last value."""
    for name in _NAMES:
        place = body.find(name, place)
        key = body.find(_KEYS[0], place)
        last = body.find(_VALUES[1], key)
        if min(place, key, last) < 0:
            return
        if not is_json:
            span = key, last + len(_VALUES[1])
        else:
            begins = [place + mark.start() for mark in re.finditer(r'"(?=\{)|\{', body[place:key])]
            span = next(((begin, end) for begin in begins if (end := _end_of(body, begin))), (0, 0))
        if not span[1]:
            return
        yield _Span(place, *span)
        place = span[1]


def _end_of(body: str, begin: int) -> int:
    """The end of the JSON value at `begin` if it is the sentinels' arguments; else 0."""
    try:
        value, end = json.JSONDecoder().raw_decode(body, begin)
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return 0
    return end if value == _ARGUMENTS else 0


def _around_calls(
    body: str, before: str, spans: Sequence[_Span], plain: _Turn | None
) -> tuple[CallForm, str]:
    """The form of calls, by the patterns around and between them, and the end of the turn."""
    first, behind = spans[0], _pattern(body[spans[-1].end :])
    before, head = _pattern(before), _pattern(body[first.name : first.begin])
    if len(spans) == 1:
        end = _shared_end(behind, plain)
        return CallForm(("", ""), before + head, behind.removesuffix(end), ""), end
    if head != _pattern(body[spans[1].name : spans[1].begin]):
        head = re.sub(r"\d+", INDEX, head)
    between = _pattern(body[first.end : spans[1].name])
    opening = _shared(before, between, from_end=True)
    rest = between[: len(between) - len(opening)]
    closing = _shared(rest, behind)
    behind = behind[len(closing) :]
    end = _shared_end(behind, plain)
    section = before[: len(before) - len(opening)], behind.removesuffix(end)
    if not section[0].strip():
        section, end = ("", ""), behind
    return CallForm(section, opening + head, closing, rest[len(closing) :]), end


def _pattern(text: str) -> str:
    """A text with sentinel names, ids and keys replaced by NAME, ID and KEY."""
    for sign, words in ((NAME, _NAMES), (ID, _IDS), (KEY, _KEYS)):
        for word in words:
            text = text.replace(word, sign)
    return text


def _shared(left: str, right: str, *, from_end: bool = False) -> str:
    """The longest common beginning (or end) of two texts; numbers in them may differ."""
    ours, theirs = _TOKENS.findall(left), _TOKENS.findall(right)
    if from_end:
        ours.reverse()
        theirs.reverse()
    out: list[str] = []
    for a, b in zip(ours, theirs, strict=False):
        if a != b and not (a.isdigit() and b.isdigit()):
            break
        out.append(a if a == b else INDEX)
    return "".join(reversed(out) if from_end else out)


def _shared_end(behind: str, plain: _Turn | None) -> str:
    """The end that a turn with calls shares with a turn of text, from the beginning of a tag on."""
    if plain is None or _TEXT not in plain.text:
        return ""
    said = plain.text[plain.text.rindex(_TEXT) + len(_TEXT) :]
    shared = said[len(said) - n_shared(behind[::-1], said[::-1]) :]
    if len(shared) == len(said):
        return shared
    tag = _TAG.search(shared)
    return shared[tag.start() :] if tag else ""


def _with_argument(write: Write, call: CallForm, body: str, spans: Sequence[_Span]) -> CallForm | None:
    """The form of calls and of their arguments; the call's `opening` ends where the first argument begins."""
    first = spans[0]
    middle = body[first.begin : first.end]
    key, value = middle.find(_VALUES[0]), middle.find(_KEYS[1])
    if min(key, value) < 0 or key > value:
        return None
    string_opening = _pattern(middle[len(_KEYS[0]) : key])
    between = _pattern(middle[key + len(_VALUES[0]) : value])
    lead = call.opening[call.opening.rindex(NAME) + 1 :]
    opening = _shared(lead, between, from_end=True)
    rest = between[: len(between) - len(opening)]
    behind = _pattern(body[first.end :])
    closing = _shared(rest, behind)
    separator = rest[len(closing) :]
    values: dict[Kind, Around] = {"string": (string_opening, closing)}
    examples: dict[Kind, Any] = {
        "number": _NUMBER, "boolean": True, "object": {"qinnerq": _NUMBER}, "array": [_NUMBER]
    }  # fmt: skip
    for kind, example in examples.items():
        values[kind] = _around_value(write, example, separator + opening) or values["string"]
    turn = _rendered_calls(write, {_KEYS[0]: _QUOTED, _KEYS[1]: _VALUES[1]})
    is_raw = turn is None or _QUOTED in turn.text
    if not is_raw:  # the template writes strings as JSON
        values["string"] = string_opening.rstrip("\"'"), closing.lstrip("\"'")
    return call._replace(
        opening=call.opening[: len(call.opening) - len(opening)],
        closing=call.closing.removeprefix(closing),
        argument=ArgumentForm(opening, separator, values, is_raw),
    )


def _around_value(write: Write, value: Any, following: str) -> Around | None:
    """The patterns around a value that is no string. `following`: the pattern from it to the next key."""
    turn = _rendered_calls(write, {_KEYS[0]: value, _KEYS[1]: _VALUES[1]})
    if turn is None:
        return None
    begin = turn.text.find(_KEYS[0], turn.start)
    end = turn.text.find(_KEYS[1], begin)
    written = _pattern(turn.text[begin + len(_KEYS[0]) : end]) if 0 <= begin < end else ""
    if not written.endswith(following):
        return None
    written = written[: len(written) - len(following)]
    match = re.search(r"[{\[][^<]*[}\]]" if isinstance(value, dict | list) else r"(?i)true|771258", written)
    return None if match is None else (written[: match.start()], written[match.end() :])


def _whole_tags(text: str, end: int) -> int:
    """`end`, moved back to the beginning of a tag if `end` lies within one."""
    begun = max(text.rfind("<", max(0, end - 60), end), text.rfind("[", max(0, end - 60), end))
    if begun < 0:
        return end
    tag = _TAG.match(text, begun)
    return begun if tag is not None and tag.end() > end else end


def n_shared(left: str, right: str) -> int:
    """Length of the longest common prefix."""
    return len(os.path.commonprefix((left, right)))  # noqa: RUF071
