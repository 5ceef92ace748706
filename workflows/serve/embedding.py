"""Serve an embedding model: from settings to a running server, and how cores and queues are chosen for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening.open_model import Weights
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from phasewise.serving.embedding.open_embedding import OpenEmbedding
    from phasewise.serving.embedding.plan import EmbeddingPlan
    from phasewise.serving.embedding_service import EmbeddingSettings
    from phasewise.serving.http.transport.listening import Address
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.topology import Machine


@dataclass(frozen=True)
class Embeddings:
    """Settings of embedding. `embed_model`: beside a language model; None: that alone, or no embeddings.

    `embed_instances`: processes on the CPU, None for the stored plan's or one for each NUMA node.
    `embed_cores`: cores for embeddings beside a language model. `slo_s`: None for the stored plan's.
    """

    embed_model: str | None = None
    embed_instances: int | None = None
    embed_cores: int | None = None
    embed_accelerators: bool = True


def plan_for(
    model: PackedModel,
    machine: Machine,
    settings: Embeddings,
    report: Report,
    *,
    taken: Collection[int] = (),
    threads: int | None = None,
    db: str | None = None,
) -> EmbeddingPlan:
    """The flags' plan, else the stored one, else a default: every accelerator, and one instance for each NUMA
    node, which promise no time. taken: PUs that a language model beside it has. threads: cores of all
    instances together, the highest ones. db: where plans are kept. UsageError where there are too few.
    """
    from phasewise.serving.embedding.devices import accelerators, instance_cores
    from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
    from phasewise.topology import Kind
    from phasewise.workflows.embed.kept_plan import kept_plan

    allowed = frozenset(machine.allowed_pus)
    is_flagged = settings.embed_instances is not None or threads is not None
    if not is_flagged and not taken:
        stored = kept_plan(db, model, machine, report)
        if stored is not None and not settings.embed_accelerators:
            stored = stored.on_cpus
        if stored is not None and stored.instances:
            return stored
    n_nodes = max(1, len([node for node in machine.nodes(Kind.NUMA) if allowed.intersection(node.cpus)]))
    try:
        cores = instance_cores(machine, settings.embed_instances or n_nodes, taken, threads)
    except ValueError as error:
        raise UsageError(str(error)) from error
    devices = accelerators() if settings.embed_accelerators else []
    front = (min(core for own in cores for core in own),) if taken else tuple(sorted(allowed)[:1])
    instances = [Instance(device.name, front) for device in devices if device.kind == "cuda"]
    instances += [Instance(f"cpu:{index}", own) for index, own in enumerate(cores)]
    return EmbeddingPlan(tuple(instances), source="flags" if is_flagged else "default")


def open_for(
    model: PackedModel, ref: str, plan: EmbeddingPlan, report: Report, *, is_canonical: bool = False
) -> OpenEmbedding:
    """Workers of the plan, ready. A GPU's worker that cannot start is left out, and `report` told why.

    is_canonical: they compute with the same bits on every CPU.
    """
    from phasewise.serving.embedding.open_embedding import open_embedding
    from phasewise.serving.errors import RanksError

    report(plan.describe() + (", with the same bits on every CPU" if is_canonical else ""))
    try:
        return open_embedding(model, ref, model.format, plan, is_canonical=is_canonical)
    except RanksError as error:
        on_cpus = plan.on_cpus
        if on_cpus == plan or not on_cpus.instances:
            raise
        report(f"warning: {error}; the CPU embeds alone")
        return open_embedding(model, ref, model.format, on_cpus)


def makes_vectors(ref: str, weight_format: str, report: Report) -> bool:
    """True where the model is made for embedding, False where it generates text. ModelError."""
    from phasewise.serving.loaders import is_made_for_embedding

    return is_made_for_embedding(ref, weight_format, report=report)


def load_embedding_model(ref: str, weights: Weights, report: Report) -> PackedModel:
    """A model that is made for embedding, in memory. ModelError."""
    from phasewise.serving.loaders import load_model

    return load_model(ref, weights.weight_format, report=report, checksum=weights.checksum)


def serve_embeddings(
    ref: str,
    weights: Weights,
    embeddings: Embeddings,
    threads: int | None,
    db: str | None,
    settings_of: Callable[[str], EmbeddingSettings],
    address: Address,
    report: Report,
) -> None:
    """Serve an embedding model alone until a signal ends it. EngineLost, RanksError, UsageError.

    settings_of: of the server, by the model's name.
    """
    from phasewise.serving.embedding_service import run_embedding_service
    from phasewise.topology import read_machine

    model = load_embedding_model(ref, weights, report)
    on = _devices_for(embeddings, weights)
    plan = plan_for(model, read_machine(), on, report, threads=threads, db=db)
    with open_for(model, ref, plan, report, is_canonical=weights.is_canonical) as opened:
        what = "scores of pairs" if opened.scores else f"vectors of {opened.width} numbers"
        report(f"{model.name} ({model.format}): {what}, inputs of at most {opened.text.max_tokens} tokens")
        run_embedding_service(opened, settings_of(model.name), address, report)


def _devices_for(settings: Embeddings, weights: Weights) -> Embeddings:
    """Accelerators round in their own ways."""
    return replace(settings, embed_accelerators=False) if weights.is_canonical else settings


def threads_beside(settings: Embeddings, threads: int | None) -> int:
    """Cores of a language model that shares this machine with embeddings: `threads`, or what these leave.

    UsageError where there are too few for both.
    """
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_thread_count

    n_cores = default_thread_count(read_machine())
    own = settings.embed_cores or _default_share(n_cores)
    left = n_cores - own if threads is None else threads
    if left < 1 or left + own > n_cores:
        raise UsageError(
            f"{counted(own, 'core')} for embeddings and {max(left, 1)} for the language model: "
            f"{n_cores} are there; choose fewer with --embed-cores or --threads"
        )
    return left


def _default_share(n_cores: int) -> int:
    return max(1, n_cores // 4)


def open_beside(
    settings: Embeddings, weights: Weights, taken: Collection[int], report: Report
) -> OpenEmbedding:
    """Embeddings beside a language model, which computes on the PUs `taken`.

    They have `embed_cores` of the other cores, the highest ones, else a quarter of all, at least one.
    UsageError where there are too few, or the model is no embedding model.
    """
    from phasewise.serving.embedding.devices import free_cores
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_thread_count

    assert settings.embed_model is not None
    machine = read_machine()
    free = free_cores(machine, taken)
    own = settings.embed_cores or min(_default_share(default_thread_count(machine)), max(1, len(free)))
    if own > len(free):
        raise UsageError(
            f"{counted(own, 'core')} for embeddings: {len(free)} are there that the "
            "language model does not use; choose fewer for it, or for --embed-cores"
        )
    model = load_embedding_model(settings.embed_model, weights, report)
    instances = replace(_devices_for(settings, weights), embed_instances=settings.embed_instances or 1)
    plan = plan_for(model, machine, instances, report, taken={*taken, *free[:-own]})
    return open_for(model, settings.embed_model, plan, report, is_canonical=weights.is_canonical)
