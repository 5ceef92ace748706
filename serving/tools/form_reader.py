"""Reads an answer in the form in which its model's template writes turns."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

from phasewise.serving.text.turn_form import ID, INDEX, KEY, NAME, ArgumentForm, CallForm, JsonForm, TurnForm
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reader, Reasoning, Text
from phasewise.serving.tools.values import ValueEnd, n_begun, parsed, properties_of, typed, types_of, written

Step = Generator[None, None, bool]
"""A generator that reads one part of an answer and returns True if it was there; yields to await text."""

_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s;,]*")
_KEY_BEFORE = re.compile(r"\s*[\w.-]{0,128}")
_CONTROL = re.compile(r"<(?:\|(?:[^|<>\n]{0,36}(?:\|(?:>\s*)?)?)?)?")
_FIRST_TAG = re.compile(r"<[^<>\s]*>|\S+")
_DIGITS, _WORD = re.compile(r"\d*"), re.compile(r"[\w.:-]*")
_PIECES = re.compile(rf"[{NAME}{ID}{INDEX}{KEY}]|[^\s{NAME}{ID}{INDEX}{KEY}]+")
_FIRST_WORD = re.compile(rf"\s*([^\s{NAME}{ID}{INDEX}{KEY}]*)")
_MOST_TRIES = 64
"""The most passes over an answer's unfinished calls when the answer ends."""

_HEADER_BEGINS = ("<|channel|>", "<|start|>", "to=functions.", "<|constrain|>")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]{1,128})")
_MESSAGE, _MESSAGE_ENDS = "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_LONGEST_HEADER = 512


