"""Clusters and machine types as TOML. A file may come from a stranger: every field is checked, and an error
is one line that names the file, the table and the field.

A cluster file has `[[pool]]` tables (role, machine, count), settings of the router, and `[machines.NAME]`
tables for machine types that phasewise does not bring. A machine type has one table for each model.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from phasewise._files import read_input
from phasewise._toml import parse_toml
from phasewise.cluster.errors import ClusterError, first_line
from phasewise.cluster.routing import POLICIES, ROLES, Limits, Role
from phasewise.cluster.simulated.simulate import ClusterSpec, Link, MachineType, Pool
from phasewise.cluster.simulated.steps import MAX_POINTS, Curve, StepTimes
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS
from phasewise.serving.scheduling.request import DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCES

MAX_FILE_BYTES = 1 << 20
MAX_MACHINES = 10_000
DEFAULT_MODEL = "bloom-176b"

TimedTypes: TypeAlias = Mapping[str, StepTimes]
"""Step times that were timed or modelled, by machine type: they replace those of the type itself."""


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


_Whole = Annotated[int, Field(ge=1, le=1 << 62)]
_Count = Annotated[int, Field(ge=0, le=1 << 62)]
_Amount = Annotated[float, Field(ge=0, lt=1e300)]
_Rate = Annotated[float, Field(gt=0, lt=1e300)]
_Point = tuple[Annotated[float, Field(ge=0, lt=1e12)], Annotated[float, Field(gt=0, lt=1e12)]]
_Points = Annotated[list[Annotated[_Point, Strict(False)]], Field(min_length=1, max_length=MAX_POINTS)]
"""Points of a curve, [[tokens, milliseconds], ...]."""


class _LinkFields(_Fields):
    bytes_per_s: _Rate = math.inf
    latency_s: _Amount = 0.0
    layerwise_above_tokens: _Count = 0


class _ModelFields(_Fields):
    weight_bytes: _Whole
    kv_bytes_per_token: _Whole
    n_layers: _Whole
    prefill_ms: _Points | None = None
    decode_ms: _Points | None = None
    decode_sequences_ms: _Points | None = None
    prefill_context_ns: _Amount = 0.0


class _MachineFields(_Fields):
    description: str = ""
    memory_bytes: _Whole
    link: _LinkFields = _LinkFields()
    cost: _Amount = 0.0
    power_w: _Amount = 0.0
    max_batch_tokens: _Whole = DEFAULT_BATCH_TOKENS
    max_sequences: _Whole = DEFAULT_SEQUENCES
    tpot_ms: _Rate = DEFAULT_TPOT_MS
    models: dict[str, _ModelFields]


class _PoolFields(_Fields):
    role: Role
    machine: str
    count: Annotated[int, Field(ge=1, le=MAX_MACHINES)]


class _ClusterFields(_Fields):
    model: str = DEFAULT_MODEL
    policy: str = "splitwise"
    prompt_overflow_tokens: _Whole | None = Limits().prompt_overflow_tokens
    split_above_tokens: _Count = 0
    pool: list[_PoolFields] = []
    machines: dict[str, _MachineFields] = {}


class MachineCatalogue:
    """Machine types by name: a file's own first, then those that phasewise brings."""

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        timed: TimedTypes | None = None,
        own: Mapping[str, _MachineFields] | None = None,
    ) -> None:
        self._model = model
        self._timed = timed or {}
        self._own = own or {}
        self._known: dict[str, MachineType] = {}

    def __getitem__(self, name: str) -> MachineType:
        """The machine type of this name. ClusterError for an unknown type, or one without the model."""
        if name not in self._known:
            if name not in self._own and name not in shipped():
                raise ClusterError(
                    f"no machine type is called {name!r:.60}: there are {', '.join([*self._own, *shipped()])}"
                )
            self._known[name] = self._machine(name, self._own.get(name) or _shipped_fields(name))
        return self._known[name]

    def _machine(self, name: str, fields: _MachineFields) -> MachineType:
        if self._model not in fields.models:
            raise ClusterError(
                f"machine type {name} has no step times for model {self._model!r:.60},"
                f" only for {', '.join(fields.models)}"
            )
        model = fields.models[self._model]
        return MachineType(
            name=name,
            steps=self._timed.get(name) or _steps(name, model),
            weight_bytes=model.weight_bytes,
            kv_bytes_per_token=model.kv_bytes_per_token,
            n_layers=model.n_layers,
            link=Link(**dict(fields.link)),
            **fields.model_dump(exclude={"description", "link", "models"}),
        )


