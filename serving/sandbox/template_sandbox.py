"""A jinja2 environment for templates from strangers: nothing to reach.

jinja2's immutable sandbox keeps a template away from Python; it does not keep it from looping for ever or
from filling memory. The bounds of the confined process in which templates run (`confined`) end what does.
The rest behaves as in transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment, modifies_known_mutable

from phasewise._json import read_json
from phasewise._words import counted

MAX_SOURCE_CHARS = 1 << 20
_CHANGING = ("clear", "pop")
"""Methods of lists that older versions of Jinja do not know to change them."""
_LEFT_OUT = ("random", "urlize", "xmlattr")
"""Filters that no template of a model needs."""
_GIVEN: ContextVar[frozenset[int]] = ContextVar("given", default=frozenset())
"""Ids of the lists and dicts of the conversation, which the template may not change."""


class RefusedError(jinja2.TemplateRuntimeError):
    """The template's own `raise_exception`."""


def compile_template(source: str) -> jinja2.Template:
    """`source` as a template for `write_out`. Raises what jinja2 and Python's parser do."""
    if len(source) > MAX_SOURCE_CHARS:
        raise jinja2.TemplateSyntaxError(
            f"it has {counted(len(source), 'character')}; {MAX_SOURCE_CHARS} are allowed", 1
        )
    return _Environment().from_string(source)


def write_out(template: jinja2.Template, names: Mapping[str, Any]) -> str:
    """Text that the template writes of these names, whose values it may not change. Raises what it raises."""
    ids, left = set(), [names]
    while left:
        value = left.pop()
        if isinstance(value, Mapping | list | tuple):
            ids.add(id(value))
            left += value.values() if isinstance(value, Mapping) else value
    token = _GIVEN.set(frozenset(ids))
    try:
        return template.render(names)
    finally:
        _GIVEN.reset(token)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: nothing escaped for HTML."""
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
    return datetime.now().strftime(pattern)


def _raise_exception(message: object) -> NoReturn:
    raise RefusedError(str(message)[:1000])


@jinja2.pass_context
def _unfolded(_: Context, value: Any) -> Any:
    """The printed value: for a function that wants the context, jinja2 computes nothing while it compiles."""
    return value


class _Generation(Extension):
    """`{% generation %}` marks an answer for training; its content is written out as it stands."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are jinja2's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of templates: transformers' settings, filters and functions."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are not folded: that would be work outside of a job's bounds
            finalize=_unfolded,  # nor where they are printed
            extensions=[LoopControlExtension, _Generation],
        )
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
        self.filters |= {"tojson": _tojson, "from_json": _from_json}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists and dicts that a template has made itself may be changed."""
        changes = modifies_known_mutable(obj, attr) or (isinstance(obj, list) and attr in _CHANGING)
        is_own = id(obj) not in _GIVEN.get()
        return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value) and (is_own or not changes)
