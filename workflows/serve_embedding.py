"""Serve an embedding model: from settings to a running server, and how cores and queues are chosen for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phasewise.workflows.errors import UsageError
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from phasewise.serving.embedding.open_embedding import OpenEmbedding
    from phasewise.serving.embedding.plan import EmbeddingPlan
    from phasewise.serving.embedding.service import EmbeddingSettings
    from phasewise.serving.http.listening import Address
    from phasewise.serving.model import PackedModel
    from phasewise.topology import Machine


@dataclass(frozen=True)
class Embeddings:
    """How texts are embedded. `embed_model`: beside a language model; None: that alone, or no embeddings.

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
    front_cores: int = 0,
    threads: int | None = None,
) -> EmbeddingPlan:
    """The flags' plan, else the stored one, else a default: every accelerator, and one instance for each NUMA
    node, which promise no time. front_cores: the lowest cores, which others use. threads: cores of all
    instances together, the highest ones. UsageError where there are too few.
    """
    from phasewise.serving.embedding.devices import accelerators, instance_cores
    from phasewise.serving.embedding.plan import EmbeddingPlan, Instance, load_plan, plan_file
    from phasewise.serving.errors import ServingError
    from phasewise.topology import Kind, placement_signature

    allowed = frozenset(machine.allowed_pus)
    is_flagged = settings.embed_instances is not None or threads is not None
    if not is_flagged and not front_cores:
        placement = placement_signature(machine, machine.allowed_pus)
        path = plan_file(model.name, model.format, str(placement))
        try:
            stored = load_plan(path, allowed)
        except ServingError as error:
            report(f"{error}; the default is used")
            stored = None
        if stored is not None:
            return stored
    n_nodes = max(1, len([node for node in machine.nodes(Kind.NUMA) if allowed.intersection(node.cpus)]))
    try:
        cores = instance_cores(machine, settings.embed_instances or n_nodes, front_cores, threads)
    except ValueError as error:
        raise UsageError(str(error)) from error
    found = accelerators() if settings.embed_accelerators and not front_cores else []
    front = tuple(sorted(allowed)[:1])
    instances = [Instance(one.name, front) for one in found if one.kind == "cuda"]
    instances += [Instance(f"cpu:{at}", own) for at, own in enumerate(cores)]
    return EmbeddingPlan(tuple(instances), source="flags" if is_flagged else "default")


def open_for(model: PackedModel, ref: str, plan: EmbeddingPlan, report: Report) -> OpenEmbedding:
    """Workers of the plan, ready. A GPU's worker that cannot start is left out, and `report` told why."""
    from phasewise.serving.embedding.open_embedding import open_embedding
    from phasewise.serving.errors import RanksError

    report(plan.describe())
    try:
        return open_embedding(model, ref, model.format, plan)
    except RanksError as error:
        cpus = tuple(one for one in plan.instances if one.device.startswith("cpu:"))
        if len(cpus) == len(plan.instances) or not cpus:
            raise
        report(f"warning: {error}; the CPU embeds alone")
        return open_embedding(model, ref, model.format, replace(plan, instances=cpus))


def open_embedding_model(ref: str, weight_format: str, report: Report) -> PackedModel | None:
    """The model where it is made for embedding, None where it generates text."""
    from phasewise.serving.loaders import is_made_for_embedding, load_model

    if not is_made_for_embedding(ref, weight_format, report=report):
        return None
    return load_model(ref, weight_format, report=report)


def serve_embeddings(
    model: PackedModel,
    ref: str,
    embeddings: Embeddings,
    settings: EmbeddingSettings,
    address: Address,
    threads: int | None,
    report: Report,
) -> None:
    """Serve an embedding model alone until a signal ends it. EngineLost, RanksError, UsageError."""
    from phasewise.serving.embedding.service import run_embedding_service
    from phasewise.topology import read_machine

    plan = plan_for(model, read_machine(), embeddings, report, threads=threads)
    with open_for(model, ref, plan, report) as opened:
        what = "scores of pairs" if opened.scores else f"vectors of {opened.width} numbers"
        report(f"{model.name} ({model.format}): {what}, inputs of at most {opened.text.max_tokens} tokens")
        run_embedding_service(opened, settings, address, report)


def open_beside(
    settings: Embeddings, weight_format: str, threads: int | None, report: Report
) -> tuple[OpenEmbedding, int]:
    """Embeddings beside a language model, and how many cores are left to that: the lowest ones.

    Embeddings have `embed_cores` of the highest cores, else a quarter, at least one. UsageError where there
    are too few, or the model is no embedding model.
    """
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_thread_count

    machine = read_machine()
    n_cores = default_thread_count(machine)
    own = settings.embed_cores or max(1, n_cores // 4)
    left = n_cores - own if threads is None else threads
    if left < 1 or left + own > n_cores:
        raise UsageError(
            f"{own} cores for embeddings and {max(left, 1)} for the language model: {n_cores} are there;"
            " choose fewer with --embed-cores or --threads"
        )
    assert settings.embed_model is not None
    model = open_embedding_model(settings.embed_model, weight_format, report)
    if model is None:
        raise UsageError(f"--embed-model {settings.embed_model} is no embedding model")
    cores = replace(settings, embed_instances=settings.embed_instances or 1)
    plan = plan_for(model, machine, cores, report, front_cores=n_cores - own)
    return open_for(model, settings.embed_model, plan, report), left