def _steps(name: str, model: _ModelFields) -> StepTimes:
    def curve(points: Sequence[tuple[float, float]]) -> Curve:
        try:
            return Curve((tokens, milliseconds / 1000) for tokens, milliseconds in points)
        except ClusterError as error:
            raise ClusterError(f"machine type {name}: {error}") from None

    if model.prefill_ms is None or model.decode_ms is None:
        raise ClusterError(
            f"machine type {name} has no step times: give prefill_ms and decode_ms, or steps that were timed"
        )
    of_sequences = None if model.decode_sequences_ms is None else curve(model.decode_sequences_ms)
    return StepTimes(
        curve(model.prefill_ms), curve(model.decode_ms), of_sequences, model.prefill_context_ns / 1e9
    )


def shipped() -> tuple[str, ...]:
    """Names of the machine types that phasewise brings."""
    files = resources.files("phasewise.cluster.simulated").joinpath("machine_types")
    return tuple(sorted(file.name.removesuffix(".toml") for file in files.iterdir()))


def _shipped_fields(name: str) -> _MachineFields:
    file = resources.files("phasewise.cluster.simulated").joinpath("machine_types", f"{name}.toml")
    return _MachineFields.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))


def read_cluster(
    path: str | os.PathLike[str], timed: TimedTypes | None = None, model: str | None = None
) -> tuple[ClusterSpec, MachineCatalogue]:
    """Read a file's cluster and its catalogue of machine types. model: replaces the file's own model."""
    name = os.fspath(path)
    fields = _fields_of(name)
    catalogue = MachineCatalogue(model or fields.model, timed, fields.machines)
    if not fields.pool:
        raise ClusterError(f"{name} has no [[pool]]: at least one is needed")
    if fields.policy not in POLICIES:
        raise ClusterError(f"{name}: policy must be one of {', '.join(POLICIES)}, not {fields.policy!r:.40}")
    pools = tuple(Pool(pool.role, catalogue[pool.machine], pool.count) for pool in fields.pool)
    if sum(pool.count for pool in pools) > MAX_MACHINES:
        raise ClusterError(f"{name}: a cluster has at most {MAX_MACHINES} machines")
    limits = Limits(fields.prompt_overflow_tokens, fields.split_above_tokens)
    return ClusterSpec(pools, fields.policy, limits), catalogue


def read_machines(
    path: str | os.PathLike[str], timed: TimedTypes | None = None, model: str | None = None
) -> MachineCatalogue:
    """Read the machine types of a file, which may be a cluster file, beside those that phasewise brings."""
    fields = _fields_of(os.fspath(path))
    return MachineCatalogue(model or fields.model, timed, fields.machines)


def parse_pools(text: str, catalogue: MachineCatalogue) -> tuple[Pool, ...]:
    """Parse pools such as `prompt=27*h100,token=3*a100`: roles, counts and machine types."""
    pools = []
    for part in text.split(","):
        role, _, rest = part.strip().partition("=")
        count, star, machine = rest.partition("*")
        if role not in ROLES or not star or not count.isdecimal() or not 1 <= int(count) <= MAX_MACHINES:
            raise ClusterError(
                f"pools are a TOML file or written like prompt=27*h100,token=3*h100, not {text!r:.60}"
            )
        pools.append(Pool(role, catalogue[machine.strip()], int(count)))
    return tuple(pools)


def _fields_of(name: str) -> _ClusterFields:
    try:
        return _ClusterFields.model_validate(parse_toml(read_input(name, MAX_FILE_BYTES)))
    except OSError as error:
        raise ClusterError(f"{name}: {error.strerror or error}") from None
    except ValidationError as error:
        raise ClusterError(f"{name}: {first_line(error)}") from None
    except ValueError as error:
        raise ClusterError(f"{name!r} cannot be read as TOML: {str(error)[:200]}") from None


def names_a_file(path: str) -> bool:
    """True if the text names a file, False for pools in one line."""
    return Path(path).suffix == ".toml" or "=" not in path
