"""A jinja2 environment for templates from strangers: nothing to reach, little to spend.

jinja2's immutable sandbox keeps a template away from Python; it does not keep it from looping for ever or
from filling memory. Here every loop round and every call takes a step, every text is counted before it is
made, and what could make much at once (repetition, padding, formatting, nested lists written out) is weighed
first. The rest behaves as in transformers' `apply_chat_template`.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from string import Formatter
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment, modifies_known_mutable
from jinja2.visitor import NodeTransformer

from phasewise._json import read_json
from phasewise._words import counted

MAX_SOURCE_CHARS = 1 << 20
MAX_STEPS = 1 << 22
MAX_MADE_CHARS = 1 << 28
"""Characters in all texts made along the way; building a long answer piece by piece makes it many times."""
MAX_OUTPUT_CHARS = 1 << 24
MAX_RANGE = 100_000
"""jinja2's own limit for `range`."""
MAX_SECONDS = 5.0
"""Processor time of the thread that renders: a busy machine stops no template."""


class SpentError(jinja2.TemplateRuntimeError):
    """A template wanted more than it may have."""


class RefusedError(jinja2.TemplateRuntimeError):
    """The template's own `raise_exception`."""


class Budget:
    """The budget that one rendering has left. `with budget:` makes it the one that pays."""

    def __init__(self, given: object = None) -> None:
        """given: lists and dicts of the conversation, which the template may not change."""
        self._given = given
        self._steps = MAX_STEPS
        self._chars = MAX_MADE_CHARS
        self._began_s = time.thread_time()
        self._asked_s = time.monotonic() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """Pay for work of a bounded size."""
        self._steps -= count
        if self._steps < 0 or (time.monotonic() > self._asked_s and self._is_late()):
            raise SpentError("it ran for too long")

    def _is_late(self) -> bool:
        """True if the thread has used all its time; else note when it can be so at the earliest."""
        left_s = self._began_s + MAX_SECONDS - time.thread_time()
        self._asked_s = time.monotonic() + left_s
        return left_s < 0

    def make(self, chars: int) -> None:
        """Pay for a text before it is made."""
        self._chars -= chars
        if self._chars < 0 or chars > MAX_OUTPUT_CHARS:
            raise SpentError("it wrote too much")

    def is_own(self, value: object) -> bool:
        """True of a list or a dict that the template has made itself."""
        return id(value) not in self._given_ids

    @functools.cached_property
    def _given_ids(self) -> frozenset[int]:
        ids, left = set(), [self._given]
        while left:
            value = left.pop()
            if isinstance(value, Mapping | list | tuple):
                ids.add(id(value))
                left += value.values() if isinstance(value, Mapping) else value
        return frozenset(ids)

    def __enter__(self) -> Budget:
        self._token = _BUDGET.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _BUDGET.reset(self._token)


_BUDGET: ContextVar[Budget] = ContextVar("budget")


def compile_template(source: str) -> jinja2.Template:
    """`source` as a template that pays from the current Budget. Raises what jinja2 and Python's parser do."""
    if len(source) > MAX_SOURCE_CHARS:
        raise jinja2.TemplateSyntaxError(
            f"it has {counted(len(source), 'character')}; {MAX_SOURCE_CHARS} are allowed", 1
        )
    environment = _Environment()
    tree = _Counting().visit(environment.parse(source))
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Counting(NodeTransformer):
    """Makes every loop, every joining with `~` and all text that stands in the template pay."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # printed, and so paid for, like any value

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")


def _filtered(value: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _Rounds:
    """An iterable that pays for each item; it has a length where the original has one."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        budget = _BUDGET.get()
        for item in self._items:
            budget.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


def _counted(items: Iterable[Any]) -> Iterable[Any]:
    return _Rounds(items) if hasattr(items, "__len__") else iter(_Rounds(items))


def _joined(parts: Sequence[Any]) -> str:
    _weigh(parts)
    return "".join(map(str, parts))


