"""Clusters and machine types as TOML. A file may come from a stranger: every field is checked, and an error
is one line that names the file, the table and the field.

A cluster file has `[[pool]]` tables (role, machine, count), settings of the router, and `[machines.NAME]`
tables for machine types that phasewise does not bring. A machine type has one table for each model.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from phasewise._files import read_input
from phasewise._toml import parse_toml
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.routing import POLICIES, ROLES, Limits, Role
from phasewise.cluster.simulated.simulate import ClusterSpec, Link, MachineType, Pool
from phasewise.cluster.simulated.steps import MAX_POINTS, Curve, StepTimes
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS
from phasewise.serving.scheduling.request import DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCES

MAX_FILE_BYTES = 1 << 20
MAX_MACHINES = 10_000
DEFAULT_MODEL = "bloom-176b"

TimedTypes: TypeAlias = Mapping[str, StepTimes]
"""Step times that were timed or modelled, by machine type: they replace the type's own."""


class MachineCatalogue:
    """Machine types by name: a file's own first, then those that phasewise brings."""

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        timed: TimedTypes | None = None,
        own: Mapping[str, Any] | None = None,
        where: str = "",
    ) -> None:
        self._model = model
        self._timed = timed or {}
        self._own = own or {}
        self._where = where
        self._known: dict[str, MachineType] = {}

    def __getitem__(self, name: str) -> MachineType:
        """The machine type of this name. ClusterError if there is none, or nothing of the model is known on
        it."""
        if name not in self._known:
            if name in self._own:
                table = SpecTable(self._own[name], f"{self._where}, [machines.{name}]")
            elif name in shipped():
                table = SpecTable(_shipped_table(name), f"machine type {name}")
            else:
                raise ClusterError(
                    f"no machine type is called {name!r:.60}: there are {', '.join([*self._own, *shipped()])}"
                )
            self._known[name] = self._machine(name, table)
        return self._known[name]

    def _machine(self, name: str, table: SpecTable) -> MachineType:
        models = table.table("models", required=True)
        if self._model not in models.fields:
            raise ClusterError(
                f"{table.where} has no step times for model {self._model!r:.60},"
                f" only for {', '.join(models.fields)}"
            )
        of_model = models.table(self._model, required=True)
        link = table.table("link")
        machine = MachineType(
            name=name,
            steps=self._steps(name, of_model),
            memory_bytes=table.whole("memory_bytes"),
            weight_bytes=of_model.whole("weight_bytes"),
            kv_bytes_per_token=of_model.whole("kv_bytes_per_token"),
            n_layers=of_model.whole("n_layers"),
            link=Link(
                link.number("bytes_per_s", math.inf, above=0.0),
                link.number("latency_s", 0.0),
                link.whole("layerwise_above_tokens", 0, least=0),
            ),
            cost=table.number("cost", 0.0),
            power_w=table.number("power_w", 0.0),
            max_batch_tokens=table.whole("max_batch_tokens", DEFAULT_BATCH_TOKENS),
            max_sequences=table.whole("max_sequences", DEFAULT_SEQUENCES),
            tpot_ms=table.number("tpot_ms", DEFAULT_TPOT_MS, above=0.0),
        )
        table.text("description", "")
        for read_table in (table, link, of_model):
            read_table.refuse_others()
        return machine

    def _steps(self, name: str, table: SpecTable) -> StepTimes:
        curves = {field: table.points(field) for field in ("prefill_ms", "decode_ms", "decode_sequences_ms")}
        pair_ns = table.number("prefill_context_ns", 0.0)
        if name in self._timed:
            return self._timed[name]
        prefill, decode = curves["prefill_ms"], curves["decode_ms"]
        if prefill is None or decode is None:
            raise ClusterError(
                f"{table.where} has no step times: give prefill_ms and decode_ms, or steps that were timed"
            )
        return StepTimes(prefill, decode, curves["decode_sequences_ms"], pair_ns / 1e9)


def shipped() -> tuple[str, ...]:
    """Names of the machine types that phasewise brings."""
    files = resources.files("phasewise.cluster.simulated").joinpath("machine_types")
    return tuple(sorted(file.name.removesuffix(".toml") for file in files.iterdir()))


def _shipped_table(name: str) -> dict[str, Any]:
    file = resources.files("phasewise.cluster.simulated").joinpath("machine_types", f"{name}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def read_cluster(
    path: str | os.PathLike[str], timed: TimedTypes | None = None, model: str | None = None
) -> tuple[ClusterSpec, MachineCatalogue]:
    """The cluster of a file, and the machine types that it knows. `model`: instead of the file's own."""
    name = os.fspath(path)
    table = SpecTable(parsed_file(name), name)
    own = table.table("machines").fields
    catalogue = MachineCatalogue(model or table.text("model", DEFAULT_MODEL), timed, own, name)
    table.text("model", "")
    policy = table.text("policy", "splitwise")
    if policy not in POLICIES:
        raise ClusterError(f"{name}: policy must be one of {', '.join(POLICIES)}, not {policy!r:.40}")
    pools = tuple(_pool(pool_table, catalogue) for pool_table in table.tables("pool"))
    if sum(pool.count for pool in pools) > MAX_MACHINES:
        raise ClusterError(f"{name}: a cluster has at most {MAX_MACHINES} machines")
    limits = Limits(
        table.whole("prompt_overflow_tokens", Limits().prompt_overflow_tokens),
        table.whole("split_above_tokens", 0, least=0),
    )
    table.refuse_others()
    return ClusterSpec(pools, policy, limits), catalogue


