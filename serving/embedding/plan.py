"""The plan of embedding with one model: instances, their cores, and the depths of their queues.

`phasewise tune-embed` keeps plans in the tuning database, from which `serve` reads them: by places of the
topology, which like machines share. A stored plan is checked like any input that is not trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from phasewise._json import read_json
from phasewise._words import counted, number
from phasewise.serving.embedding.queues import UNLIMITED, Depth
from phasewise.serving.errors import ServingError
from phasewise.topology import Machine, TopologyError, places_of, pus_at

PHASE = "embed"
"""The phase under which the database keeps these plans, beside those of prefill and decode."""
FORMAT = 1
MAX_INSTANCES = 256
DEFAULT_SLO_S = 1.0
"""The promised time of an answer where no plan gives one: the paper's first SLO (section V)."""


@dataclass(frozen=True)
class Instance:
    """One device's worker in a plan. `device`: "cpu:0", "cuda:0" or "exec:0"; a plan never holds a command.
    `batch_s`: a batch's seconds beside its tokens."""

    device: str
    cores: tuple[int, ...]
    depth: Depth = UNLIMITED
    batch_s: float = 0.0

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("cpu:")


@dataclass(frozen=True)
class EmbeddingPlan:
    """The instances that embed with one model. `slo_s`: the promised time of an answer; None: none."""

    instances: tuple[Instance, ...]
    slo_s: float | None = None
    source: str = "default"

    def only(self, keeps: Callable[[Instance], bool]) -> EmbeddingPlan:
        """The plan with the instances for which `keeps` is true, maybe none."""
        return replace(self, instances=tuple(filter(keeps, self.instances)))

    @property
    def accelerated(self) -> EmbeddingPlan:
        """The plan without its CPU instances."""
        return self.only(lambda instance: not instance.is_cpu)

    def describe(self) -> str:
        """The plan in one line, for people."""
        parts = [
            f"{instance.device} on cores {','.join(map(str, instance.cores))}"
            + (
                ""
                if instance.depth == UNLIMITED
                else f" (at most {instance.depth.inputs} inputs, {instance.depth.tokens} tokens)"
            )
            for instance in self.instances
        ]
        promise = "" if self.slo_s is None else f" within {number(self.slo_s)} s"
        return f"embeddings{promise}: {'; '.join(parts)} ({self.source})"


def placed_json(plan: EmbeddingPlan, machine: Machine) -> str:
    """The plan as JSON with topology places for cores. ServingError: one is not for this process."""

    def placed(instance: Instance) -> dict[str, Any]:
        fields = asdict(instance)
        fields["places"] = [*places_of(machine, fields.pop("cores"))]
        return fields

    try:
        instances = [placed(instance) for instance in plan.instances]
    except TopologyError as error:
        raise ServingError(f"the embedding plan cannot be kept: {error}") from None
    kept = {"format": FORMAT, "pus": len(machine.allowed_pus), "slo_s": plan.slo_s}
    return json.dumps({**kept, "instances": instances})


def stored_plan(text: str, machine: Machine, source: str = "database") -> EmbeddingPlan:
    """A plan of the database with this machine's core numbers. ServingError, saying why: it is none."""
    fields, n_pus = _fields(text), len(machine.allowed_pus)
    if fields["pus"] != n_pus:
        raise ServingError(f"it is for a process with {fields['pus']!r:.20} PUs; this one may use {n_pus}")
    try:
        instances = tuple(
            Instance(
                _text(own["device"]),
                tuple(pus_at(machine, places)),
                Depth(_whole(own["depth"]["inputs"]), _whole(own["depth"]["tokens"])),
                _seconds(own.get("batch_s", 0.0)),
            )
            for own, places in zip(fields["instances"], stored_places(text), strict=True)
        )
        if not 1 <= len(instances) <= MAX_INSTANCES or any(not instance.cores for instance in instances):
            raise ValueError(f"{counted(len(instances), 'instance')}")
        slo = fields["slo_s"]
        if slo is not None and not 0 < float(slo) < 1e6:
            raise ValueError(f"an SLO of {slo!r:.20}")
        return EmbeddingPlan(instances, None if slo is None else float(slo), source)
    except (TopologyError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServingError(f"it is no plan of embedding: {error!s:.100}") from None


def stored_places(text: str) -> list[list[int]]:
    """The topology places of each instance. ServingError for a text that is no plan."""
    try:
        places = [[*instance["places"]] for instance in _fields(text)["instances"]]
    except (KeyError, TypeError) as error:
        raise ServingError(f"it is no plan of embedding: {error!s:.100}") from None
    if not all(type(place) is int for own in places for place in own):
        raise ServingError("it is no plan of embedding: places are whole numbers")
    return places


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = read_json(text)
    except ValueError:
        raise ServingError("it is no plan of embedding: not JSON") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT or "pus" not in fields:
        raise ServingError("it is no plan of embedding that this phasewise reads")
    return fields


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(("cpu:", "cuda:", "exec:")):
        raise ValueError(f"a device {value!r:.40}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 40:
        raise ValueError(f"a number {value!r:.40}")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        raise ValueError(f"a time {value!r:.40}")
    return float(value)