def _weigh(value: object) -> None:
    """Pay for writing `value` out. Lists within lists can be far larger than the memory they take."""
    if type(value) is int and value.bit_length() > 1 << 12:
        raise SpentError("it made too large a number")
    if isinstance(value, str):
        _BUDGET.get().make(len(value))
    elif isinstance(value, Mapping):
        _BUDGET.get().step(1 + len(value))
        for key, item in value.items():
            _weigh(key)
            _weigh(item)
    elif isinstance(value, list | tuple | set | frozenset):
        _BUDGET.get().step(1 + len(value))
        for item in value:
            _weigh(item)


def _written(value: Any) -> Any:
    """The text that `{{ value }}` prints: paid for."""
    _weigh(value)
    return value


_MOST_WIDTH = 999
_FLAGS_AND_WIDTHS = re.compile(r"[-+ #]*+(\d*+)(\*?)\.?(\d*+)(\*?)")


def _check_percent(pattern: str) -> None:
    """`%` may not pad to a width of thousands, nor to one that comes from an argument. Linear in the text."""
    position = pattern.find("%")
    while position >= 0:
        position += 1
        if pattern.startswith("(", position):
            position = _after_name(pattern, position)
        specifier = _FLAGS_AND_WIDTHS.match(pattern, position)
        assert specifier is not None
        _check_widths(specifier[1], specifier[3], is_given=bool(specifier[2] or specifier[4]))
        position = pattern.find("%", specifier.end() + pattern.startswith("%", specifier.end()))