def read_machines(
    path: str | os.PathLike[str], timed: TimedTypes | None = None, model: str | None = None
) -> MachineCatalogue:
    """The machine types of a file, which may be a cluster file, beside those that phasewise brings."""
    name = os.fspath(path)
    table = SpecTable(parsed_file(name), name)
    return MachineCatalogue(
        model or table.text("model", DEFAULT_MODEL), timed, table.table("machines").fields, name
    )


def parse_pools(text: str, catalogue: MachineCatalogue) -> tuple[Pool, ...]:
    """The pools that a text such as `prompt=27*h100,token=3*a100` states: roles, counts and machine types."""
    pools = []
    for part in text.split(","):
        role, _, rest = part.strip().partition("=")
        count, star, machine = rest.partition("*")
        if role not in ROLES or not star or not count.isdecimal() or not 1 <= int(count) <= MAX_MACHINES:
            raise ClusterError(
                f"pools are a TOML file or written like prompt=27*h100,token=3*h100, not {text!r:.60}"
            )
        pools.append(Pool(_role(role, text), catalogue[machine.strip()], int(count)))
    return tuple(pools)


def _pool(table: SpecTable, catalogue: MachineCatalogue) -> Pool:
    role = _role(table.text("role"), table.where)
    pool = Pool(role, catalogue[table.text("machine")], table.whole("count", least=1, most=MAX_MACHINES))
    table.refuse_others()
    return pool


def _role(text: str, where: str) -> Role:
    for role in ROLES:
        if role == text:
            return role
    raise ClusterError(f"{where}: role must be one of {', '.join(ROLES)}, not {text!r:.40}")


def parsed_file(name: str) -> dict[str, Any]:
    try:
        text = read_input(name, MAX_FILE_BYTES)
    except OSError as error:
        raise ClusterError(f"{name}: {error.strerror or error}") from None
    except ValueError as error:
        raise ClusterError(f"{name!r:.80} names no file: {error}") from None
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ClusterError(f"{name} is not TOML: {str(error)[:200]}") from None


class SpecTable:
    """One TOML table, read field by field; unknown fields are refused."""

    def __init__(self, fields: Any, where: str) -> None:
        if not isinstance(fields, dict):
            raise ClusterError(f"{where} must be a table")
        self.fields: dict[str, Any] = fields
        self.where = where
        self._asked: set[str] = set()

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._checked(name, default, lambda value: isinstance(value, str), "text"))

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int = 1 << 62) -> int:
        def is_whole(value: Any) -> bool:
            return type(value) is int and least <= value <= most

        return int(self._checked(name, default, is_whole, f"a whole number from {least} to {most}"))

    def number(self, name: str, default: float | None = None, *, above: float = -1e-300) -> float:
        def is_number(value: Any) -> bool:
            return type(value) in (int, float) and above < value < 1e300

        return float(self._checked(name, default, is_number, "a number from 0 on"))

    def points(self, name: str) -> Curve | None:
        """[[tokens, milliseconds], ...] as seconds; None where there are none."""

        def are_points(value: Any) -> bool:
            return isinstance(value, list) and 1 <= len(value) <= MAX_POINTS and all(map(_is_point, value))

        value = self._checked(name, [], are_points, "pairs of tokens and milliseconds: [[512, 76.1], ...]")
        try:
            return Curve((x, y / 1000) for x, y in value) if value else None
        except ClusterError as error:
            raise ClusterError(f"{self.where}: {name}: {error}") from None

    def table(self, name: str, *, required: bool = False) -> SpecTable:
        self._asked.add(name)
        if name not in self.fields and required:
            raise ClusterError(f"{self.where} has no table {name}")
        return SpecTable(self.fields.get(name, {}), f"{self.where}, [{name}]")

    def tables(self, name: str) -> list[SpecTable]:
        self._asked.add(name)
        value = self.fields.get(name)
        if not isinstance(value, list) or not value:
            raise ClusterError(f"{self.where} has no [[{name}]]: at least one is needed")
        return [SpecTable(fields, f"{self.where}, {name} {number}") for number, fields in enumerate(value, 1)]

    def refuse_others(self) -> None:
        """Refuse fields that were not read: a misspelt one would silently mean its default."""
        others = [name for name in self.fields if name not in self._asked]
        if others:
            asked = ", ".join(sorted(self._asked))
            raise ClusterError(f"{self.where}: no field is called {others[0]!r:.40}; there are {asked}")

    def _checked(self, name: str, default: Any, is_right: Callable[[Any], bool], what: str) -> Any:
        self._asked.add(name)
        if name not in self.fields:
            if default is None:
                raise ClusterError(f"{self.where}: {name} is missing")
            return default
        value = self.fields[name]
        if not is_right(value):
            raise ClusterError(f"{self.where}: {name} must be {what}, not {value!r:.40}")
        return value


def _is_point(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(coordinate) in (int, float) and 0 <= coordinate < 1e12 for coordinate in value)
        and value[1] > 0
    )


def names_a_file(path: str) -> bool:
    """True if `path` is meant as a file rather than as pools in a line."""
    return Path(path).suffix == ".toml" or "=" not in path
