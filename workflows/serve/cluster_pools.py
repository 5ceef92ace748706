"""Pools on the nodes of a cluster, as they are asked for: by `--prompt 2x24@big`, or by a file of pools.

A file may come from a stranger: every field is checked, and an error is one line that names the file, the
pool and the field. All pools of a server answer with the same bits, so settings that change bits are refused
where pools differ in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from phasewise._files import read_input
from phasewise._toml import parse_toml
from phasewise._words import bytes_of, counted, meant, reason_of
from phasewise.workflows.errors import UsageError

if TYPE_CHECKING:
    from phasewise.cluster.routing import Role
    from phasewise.workflows.opening.open_model import Weights

MAX_INSTANCES = 1000
MAX_CORES = 9999
MAX_FILE_BYTES = 1 << 20
DEFAULT_KEY = "phasewise"
"""The key of the node label that a name alone stands for."""

SparseName = Literal["auto", "always", "never"]

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:(?:{_NAME}/)?{_NAME}=)?{_NAME}")
_COUNTED = re.compile(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})(?:@(.*))?")
_FIELDS = ("role", "instances", "cores", "label", "format", "sparse", "kv_budget")
_ROLES: tuple[Role, ...] = ("prompt", "token", "mixed")


@dataclass(frozen=True, slots=True)
class ClusterPool:
    """Instances of one role and kind. label: `KEY=VALUE` of their nodes; None: any node.

    weight_format, sparse: None: as the server's. kv_bytes: of each instance; None: its share of its node's.
    """

    role: Role
    instances: int
    cores: int
    label: str | None = None
    weight_format: str | None = None
    sparse: SparseName | None = None
    kv_bytes: int | None = None

    def weights(self, server: Weights) -> Weights:
        """Those of its instances. server: what holds where the pool says nothing."""
        return replace(
            server,
            weight_format=self.weight_format or server.weight_format,
            sparse=self.sparse or server.sparse,
        )

    def describe(self) -> str:
        """A line for people."""
        of = f"of nodes with {self.label}" if self.label else "of a node of the Ray cluster"
        times = f"{self.instances} times " if self.instances > 1 else ""
        own = [self.weight_format, None if self.sparse in (None, "auto") else f"sparse {self.sparse}"]
        told = "".join(f", {text}" for text in own if text)
        return f"{self.role} pool: {times}{counted(self.cores, 'core')} {of}{told}"


def counted_pool(role: Role, text: str) -> ClusterPool:
    """The pool that `2x24` or `2x24@big` asks for. UsageError."""
    match = _COUNTED.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--{role} is written like 2x24, two instances of 24 cores, or like 2x24@big, on nodes with the "
            f"label {DEFAULT_KEY}=big, not {text!r:.40}"
        )
    label = None if match[3] is None else _label(match[3], f"--{role}")
    return ClusterPool(role, int(match[1]), int(match[2]), label)


def _label(text: str, where: str) -> str:
    if not _LABEL.fullmatch(text):
        raise UsageError(
            f"{where}: a label is a name like big, for {DEFAULT_KEY}=big, or KEY=VALUE, of at most 63 "
            f"letters, digits, -, _ and . each, not {text!r:.40}"
        )
    return text if "=" in text else f"{DEFAULT_KEY}={text}"


def pools_of_file(path: str) -> list[ClusterPool]:
    """The `[[pool]]` tables of a TOML file. UsageError, in one line, for anything else."""
    try:
        tables = parse_toml(read_input(path, MAX_FILE_BYTES))
    except OSError as error:
        raise UsageError(f"--pools {path}: {reason_of(error)}") from None
    except ValueError as error:
        raise UsageError(f"--pools {path} is not TOML: {str(error)[:200]}") from None
    where = f"--pools {path}"
    others = [name for name in tables if name != "pool"]
    if others:
        raise UsageError(f"{where}: nothing is called {others[0]!r:.40}; it has [[pool]] tables alone")
    pools = tables.get("pool")
    if not isinstance(pools, list) or not pools:
        raise UsageError(f"{where} has no [[pool]]: at least one is needed")
    return [_pool(fields, f"{where}, pool {number}") for number, fields in enumerate(pools, 1)]


def check_pools(pools: Sequence[ClusterPool]) -> None:
    """UsageError where pools together are too many."""
    n_instances = sum(pool.instances for pool in pools)
    if n_instances > MAX_INSTANCES:
        raise UsageError(
            f"{counted(n_instances, 'instance')} are too many: a server has at most {MAX_INSTANCES}"
        )


def check_same_numbers(ref: str, pools: Sequence[ClusterPool], server: Weights) -> None:
    """UsageError where a pool's weights are other numbers than the server's: formats of other names may be
    the same ones, as `native` of a bf16 file. Reads what the model's files say of their tensors."""
    from phasewise.serving.loaders import forms_of

    formats = {pool.weight_format for pool in pools} - {None, server.weight_format}
    ours = forms_of(ref, server.weight_format) if formats else {}
    for pool in pools:
        if pool.weight_format in formats and forms_of(ref, pool.weight_format or "") != ours:
            raise UsageError(
                f"the {pool.role} pool's format {pool.weight_format} holds other numbers than the server's "
                f"{server.weight_format}, so that an answer's bits would depend on the pool that computes "
                "it: use one format in all pools, or serve it apart, by a server of its own"
            )


def _pool(fields: Any, where: str) -> ClusterPool:
    if not isinstance(fields, dict):
        raise UsageError(f"{where} must be a table")
    for name in fields:
        if name not in _FIELDS:
            raise UsageError(f"{where}: no field is called {name!r:.40}{meant(name, _FIELDS)}")
    role = fields.get("role")
    if role not in _ROLES:
        raise UsageError(f"{where}: role must be one of {', '.join(_ROLES)}, not {role!r:.40}")
    label = fields.get("label")
    if label is not None and not isinstance(label, str):
        raise UsageError(f"{where}: label must be text, not {label!r:.40}")
    return ClusterPool(
        role,
        _whole(fields, "instances", MAX_INSTANCES, where),
        _whole(fields, "cores", MAX_CORES, where),
        None if label is None else _label(label, where),
        _choice(fields, "format", _formats(), where),
        _choice(fields, "sparse", get_args(SparseName), where),
        _bytes(fields.get("kv_budget"), where),
    )


def _formats() -> tuple[str, ...]:
    from phasewise.serving.models.packed_model import FORMATS

    return tuple(FORMATS)


def _whole(fields: Mapping[str, Any], name: str, most: int, where: str) -> int:
    if name not in fields:
        raise UsageError(f"{where}: {name} is missing")
    value = fields[name]
    if type(value) is not int or not 1 <= value <= most:
        raise UsageError(f"{where}: {name} must be a whole number from 1 to {most}, not {value!r:.40}")
    return value


def _choice(fields: Mapping[str, Any], name: str, choices: Sequence[str], where: str) -> Any:
    value = fields.get(name)
    if value is not None and value not in choices:
        raise UsageError(f"{where}: {name} must be one of {', '.join(choices)}, not {value!r:.40}")
    return value


def _bytes(value: Any, where: str) -> int | None:
    if value is None:
        return None
    n_bytes = value if type(value) is int else bytes_of(value) if isinstance(value, str) else None
    if n_bytes is None or not 1 <= n_bytes < 1 << 62:
        raise UsageError(f'{where}: kv_budget must be bytes, such as "16G", not {value!r:.40}')
    return n_bytes