def _after_name(pattern: str, start: int) -> int:
    """The end of a name in parentheses, as Python reads it: parentheses may nest."""
    depth = 0
    for parenthesis in _PARENTHESIS.finditer(pattern, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.end()
    return len(pattern)


_PARENTHESIS = re.compile("[()]")


def _check_braces(pattern: str) -> None:
    """The same for `format`: no width in the thousands, nor one that is a field itself."""
    for _, _, spec, _ in Formatter().parse(pattern):
        if spec:
            _check_widths(*re.findall(r"\d+", spec), is_given="{" in spec)


def _check_widths(*widths: str, is_given: bool) -> None:
    if is_given or any(len(width) > 20 or int(width or 0) > _MOST_WIDTH for width in widths):
        raise SpentError("it formats to a width that is not allowed")
    _BUDGET.get().make(sum(int(width or 0) for width in widths))


def _make_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(many, str | list | tuple | bytes):
            _BUDGET.get().make(len(many) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 1 << 12:
        raise SpentError("it made too large a number")


def _make_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > 1 << 12:
        raise SpentError("it made too large a number")


def _make_sum(left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _BUDGET.get().make(len(left) + len(right))


def _make_formatted(left: Any, right: Any) -> None:
    if isinstance(left, str):
        _check_percent(left)
        _weigh(right)
        _weigh(left)


_BEFORE_OPERATOR: dict[str, Callable[[Any, Any], None]] = {
    "*": _make_product,
    "**": _make_power,
    "+": _make_sum,
    "%": _make_formatted,
}


_REFUSED_METHODS = frozenset(("encode", "expandtabs", "format_map", "maketrans", "to_bytes", "translate"))
_PADDING_METHODS = frozenset(("center", "ljust", "rjust", "zfill"))


def _before_call(function: object, args: tuple[Any, ...]) -> None:
    """Pay for a call: one step, and for a method of a text the most that it can make."""
    _BUDGET.get().step()
    method = getattr(function, "__wrapped__", function)
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if name in _REFUSED_METHODS:
        raise SpentError(f"it calls {name}(), which templates may not")
    if isinstance(text, list | dict):
        _BUDGET.get().step(len(text) // 64 + sum(len(arg) for arg in args if hasattr(arg, "__len__")))
    if not isinstance(text, str):
        return
    _weigh(args)
    _weigh(text)
    if name in _PADDING_METHODS and args and isinstance(args[0], int):
        _BUDGET.get().make(max(args[0], 0))
    elif name == "format":
        _check_braces(text)
    elif name == "replace":
        _make_replaced(text, *args)
    elif name == "join" and args:
        _make_product(text, len(args[0]) if hasattr(args[0], "__len__") else MAX_RANGE)


def _make_replaced(text: object, old: object = "", new: object = "", *_: object) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _BUDGET.get().make(text.count(old) * len(new))


def _make_indented(text: object, width: object = 4, *_: object, **__: object) -> None:
    if isinstance(text, str):
        _make_product("\n" * (1 + text.count("\n")), len(width) if isinstance(width, str) else width)


def _format(pattern: str, *args: Any, **kwargs: Any) -> str:
    _check_percent(str(pattern))
    return str(pattern) % (kwargs or args)


def _join(items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        raise SpentError("it joins by attribute, which templates may not")
    parts = list(items)
    _make_product(d, len(parts))
    _weigh(parts)
    return str(d).join(map(str, parts))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: nothing escaped for HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise SpentError("it indents JSON too far")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[Any]:
    """The result of a filter such as `map`, as JSON: a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _from_json(text: object) -> Any:
    return read_json(text) if isinstance(text, str | bytes) else text


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256 or re.search(r"%[-_0^#+]*\d{3}", pattern):
        raise SpentError("it formats the time to a width that is not allowed")
    return datetime.now().strftime(pattern)


def _raise_exception(message: object) -> NoReturn:
    raise RefusedError(str(message)[:1000])


def _make_cut(items: object, number: object = 1, *_: object, **__: object) -> None:
    if isinstance(number, int):
        _BUDGET.get().step(max(number, 0))


def _make_centered(_text: object, width: object = 80) -> None:
    if isinstance(width, int):
        _BUDGET.get().make(max(width, 0))


def _make_sum_of(items: Any, attribute: object = None, start: object = 0) -> None:
    """Lists and texts are joined with `+` in a loop, which pays for each."""
    if not isinstance(start, int | float):
        raise SpentError("it sums what are not numbers")


_BEFORE_FILTER: dict[str, Callable[..., None]] = {
    "replace": _make_replaced,
    "indent": _make_indented,
    "batch": _make_cut,
    "slice": _make_cut,
    "center": _make_centered,
    "sum": _make_sum_of,
}
_LOOKS_ONLY = frozenset(
    {"abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "join"}
    | {"last", "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "select"}
    | {"selectattr", "sort", "unique", "_counted", "_joined"}
)
"""Filters that write nothing out, or weigh it themselves."""
_CHANGING = ("clear", "pop")
"""Methods of lists that older versions of Jinja do not know to change them."""
_LEFT_OUT = frozenset({"random", "urlize", "xmlattr"})
"""No template of a model needs these."""


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes a step and weighs what it is given, unless it only looks at it."""
    before = _BEFORE_FILTER.get(name)

    @functools.wraps(function)  # with the marks by which jinja2 knows what to pass
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().step()
        values = [
            value for value in args if not isinstance(value, Context | jinja2.Environment | nodes.EvalContext)
        ]
        if name not in _LOOKS_ONLY:
            _weigh(values)
        if before is not None:
            before(*values, **kwargs)
        return function(*args, **kwargs)

    return filtered


class _Generation(Extension):
    """`{% generation %}` marks an answer for training; its content is written out as it stands."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are jinja2's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of templates: transformers' settings, filters and functions, all of them paid for."""

    intercepted_binops = frozenset(_BEFORE_OPERATOR)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would run work that is not counted
            extensions=[LoopControlExtension, _Generation],
            finalize=_written,
        )
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
        self.filters |= {"tojson": _tojson, "join": _join, "format": _format, "from_json": _from_json}
        self.filters |= {"_counted": _counted, "_joined": _joined}
        self.filters = {name: _paid(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists and dicts that a template has made itself may be changed."""
        changes = modifies_known_mutable(obj, attr) or (isinstance(obj, list) and attr in _CHANGING)
        return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value) and (
            _BUDGET.get().is_own(obj) or not changes
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, after paying for what it makes."""
        _BEFORE_OPERATOR[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call, after paying for it. The names leave room for any keyword of the template's."""
        _before_call(__function, args)
        return super().call(__context, __function, *args, **kwargs)
