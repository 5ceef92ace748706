"""Reads an answer in the form in which its model's template writes turns."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Mapping
from functools import cached_property
from typing import Any

from phasewise.serving.text.turn_form import ID, INDEX, KEY, NAME, ArgumentForm, Around, CallForm, types_of
from phasewise.serving.tools.parts import (
    Begun,
    Call,
    JsonEnd,
    Part,
    Piece,
    Text,
    call,
    call_of,
    n_begun,
    parsed,
)
from phasewise.serving.tools.values import ValueEnd, typed

Step = Generator[None, None, bool]
"""Reads one thing; True if it was there. It yields while more text must come."""

_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s;,]*")
_KEY_BEFORE = re.compile(r"\s*[\w.-]{0,128}")
_DIGITS, _WORD = re.compile(r"\d*"), re.compile(r"[\w.:-]*")
_SIGNS = re.compile(f"([{NAME}{ID}{INDEX}{KEY}])")
_LONGEST_KEY = 512
_MOST_TRIES = 64
"""Most passes over the unfinished calls of an answer at its end."""


class TurnReader:
    """Reads calls of `functions`, by name with the schemas of their arguments, within text.

    is_held: a grammar holds every call, so that its arguments are given out as they come, and what is cut
    within a call's head is nothing. text: the marks around text, which are left out, as `ends` are at the
    end.
    """

    def __init__(
        self,
        form: CallForm | None,
        functions: Collection[str],
        text: Around = ("", ""),
        ends: Collection[str] = (),
        *,
        is_held: bool = False,
    ) -> None:
        self._form, self._is_held = form, is_held
        self._functions: Mapping[str, Any] = (
            functions if isinstance(functions, Mapping) else dict.fromkeys(functions)
        )
        self._marks = [mark.strip() for mark in text]
        self._ends = [end.strip() for end in ends]
        self._text, self._at, self._is_final = "", 0, False
        self._parts: list[Part] = []
        self._coming: list[Begun | Piece] = []
        """A call that is not certain yet."""
        self._name, self._n_tries, self._has_begun = "", 0, False
        self._steps = self._answer()

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._text += text
        return self._run()

    def finish(self) -> list[Part]:
        """The rest."""
        self._is_final = True
        return self._run()

    def _run(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    # Text, and what stands in it

    def _answer(self) -> Step:
        form = self._form
        opening = "" if form is None else form.section[0] + form.opening
        is_bare = not trigger_of(opening)
        trigger = trigger_of(opening) or ("" if form is None else trigger_of(form.separator))
        if self._marks[0] and (yield from self._optional(self._marks[0])):
            yield from self._space()
        if form is not None and is_bare:
            begin = self._at
            yield from self._tag()
            if (yield from self._section(form, self._at)):
                yield from self._tag()
            else:
                self._at = begin
        marks = [mark for mark in (trigger, self._marks[1], *self._ends) if mark]
        any_mark = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        while True:
            mark = any_mark.search(self._text, self._at)
            n_kept = 0 if self._is_final else max((n_begun(self._text, mark) for mark in marks), default=0)
            self._take(mark.start() if mark else max(self._at, len(self._text) - n_kept))
            if mark is None:
                if self._is_final:
                    return True
                yield
            elif mark[0] == trigger and form is not None:
                self._at = len(trigger) if is_bare else 0
                is_read = yield from self._section(form, self._at)
                is_end = not is_read and mark[0] in self._ends and (yield from self._mark(mark[0]))
                if not is_read and not is_end:
                    self._text_from(0, len(trigger))
            elif not (yield from self._mark(mark[0])):
                self._take(self._at + len(mark[0]))

    def _tag(self) -> Step:
        """A control token before calls that need none."""
        yield from self._space()
        begin = self._at
        if (yield from self._word("<|")):
            while (end := self._text.find("|>", self._at, self._at + 40)) < 0:
                if self._is_final or len(self._text) > self._at + 40:
                    self._at = begin
                    return False
                yield
            self._at = end + 2
            yield from self._space()
            return True
        return False

    def _mark(self, mark: str) -> Step:
        """Leaves out the mark that closes text, and one that ends the turn and is the last thing said."""
        begin = self._at
        self._at += len(mark)
        yield from self._space()
        while True:
            rest = self._text[self._at :]
            end = next((end for end in self._ends if rest.startswith(end)), None)
            if end is None:
                break
            self._at += len(end)
            yield from self._space()
        is_last = self._at == len(self._text) or (mark == self._marks[1] and mark not in self._ends)
        if not is_last:
            self._at = begin
        return is_last

    def _take(self, end: int) -> None:
        if end > self._at:
            self._parts.append(Text(self._text[self._at : end]))
        self._text, self._at = self._text[end:], 0

    def _text_from(self, begin: int, least: int) -> None:
        """Take at least `least` characters from `begin` on as text: no call begins there."""
        self._coming.clear()
        self._n_tries += self._is_final
        self._at = begin
        if self._n_tries > _MOST_TRIES:
            self._take(len(self._text))
        else:
            self._take(min(len(self._text), max(least, 1)))

    # Calls

    def _section(self, form: CallForm, begin: int) -> Step:
        """All calls that stand together. False: what began is none."""
        is_bare = not trigger_of(form.section[0] + form.opening)
        self._at, self._has_begun = begin, False
        if form.keys is not None and not self._is_held:
            is_read = yield from self._json_section(form)
        else:
            is_read = yield from self._tagged_section(form, is_bare=is_bare)
        if is_read:
            return True
        if self._is_held and (self._is_final or self._has_begun):
            self._at = len(self._text) if self._is_final else self._at
            return True
        self._at = begin
        return False

    def _tagged_section(self, form: CallForm, *, is_bare: bool) -> Step:
        if not (yield from self._literal(form.section[0])):
            return False
        calls: list[Call] = []
        is_first = True
        while True:
            begin, self._has_begun = self._at, False
            if not (yield from self._one(form, calls)):
                self._coming.clear()
                if is_first or (self._is_held and (self._is_final or self._has_begun)):
                    return False
                self._at = begin
                break
            is_first = False
            if not is_bare:
                self._give_out(calls)
            if form.separator.strip() and not (yield from self._optional(form.separator)):
                break
            if not (yield from self._comes(form.opening)):
                break
        is_closed = not form.section[1].strip() or (yield from self._optional(form.section[1]))
        if is_closed or not is_bare:
            self._give_out(calls)
        return is_closed or not is_bare or self._is_held

    def _give_out(self, calls: list[Call]) -> None:
        self._parts += calls
        calls.clear()

    def _comes(self, pattern: str) -> Step:
        """True if what comes may begin this pattern."""
        begin = self._at
        word = _SIGNS.split(pattern)[0].split()
        yield from self._space()
        is_there = not word or (yield from self._word(word[0]))
        self._at = begin
        return is_there

    def _one(self, form: CallForm, calls: list[Call]) -> Step:
        """One call, for `calls`; one that is held is given out as it comes."""
        self._name = ""
        if not (yield from self._literal(form.opening)) or not self._name:
            return False
        self._give(Begun(self._name))
        if form.argument is None:
            is_read = yield from self._object()
        else:
            is_read = yield from self._arguments(form, form.argument)
        is_read = is_read and (yield from self._literal(form.closing))
        if self._is_held:
            return is_read
        text = "".join(part.text for part in self._coming if isinstance(part, Piece))
        called = call(self._name, parsed(text)) if is_read else None
        self._coming.clear()
        if called is not None:
            calls.append(called)
        return called is not None

    def _give(self, part: Begun | Piece) -> None:
        self._has_begun = True
        (self._parts if self._is_held else self._coming).append(part)

    def _object(self) -> Step:
        yield from self._space()
        if not self._text.startswith("{", self._at):
            return False
        return (yield from self._json(JsonEnd(), ""))

    def _json(self, end: JsonEnd, stops: str) -> Step:
        """JSON up to its end, or to one of `stops`."""
        while True:
            rest = self._text[self._at :]
            n_read = end.push(rest, stops=stops)
            piece = rest if n_read is None else rest[:n_read]
            if piece:
                self._give(Piece(piece))
            self._at += len(piece)
            if n_read is not None or self._is_final:
                return n_read is not None
            yield

    # Calls that are JSON as a whole

    def _json_section(self, form: CallForm) -> Step:
        if not (yield from self._literal(form.lead)):
            return False
        n_calls = 0
        while True:
            begin = self._at
            yield from self._space_like(_BETWEEN if n_calls else _SPACE)
            calls: list[Call] = []
            if self._text[self._at : self._at + 1] in ("{", "["):
                calls = yield from self._json_calls(form)
            if not calls:
                self._at = begin
                break
            self._parts += calls
            n_calls += len(calls)
            if form.tail:
                break
        if n_calls:
            yield from self._optional(form.tail or form.section[1])
        return n_calls > 0

    def _json_calls(self, form: CallForm) -> Generator[None, None, list[Call]]:
        end, begin = JsonEnd(), self._at
        while True:
            n_read = end.push(self._text[self._at :])
            self._at = len(self._text) if n_read is None else self._at + n_read
            if n_read is not None or self._is_final:
                break
            yield
        value = None if n_read is None else parsed(self._text[begin : self._at])
        listed = value if isinstance(value, list) else [value]
        calls = [self._call_in(item, form) for item in listed]
        return [called for called in calls if called is not None] if all(calls) else []

    def _call_in(self, value: Any, form: CallForm, depth: int = 0) -> Call | None:
        if not isinstance(value, dict):
            return None
        name_key, arguments_key = form.keys or ("", "")
        if not name_key:
            name = next(iter(value), "")
            return call(name, value[name]) if len(value) == 1 and name in self._functions else None
        names = frozenset(self._functions)
        name_key = name_key if name_key in value else "name"
        named = {**value, "name": value.get(name_key)}
        called = call_of(named, names, (arguments_key, "arguments", "parameters"))
        if called is None and depth == 0:
            inner = [item for item in value.values() if isinstance(item, dict) and name_key in item]
            called = self._call_in(inner[0], form, 1) if len(inner) == 1 else None
        return called

    # Arguments that are written one by one

    def _arguments(self, form: CallForm, argument: ArgumentForm) -> Step:
        root = self._functions[self._name] or {}
        properties = root.get("properties") if isinstance(root, Mapping) else None
        schemas = properties if isinstance(properties, Mapping) else {}
        n_read = 0
        while True:
            if n_read and argument.separator.strip() and not (yield from self._optional(argument.separator)):
                break
            if (yield from self._closes(form)) or not (yield from self._optional(argument.opening)):
                break
            key = yield from self._key(argument)
            if key is None:
                return False
            self._give(Piece(f"{', ' if n_read else '{'}{json.dumps(key, ensure_ascii=False)}: "))
            if not (yield from self._argument(form, argument, key, schemas.get(key), root)):
                return False
            n_read += 1
        is_closed = not form.closing.strip() or (yield from self._closes(form))
        if is_closed:
            self._give(Piece("}" if n_read else "{}"))
        return is_closed

    def _closes(self, form: CallForm) -> Step:
        return bool(form.closing.strip()) and (yield from self._comes(form.closing))

    def _key(self, argument: ArgumentForm) -> Generator[None, None, str | None]:
        sign = _sign_of(argument)
        while True:
            place = self._text.find(sign, self._at, self._at + _LONGEST_KEY)
            if place >= 0:
                key, self._at = self._text[self._at : place].strip(), place
                return key
            if self._is_final or len(self._text) - self._at > _LONGEST_KEY:
                return None
            yield

    def _argument(
        self, form: CallForm, argument: ArgumentForm, key: str, schema: Any, root: Mapping[str, Any]
    ) -> Step:
        """One value, with what stands around it."""
        around = sorted(set(argument.values.values()), key=lambda pair: -len(pair[0]))
        begin = self._at
        for before, behind in around:
            self._at = begin
            if not (yield from self._literal(before.rstrip())):
                continue
            behind = behind.replace(KEY, key)
            kinds = {kind for kind, pair in argument.values.items() if pair[0] == before}
            types = types_of(schema, root)
            is_string = kinds == {"string"} or ("string" in kinds and types == {"string"})
            if behind.strip() and (argument.is_raw or not is_string):
                yield from self._line_end(before)
                text_schema = {"type": "string"} if kinds == {"string"} else schema
                as_string = is_string and argument.is_raw and self._is_held
                if "string" not in kinds and types == {"string"}:
                    text_schema = {}
                return (
                    yield from self._until(form, argument, behind, text_schema, root, is_string=as_string)
                )
            if self._is_held:
                yield from self._space()
                stops = (argument.separator.strip() + form.closing.strip())[:1] + form.closing.strip()[:1]
                return (yield from self._json(JsonEnd(), stops))
            return (yield from self._balanced(form, argument, schema, root))
        return False

    def _line_end(self, before: str) -> Step:
        """Leaves out the line end that stands before a value."""
        space = before[len(before.rstrip()) :]
        while space and space.startswith(self._text[self._at :]) and self._text[self._at :] != space:
            if self._is_final:
                return False
            yield
        if space and self._text.startswith(space, self._at):
            self._at += len(space)
        return True

    def _until(
        self,
        form: CallForm,
        argument: ArgumentForm,
        behind: str,
        schema: Any,
        root: Mapping[str, Any],
        *,
        is_string: bool,
    ) -> Step:
        """A value up to its closing mark, behind which the next argument or the call's end comes."""
        mark = behind.strip()
        space = behind[: len(behind) - len(behind.lstrip())]
        begin = looked = self._at
        said = begin
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
            if not (yield from self._follows(form, argument)):
                looked = place + 1
                continue
            self._at = place + len(mark)
            end = place - len(space) if space and self._text.endswith(space, begin, place) else place
            if is_string:
                self._say(said, end)
                self._give(Piece('"'))
            else:
                value = typed(self._text[begin:end], schema, root, argument)
                self._give(Piece(json.dumps(value, ensure_ascii=False)))
            return True

    def _say(self, begin: int, end: int) -> int:
        if end > begin:
            self._give(Piece(json.dumps(self._text[begin:end], ensure_ascii=False)[1:-1]))
        return max(begin, end)

    def _follows(self, form: CallForm, argument: ArgumentForm) -> Step:
        """True if another argument or the end of the call comes."""
        begin = self._at
        patterns = [
            text for text in (argument.separator.strip() or argument.opening, form.closing) if text.strip()
        ]
        for pattern in patterns:
            is_bare = pattern is not form.closing and not argument.opening.strip()
            if (yield from self._comes(pattern)) and (not is_bare or (yield from self._key_comes(argument))):
                return True
        rest = self._text[begin:].strip()
        is_cut = self._is_held and self._is_final and any(text.strip().startswith(rest) for text in patterns)
        return is_cut or not form.closing.strip()

    def _key_comes(self, argument: ArgumentForm) -> Step:
        """True if a separator, a key and what stands behind it come: no mark says so before them."""
        begin, sign = self._at, _sign_of(argument)
        yield from self._literal(argument.separator)
        yield from self._space_like(_KEY_BEFORE)
        is_there = yield from self._word(sign)
        self._at = begin
        return is_there

    def _balanced(self, form: CallForm, argument: ArgumentForm, schema: Any, root: Mapping[str, Any]) -> Step:
        """A value that nothing closes: up to the next separator or the call's end."""
        begin, scan = self._at, ValueEnd(argument, form)
        while True:
            end = scan.find(self._text, begin)
            if end is not None:
                break
            if self._is_final:
                return False
            yield
        self._at = end
        types = types_of(schema, root)
        text = self._text[begin:end].strip()
        value = typed(text, {"type": "object"} if types == {"string"} else schema, root, argument)
        if value is text and parsed(text) is None and not argument.is_raw:
            return False
        if isinstance(value, str) and value == text and text[:1] not in "\"'":
            return False
        self._give(Piece(json.dumps(value, ensure_ascii=False)))
        return True

    # Texts that are known

    def _word(self, word: str) -> Step:
        """Exactly this text."""
        while len(self._text) - self._at < len(word):
            if self._is_final or not word.startswith(self._text[self._at :]):
                return False
            yield
        is_there = self._text.startswith(word, self._at)
        self._at += len(word) if is_there else 0
        return is_there

    def _space(self) -> Step:
        return (yield from self._space_like(_SPACE))

    def _space_like(self, pattern: re.Pattern[str]) -> Step:
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text) or self._is_final:
                return True
            yield

    def _literal(self, pattern: str) -> Step:
        """A pattern; white space may differ."""
        for piece in _SIGNS.split(pattern):
            if piece == NAME:
                yield from self._space()
                if not (yield from self._one_name()):
                    return False
            elif piece in (ID, INDEX):
                yield from self._space_like(_WORD if piece == ID else _DIGITS)
            else:
                for word in piece.split():
                    yield from self._space()
                    if not (yield from self._word(word)):
                        return False
        return True

    def _optional(self, pattern: str) -> Step:
        """The same, or nothing is read."""
        begin = self._at
        is_there = yield from self._literal(pattern)
        self._at = self._at if is_there else begin
        return is_there

    @cached_property
    def _longest_name(self) -> int:
        return max(map(len, self._functions), default=0)

    def _one_name(self) -> Step:
        """The name of a function; where a call has it twice, the same again."""
        names = [self._name] if self._name else self._functions
        while True:
            rest = self._text[self._at : self._at + self._longest_name + 1]
            if self._is_final or not any(len(name) > len(rest) and name.startswith(rest) for name in names):
                break
            yield
        longest = max((name for name in names if rest.startswith(name)), key=len, default=None)
        if longest is None:
            return False
        self._name = longest
        self._at += len(longest)
        return True


def _sign_of(argument: ArgumentForm) -> str:
    """The shortest mark behind a key."""
    return min((before.split()[0] for before, _ in argument.values.values()), key=len)


def trigger_of(opening: str) -> str:
    """The first word of what opens calls, where it is a mark; "": calls are the whole answer."""
    words = _SIGNS.split(opening)[0].split()
    word = words[0] if words else ""
    return "" if not word.strip("{[(\"'}]);,") or word.startswith(("{", "[{", '["')) else word