class TurnReader(Reader):
    """A reader of thoughts, text and calls. It leaves out the white space where the kind of parts changes:
    models put line ends around calls and thoughts; an answer of text alone is left as it is. `functions`:
    schemas of arguments, by name. `in_thought`: the prompt has begun the thoughts. `is_held`: a grammar holds
    every call: arguments are given out as they come, and a call cut off within its head is dropped."""

    def __init__(
        self, turn: TurnForm, functions: Mapping[str, Any], *, in_thought: bool, is_held: bool
    ) -> None:
        self._turn, self._functions, self._in_thought, self._is_held = turn, functions, in_thought, is_held
        self._form = turn.call or CallForm(("", ""), "", "", "")
        self._opening, self._json_form = self._form.section[0] + self._form.opening, self._form.json
        self._is_bare = not trigger_of(self._opening)
        self._longest_name = max(map(len, functions), default=0)
        self._ends = [end.strip() for end in turn.ends]
        self._text, self._at, self._is_final = "", 0, False
        self._parts: list[Part] = []
        self._coming: list[Begun | Piece] = []
        """Parts of a call that is not certain yet."""
        self._waiting: list[Part] = []
        """Calls without a mark, which are text unless their section is closed."""
        self._name, self._n_tries, self._has_begun = "", 0, False
        self._schema: Mapping[str, Any] = {}
        self._steps = self._channels() if turn.is_channelled else self._answer()
        self._kind: type[Part] | None = None
        self._held_space, self._has_changed = "", False

    def feed(self, text: str) -> list[Part]:
        self._text += text
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return self._trimmed(parts)

    def finish(self) -> list[Part]:
        self._is_final = True
        parts = self.feed("")
        if self._held_space and self._kind is Text and not self._has_changed:
            parts.append(Text(self._held_space))
        self._held_space = ""
        return parts

    def _trimmed(self, parts: list[Part]) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if not isinstance(part, Text | Reasoning):
                self._kind, self._held_space, self._has_changed = Call, "", True
                out.append(part)
                continue
            text = part.text
            if type(part) is not self._kind and (self._kind is not None or type(part) is Reasoning):
                text = text.lstrip()
                if not text:
                    continue
                self._held_space, self._has_changed = "", True
            self._kind = type(part)
            held = self._held_space + text
            kept = held.rstrip()
            self._held_space = held[len(kept) :]
            if kept:
                out.append(type(part)(kept))
        return out

    def _answer(self) -> Step:
        """Read thoughts, and text with calls within it."""
        if self._turn.thought[1].strip():
            yield from self._thoughts(*(mark.strip() for mark in self._turn.thought))
        opened, closed = (mark.strip() for mark in self._turn.text)
        trigger = trigger_of(self._opening) or trigger_of(self._form.separator)
        if opened and (yield from self._literal(opened)):
            yield from self._space()
        if self._turn.call is not None and self._is_bare:
            begin = self._at
            yield from self._tag()
            if (yield from self._section()):
                yield from self._tag()
            else:
                self._at = begin
        marks = [mark for mark in (trigger, closed, *self._ends) if mark]
        any_mark = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        while True:
            mark = any_mark.search(self._text, self._at)
            self._take(mark.start() if mark else len(self._text) - self._n_kept(*marks))
            may_go_on = any(other != self._text and other.startswith(self._text) for other in marks)
            if mark is None and self._is_final:
                return True
            if mark is None or (may_go_on and not self._is_final):
                yield
            elif mark[0] == trigger:
                self._at = len(trigger) if self._is_bare else 0
                is_read = yield from self._section()
                is_end = not is_read and mark[0] in self._ends and (yield from self._mark(mark[0], closed))
                if not is_read and not is_end:  # no call begins here
                    self._n_tries += self._is_final
                    self._at = 0
                    self._take(len(self._text) if self._n_tries > _MOST_TRIES else len(trigger))
            elif not (yield from self._mark(mark[0], closed)):
                self._take(self._at + len(mark[0]))

    def _thoughts(self, opening: str, closing: str) -> Step:
        """Read thoughts before an answer, if there are any."""
        yield from self._space()
        is_open = (bool(opening) and (yield from self._word(opening))) or (yield from self._comes(closing))
        if not (is_open or self._in_thought):
            self._at = 0
            return False
        yield from self._up_to((closing,), Reasoning)
        yield from self._space()
        self._take(self._at)
        return True

    def _up_to(self, marks: Collection[str], kind: type[Text] | type[Reasoning] | None) -> Step:
        """Read the text before the first of these marks, for `kind`. False: the answer ends before a mark; a
        whole tag with which a mark begins is then left out."""
        any_mark = re.compile("|".join(map(re.escape, marks)))
        while (mark := any_mark.search(self._text, self._at)) is None and not self._is_final:
            self._take(len(self._text) - self._n_kept(*marks), kind)
            yield
        begun = ((n_begun(self._text, mark), len(_FIRST_TAG.findall(mark)[0])) for mark in marks)
        n_cut = max(n if n >= n_tag else 0 for n, n_tag in begun)
        self._take(mark.start() if mark else len(self._text) - n_cut, kind)
        self._at = len(mark[0]) if mark else len(self._text)
        return mark is not None

    def _n_kept(self, *marks: str) -> int:
        """The number of last characters that may begin one of the marks."""
        return 0 if self._is_final else max((n_begun(self._text, mark) for mark in marks), default=0)

    def _tag(self) -> Step:
        """Skip a control token before calls that have no mark."""
        yield from self._space()
        while (tag := _CONTROL.match(self._text, self._at)) and not self._is_final:
            if tag.end() < len(self._text):
                break
            yield
        self._at = tag.end() if tag and "|>" in tag[0] else self._at
        return True

    def _mark(self, mark: str, closed: str) -> Step:
        """Skip the mark that closes text, and a mark that ends the turn if nothing follows."""
        begin, skipped = self._at, mark
        while skipped:
            self._at += len(skipped)
            yield from self._space()
            skipped = next((end for end in self._ends if self._text.startswith(end, self._at)), "")
        is_last = self._at == len(self._text) or (mark == closed and mark not in self._ends)
        if not is_last:
            self._at = begin
        return is_last

    def _take(self, end: int, kind: type[Text] | type[Reasoning] | None = Text) -> None:
        end = max(end, self._at)
        if end > self._at and kind is not None:
            self._parts.append(kind(self._text[self._at : end]))
        self._text, self._at = self._text[end:], 0

    def _channels(self) -> Step:
        """Read messages in channels, as in gpt-oss."""
        is_header = yield from self._comes(*_HEADER_BEGINS)
        kind: type[Text] | type[Reasoning] = Text
        while True:
            if is_header:
                if (header := (yield from self._header())) is None:
                    return True
                called = _RECIPIENT.search(header)
                kind = Reasoning if "<|channel|>analysis" in header and called is None else Text
                if called is not None and (yield from self._message_of(called[1])):
                    yield from self._up_to(_MESSAGE_ENDS, None)
                    continue
            if not (yield from self._up_to(_MESSAGE_ENDS, kind)):
                return True
            is_header = True

    def _header(self) -> Generator[None, None, str | None]:
        while (end := self._text.find(_MESSAGE, self._at)) < 0:
            if len(self._text) - self._at > _LONGEST_HEADER:
                self._take(len(self._text))
            if self._is_final:
                return None  # an incomplete header says nothing
            yield
        header, self._text, self._at = self._text[self._at : end], self._text[end + len(_MESSAGE) :], 0
        return header

    def _message_of(self, name: str) -> Step:
        """Read the arguments of a call."""
        if name not in self._functions or not (yield from self._comes("{")):
            return False
        self._name = name
        self._give(Begun(name))
        is_read = yield from self._object()
        if self._is_held:
            return True
        yield from self._space()
        is_ended = self._at == len(self._text) or (yield from self._comes(*_MESSAGE_ENDS))
        is_read = self._called(is_read=is_read and is_ended)
        self._at = self._at if is_read else 0
        return is_read

    def _section(self) -> Step:
        """Read all calls that stand together. False: the text is no call."""
        begin, self._has_begun = self._at, False
        if self._json_form is not None and not self._is_held:
            is_read = yield from self._json_section(self._json_form)
        else:
            is_read = yield from self._tagged_section()
        if not is_read and self._is_held and (self._is_final or self._has_begun):
            self._at = len(self._text) if self._is_final else self._at
            return True
        self._at = self._at if is_read else begin
        return is_read

    def _tagged_section(self) -> Step:
        opening, closing = self._form.section
        if not (yield from self._literal(opening)):
            return False
        self._waiting.clear()
        is_first = True
        while True:
            begin, self._has_begun = self._at, False
            if not (yield from self._one()):
                if is_first or (self._is_held and (self._is_final or self._has_begun)):
                    return False
                self._at = begin
                break
            is_first = False
            if self._form.separator.strip() and not (yield from self._literal(self._form.separator)):
                break
            if not (yield from self._comes(self._form.opening)):
                break
        is_closed = not closing.strip() or (yield from self._literal(closing))
        self._parts += self._waiting if is_closed else ()
        return is_closed or not self._is_bare or self._is_held

    def _comes(self, *patterns: str) -> Step:
        """True if the next text may begin one of these patterns."""
        begin, is_there = self._at, False
        yield from self._space()
        for pattern in patterns:
            is_there = is_there or (yield from self._word(_FIRST_WORD.findall(pattern)[0]))
        self._at = begin
        return is_there

    def _one(self) -> Step:
        """Read one call; a held call is given out as it comes."""
        self._name = ""
        if not (yield from self._literal(self._form.opening)) or not self._name:
            return False
        self._give(Begun(self._name))
        if self._form.argument is None:
            is_read = yield from self._object()
        else:
            is_read = yield from self._arguments(self._form.argument)
        is_read = is_read and (yield from self._literal(self._form.closing))
        return self._called(is_read=is_read)

    def _called(self, *, is_read: bool) -> bool:
        """Give out the call that was read, unless calls are held. False: the text is no call."""
        if self._is_held:
            return is_read
        text = "".join(part.text for part in self._coming if isinstance(part, Piece))
        called = _call(self._name, text) if is_read else None
        self._coming.clear()
        if called is not None:
            (self._waiting if self._is_bare else self._parts).append(called)
        return called is not None

    def _give(self, part: Begun | Piece) -> None:
        self._has_begun = True
        (self._parts if self._is_held else self._coming).append(part)

    def _object(self) -> Step:
        yield from self._space()
        return self._text.startswith("{", self._at) and (yield from self._json())

    def _json(self, stops: str = "", quotes: Sequence[str] = ('"',), *, is_given: bool = True) -> Step:
        """Read JSON, or a value that is like it, to its end or to one of `stops`."""
        scan = ValueEnd(stops, quotes)
        while True:
            place, is_end = scan.find(self._text, self._at)
            if is_given and place > self._at:
                self._give(Piece(self._text[self._at : place]))
            self._at = place
            if is_end or self._is_final:
                return is_end
            yield

    def _json_section(self, form: JsonForm) -> Step:
        """Read calls that are JSON as a whole."""
        if not (yield from self._literal(form.lead)):
            return False
        n_calls = 0
        while not (n_calls and form.tail):
            begin = self._at
            yield from self._space(_BETWEEN if n_calls else _SPACE)
            place, calls = self._at, list[Call | None]()
            is_json = self._text[place : place + 1] in ("{", "[")
            if is_json and (yield from self._json(is_given=False)):
                value = parsed(self._text[place : self._at])
                values = value if isinstance(value, list) else [value]
                calls = [self._call_in(item, *form.keys) for item in values]
            if not calls or None in calls:
                self._at = begin
                break
            self._parts += filter(None, calls)
            n_calls += len(calls)
        if n_calls:
            yield from self._literal(form.tail or self._form.section[1])
        return n_calls > 0

    def _call_in(self, value: Any, name_key: str, key: str, depth: int = 0) -> Call | None:
        """The call that a JSON value means; None: no call of one of the functions."""
        if not isinstance(value, dict):
            return None
        if not name_key:
            name = next(iter(value), "")
            return _call(name, value[name]) if len(value) == 1 and name in self._functions else None
        name_key = name_key if name_key in value else "name"
        name = value.get(name_key)
        if isinstance(name, str) and name in self._functions:
            keys = (key, "arguments", "parameters")
            return _call(name, next((value[key] for key in keys if key in value), {}))
        inner = [item for item in value.values() if isinstance(item, dict) and name_key in item]
        return self._call_in(inner[0], name_key, key, 1) if depth == 0 and len(inner) == 1 else None

    def _arguments(self, argument: ArgumentForm) -> Step:
        """Read arguments that are written one by one."""
        self._schema = self._functions[self._name]
        schemas = properties_of(self._schema)
        n_read, closing = 0, self._form.closing.strip()
        while True:
            if n_read and argument.separator.strip() and not (yield from self._literal(argument.separator)):
                break
            is_last = bool(closing) and (yield from self._comes(closing))
            if is_last or not (yield from self._literal(argument.opening)):
                break
            key = yield from self._key(argument)
            if key is None:
                return False
            self._give(Piece(f"{', ' if n_read else '{'}{json.dumps(key, ensure_ascii=False)}: "))
            if not (yield from self._argument(argument, key, schemas.get(key))):
                return False
            n_read += 1
        is_closed = not closing or (yield from self._comes(closing))
        if is_closed:
            self._give(Piece("}" if n_read else "{}"))
        return is_closed

    def _key(self, argument: ArgumentForm) -> Generator[None, None, str | None]:
        sign = _sign_of(argument)
        while (place := self._text.find(sign, self._at, self._at + _LONGEST_HEADER)) < 0:
            if self._is_final or len(self._text) - self._at > _LONGEST_HEADER:
                return None
            yield
        key, self._at = self._text[self._at : place].strip(), place
        return key

    def _argument(self, argument: ArgumentForm, key: str, schema: Any) -> Step:
        """Read one value, with the marks around it."""
        begin, types = self._at, types_of(schema, self._schema)
        for before, behind in sorted(set(argument.values.values()), key=lambda pair: -len(pair[0])):
            self._at = begin
            if not (yield from self._literal(before.rstrip())):
                continue
            kinds = {kind for kind, pair in argument.values.items() if pair[0] == before}
            is_string = kinds == {"string"} or ("string" in kinds and types == {"string"})
            if behind.strip() and (argument.is_raw or not is_string):
                yield from self._word(before[len(before.rstrip()) :])
                if kinds == {"string"}:
                    schema = {"type": "string"}
                elif "string" not in kinds and types == {"string"}:
                    schema = {}
                as_string = is_string and argument.is_raw and self._is_held
                mark = behind.replace(KEY, key)
                return (yield from self._until(argument, mark, schema, is_string=as_string))
            schema = {"type": "object"} if types == {"string"} else schema
            return (yield from self._balanced(argument, schema))
        return False

    def _until(self, argument: ArgumentForm, behind: str, schema: Any, *, is_string: bool) -> Step:
        """Read a value up to its closing mark, which the next argument or the call's end must follow."""
        mark = behind.strip()
        space = behind[: len(behind) - len(behind.lstrip())]
        begin = looked = said = self._at
        if is_string:
            self._give(Piece('"'))
        while True:
            place = self._text.find(mark, looked)
            if place < 0:
                if is_string:
                    n_kept = max(n_begun(self._text, mark), n_begun(self._text, space + mark))
                    said = self._say(said, len(self._text) - n_kept)
                looked = max(looked, len(self._text) - len(mark) + 1)
                if self._is_final:
                    return False
                yield
                continue
            self._at = place + len(mark)
            if not (yield from self._follows(argument)):
                looked = place + 1
                continue
            end = place - len(space) if space and self._text.endswith(space, begin, place) else place
            if is_string:
                self._say(said, end)
                self._give(Piece('"'))
            else:
                value = typed(self._text[begin:end], schema, self._schema, argument)
                self._give(Piece(json.dumps(value, ensure_ascii=False)))
            return True

    def _say(self, begin: int, end: int) -> int:
        if end > begin:
            self._give(Piece(json.dumps(self._text[begin:end], ensure_ascii=False)[1:-1]))
        return max(begin, end)

    def _follows(self, argument: ArgumentForm) -> Step:
        """True if another argument or the end of the call comes next."""
        closing = self._form.closing.strip()
        patterns = list(filter(None, (argument.separator.strip() or argument.opening.strip(), closing)))
        for pattern in patterns:
            is_bare = pattern != closing and not argument.opening.strip()
            if (yield from self._comes(pattern)) and (not is_bare or (yield from self._key_comes(argument))):
                return True
        rest = self._text[self._at :].strip()
        is_cut = self._is_held and self._is_final and any(text.startswith(rest) for text in patterns)
        return is_cut or not closing

    def _key_comes(self, argument: ArgumentForm) -> Step:
        """True if a separator, a key and the mark behind it come next."""
        begin, sign = self._at, _sign_of(argument)
        yield from self._literal(argument.separator)
        yield from self._space(_KEY_BEFORE)
        is_there = yield from self._word(sign)
        self._at = begin
        return is_there

    def _balanced(self, argument: ArgumentForm, schema: Any) -> Step:
        """Read a value without a closing mark, up to the next separator or the call's end."""
        yield from self._space()
        stops = argument.separator.strip()[:1] + self._form.closing.strip()[:1]
        if self._is_held:
            return (yield from self._json(stops))
        begin, quote = self._at, argument.values["string"][1].strip()
        quotes = [quote, '"', "'"] if len(quote) > 1 else ['"', "'"]
        if not (yield from self._json(stops, quotes, is_given=False)):
            return False
        text = self._text[begin : self._at].strip()
        value = typed(text, schema, self._schema, argument)
        if value == text and not (argument.is_raw and text[:1] in "\"'"):
            return False
        self._give(Piece(json.dumps(value, ensure_ascii=False)))
        return True

    def _word(self, word: str) -> Step:
        """Read exactly this text."""
        while len(self._text) - self._at < len(word):
            if self._is_final or not word.startswith(self._text[self._at :]):
                return False
            yield
        is_there = self._text.startswith(word, self._at)
        self._at += len(word) if is_there else 0
        return is_there

    def _space(self, pattern: re.Pattern[str] = _SPACE) -> Step:
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text) or self._is_final:
                return True
            yield

    def _literal(self, pattern: str) -> Step:
        """Read a pattern, or nothing; white space may differ."""
        begin = self._at
        for piece in _PIECES.findall(pattern):
            if piece in (ID, INDEX):
                yield from self._space(_WORD if piece == ID else _DIGITS)
                continue
            yield from self._space()
            if not (yield from self._one_name() if piece == NAME else self._word(piece)):
                self._at = begin
                return False
        return True

    def _one_name(self) -> Step:
        """Read the name of a function; where a call repeats its name, the same name."""
        names = [self._name] if self._name else self._functions
        while True:
            rest = self._text[self._at : self._at + self._longest_name + 1]
            if self._is_final or not any(len(name) > len(rest) and name.startswith(rest) for name in names):
                break
            yield
        longest = max((name for name in names if rest.startswith(name)), key=len, default="")
        self._name = longest or self._name
        self._at += len(longest)
        return bool(longest)


def _call(name: str, arguments: Any) -> Call | None:
    """A call with these arguments, given as an object or a JSON text of one; None for anything else."""
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    text = written(arguments) if isinstance(arguments, dict) else None
    return None if text is None else Call(name, text)


def _sign_of(argument: ArgumentForm) -> str:
    """The shortest mark that may follow a key."""
    return min((before.split()[0] for before, _ in argument.values.values()), key=len)


def trigger_of(opening: str) -> str:
    """The first word of the opening of calls if it is a mark; "": calls are the whole answer."""
    word: str = _FIRST_WORD.findall(opening)[0]
    return "" if not word.strip("{[(\"'}]);,") or word.startswith(("{", "[{", '["')) else word
