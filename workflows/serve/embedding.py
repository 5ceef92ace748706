"""Serve an embedding model: from settings to a running server, and how cores and queues are chosen for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from phasewise._words import counted
from phasewise.serving.embedding.devices import cores_by_node, highest_cores, instance_cores
from phasewise.serving.embedding.open_embedding import OpenEmbedding, open_embedding
from phasewise.serving.embedding.plan import DEFAULT_SLO_S, EmbeddingPlan, Instance
from phasewise.serving.embedding.queues import Depth
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.topology import Machine, read_machine
from phasewise.tuner.plans import default_thread_count
from phasewise.workflows.embed.accelerators import Accelerators, accelerators_here
from phasewise.workflows.embed.kept_plan import kept_plan
from phasewise.workflows.errors import UsageError
from phasewise.workflows.report import Report
from phasewise.workflows.serve.core_plans import cores_of_embeddings
from phasewise.workflows.serve.settings import Embeddings, ServeSettings


@dataclass(frozen=True)
class EmbeddingRoom:
    """The cores that embeddings may have. `taken`: PUs of a language model on the same machine. `threads`:
    cores of all instances together, the highest-numbered; None: all that are left.
    """

    machine: Machine
    taken: Collection[int] = ()
    threads: int | None = None

    @property
    def cores(self) -> list[int]:
        """The cores for all instances. UsageError where too few are left."""
        return highest_cores(self.machine, self.taken, self.threads)

    def cut(self, n_instances: int) -> list[tuple[int, ...]]:
        """The cores of each instance. UsageError where there are too few."""
        try:
            return instance_cores(self.machine, n_instances, self.taken, self.threads)
        except ValueError as error:
            raise UsageError(str(error)) from error


def plan_for(
    model: PackedModel,
    room: EmbeddingRoom,
    settings: Embeddings,
    accelerators: Accelerators,
    report: Report,
    db: str | None = None,
) -> EmbeddingPlan:
    """The flags' plan, else the stored one, else a default: every accelerator, and one instance for each NUMA
    node, which learn their depths.

    Accelerators of a stored plan keep their depths; one that the plan does not know learns its own. Beside a
    language model a stored plan's CPU instances are cut to the cores that are left, and their depths with
    them. db: where plans are kept. UsageError where there are too few cores, or no device is left.
    """
    is_flagged = settings.embed_instances is not None or room.threads is not None
    stored = None
    if not is_flagged or room.taken:
        stored = kept_plan(db, model, room.machine, report)
    if stored is None:
        own = _instances(room, settings, ())
        stored = EmbeddingPlan(own, DEFAULT_SLO_S, "flags" if is_flagged and not room.taken else "default")
    elif room.taken:
        stored = replace(stored, instances=_instances(room, settings, stored.instances))
    usable = stored.only(lambda instance: instance.is_cpu or instance.device in accelerators.names)
    for instance in stored.instances:
        is_switched_off = instance.device.startswith("cuda:") and not settings.embed_accelerators
        if instance not in usable.instances and not is_switched_off:
            report(f"the embedding plan has {instance.device}, which is not here: others embed without it")
    planned = {instance.device for instance in usable.instances}
    front = (min(room.cores),) if room.taken else tuple(sorted(room.machine.allowed_pus)[:1])
    added = tuple(Instance(name, front) for name in accelerators.names if name not in planned)
    on_cpus = filter(lambda instance: instance.is_cpu, usable.instances)
    plan = replace(usable, instances=(*usable.accelerated.instances, *added, *on_cpus))
    if not settings.embed_cpu:
        plan = plan.accelerated
        if not plan.instances:
            raise UsageError("embed_cpu = false: there is no accelerator here; name one with --embed-device")
    if not plan.instances:
        plan = replace(plan, instances=_instances(room, settings, ()), slo_s=DEFAULT_SLO_S, source="default")
    return plan


def _instances(
    room: EmbeddingRoom, settings: Embeddings, planned: tuple[Instance, ...]
) -> tuple[Instance, ...]:
    """The accelerators that `planned` names, and its CPU instances cut to the cores that are there."""
    on_cpus = [instance for instance in planned if instance.is_cpu]
    others = [instance for instance in planned if not instance.is_cpu]
    if planned and not on_cpus:
        cut: list[tuple[int, ...]] = []
    else:
        n_nodes = len(cores_by_node(room.machine, room.cores))
        cut = room.cut(settings.embed_instances or max(1, n_nodes))
    n_planned = sum(len(instance.cores) for instance in on_cpus)
    held = sum((instance.depth for instance in on_cpus), Depth(0, 0))
    front = (min(room.cores),)
    return (
        *(replace(instance, cores=front) for instance in others),
        *(
            Instance(f"cpu:{index}", own, held.scaled(min(1.0, len(own) / n_planned)))
            if on_cpus
            else Instance(f"cpu:{index}", own)
            for index, own in enumerate(cut)
        ),
    )


def open_embeddings(
    ref: str, settings: ServeSettings, taken: Collection[int] | None, report: Report
) -> OpenEmbedding:
    """Open a model that embeds, with its workers. Accelerators that cannot start are left out and reported.

    taken: PUs of language models on this machine; None: there are none. RanksError, UsageError, ModelError.
    """
    weights, on, machine = settings.weights, settings.embeddings, read_machine()
    if weights.is_canonical:  # accelerators round in their own ways
        on = replace(on, embed_accelerators=False)
    if taken is None:
        room = EmbeddingRoom(machine, threads=settings.running.threads)
    else:
        room = _room_beside(on, machine, taken, report)
    model = load_model(ref, weights.weight_format, report=report, pack=weights.pack)
    accelerators = accelerators_here(with_gpus=on.embed_accelerators, devices=on.embed_device)
    plan = plan_for(model, room, on, accelerators, report, settings.db)
    report(plan.describe() + (", with the same bits on every CPU" if weights.is_canonical else ""))
    opened = open_embedding(
        model,
        ref,
        model.format,
        plan,
        is_canonical=weights.is_canonical,
        commands=accelerators.commands,
        report=report,
        other_cores=len(taken or ()),
    )
    if taken is None:
        what = "scores of pairs" if model.config.scores else f"vectors of {model.config.vector_width} numbers"
        report(f"{model.name} ({model.format}): {what}, inputs of at most {opened.text.max_tokens} tokens")
    return opened


def _room_beside(
    settings: Embeddings, machine: Machine, taken: Collection[int], report: Report
) -> EmbeddingRoom:
    """Choose `embed_cores` of the cores that are not taken, the highest ones, else a quarter of all cores.

    Where none is left and no number is given embeddings share the highest one, behind the language models.
    UsageError where there are too few.
    """
    free = highest_cores(machine, taken)
    own = cores_of_embeddings(settings, default_thread_count(machine))
    if settings.embed_cores is None:
        own = min(own, max(1, len(free)))
    if not free and settings.embed_cores is None:
        report("embeddings share a core with the language model, which goes first: no other is left")
        return EmbeddingRoom(machine, threads=own)
    if own > len(free):
        raise UsageError(
            f"{counted(own, 'core')} for embeddings: {len(free)} are there that the "
            "language model does not use; choose fewer for it, or for embed_cores"
        )
    return EmbeddingRoom(machine, {*taken, *set(free).difference(highest_cores(machine, taken, own))})
