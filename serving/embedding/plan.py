"""The plan of embedding with one model: instances, their cores, and the depths of their queues.

`phasewise tune-embed` keeps it in the tuning database (`stored_plan`), `serve` reads it there. Earlier
versions kept one JSON file for each; those are still read. What is read is checked as if a stranger had
written it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phasewise._files import read_file
from phasewise._json import read_json
from phasewise._places import user_folder
from phasewise._words import counted, number, reason_of
from phasewise.serving.embedding.queues import UNLIMITED, Depth
from phasewise.serving.errors import ServingError

SCHEMA_VERSION = 1
MAX_INSTANCES = 256
MAX_BYTES = 1 << 20
DEFAULT_SLO_S = 1.0
"""The promised time of an answer where no plan says another: the paper's first (section V)."""


@dataclass(frozen=True)
class Instance:
    """One device's worker. `device`: "cpu:0", "cuda:0", "exec:0"; a plan never holds a command. `batch_s`:
    what a batch takes beside its tokens.
    """

    device: str
    cores: tuple[int, ...]
    depth: Depth = UNLIMITED
    batch_s: float = 0.0

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("cpu:")


@dataclass(frozen=True)
class EmbeddingPlan:
    """`slo_s`: the promised time of an answer; None: none is promised."""

    instances: tuple[Instance, ...]
    slo_s: float | None = None
    source: str = "default"

    def only(self, keeps: Callable[[Instance], bool]) -> EmbeddingPlan:
        """The plan with those of its instances; it may have none then."""
        return replace(self, instances=tuple(filter(keeps, self.instances)))

    @property
    def on_cpus(self) -> EmbeddingPlan:
        """The plan without its accelerators."""
        return self.only(lambda instance: instance.is_cpu)

    @property
    def accelerated(self) -> EmbeddingPlan:
        """The plan without its CPU instances."""
        return self.only(lambda instance: not instance.is_cpu)

    def describe(self) -> str:
        """In one line, for people."""
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


def plan_file(model_name: str, weight_format: str, placement: str) -> Path:
    """The file of an earlier version, with a model's plan for cores of this placement: below the XDG data
    directory.
    """
    name = f"{model_name}-{weight_format}-{placement}".lstrip(".")
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in name)
    return user_folder("data") / "embedding" / f"{safe}.json"


def fields_of(plan: EmbeddingPlan) -> dict[str, Any]:
    """Its instances and what they promise, as JSON values."""
    return {"instances": [asdict(instance) for instance in plan.instances], "slo_s": plan.slo_s}


def load_plan(path: Path, allowed: frozenset[int]) -> EmbeddingPlan | None:
    """The plan of an earlier version's file, None where there is none; ServingError where it cannot be used
    on the `allowed` cores.
    """
    try:
        fields = read_json(read_file(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ServingError(f"the embedding plan {path} cannot be read: {reason_of(error)}") from error
    try:
        if fields["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {fields['schema_version']!r:.20}")
        plan = plan_of(fields, str(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServingError(
            f"the embedding plan {path} is not one: {error!r:.100}; make it anew with `phasewise tune-embed`"
        ) from error
    foreign = {core for instance in plan.instances for core in instance.cores}.difference(allowed)
    if foreign:
        raise ServingError(
            f"the embedding plan {path} names core {min(foreign)}, which this process may not use:"
            " make it anew with `phasewise tune-embed`"
        )
    return plan


def plan_of(fields: Any, source: str) -> EmbeddingPlan:
    """The plan of `fields_of`. KeyError, TypeError, ValueError or AttributeError for anything else."""
    instances = tuple(
        Instance(
            _text(instance["device"]),
            tuple(_whole(core, 0) for core in instance["cores"]),
            Depth(_whole(instance["depth"]["inputs"], 1), _whole(instance["depth"]["tokens"], 1)),
            _seconds(instance.get("batch_s", 0.0)),
        )
        for instance in fields["instances"]
    )
    if not 1 <= len(instances) <= MAX_INSTANCES or any(not instance.cores for instance in instances):
        raise ValueError(f"{counted(len(instances), 'instance')}")
    slo = fields["slo_s"]
    if slo is not None and not 0 < float(slo) < 1e6:
        raise ValueError(f"an SLO of {slo!r:.20}")
    return EmbeddingPlan(instances, None if slo is None else float(slo), source)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(("cpu:", "cuda:", "exec:")):
        raise ValueError(f"a device {value!r:.40}")
    return value


def _whole(value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= 1 << 40:
        raise ValueError(f"a number {value!r:.40}")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        raise ValueError(f"a time {value!r:.40}")
    return float(value)
