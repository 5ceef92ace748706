"""The models that a server answers with: each opened and sized, with an engine of its own or with pools."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.workflows.report import Report, silent
from phasewise.workflows.serve.core_plans import replanned
from phasewise.workflows.serve.settings import KeysAndValues, ServeSettings

if TYPE_CHECKING:
    from phasewise.serving.drafts.opening import DraftSource
    from phasewise.serving.engine.core_watch import CoreWatch
    from phasewise.serving.engine.engine_host import OpenHost
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import ModelText, OpenEngine
    from phasewise.serving.model_table import AnswerPolicy, Predictor, Served, TextRow
    from phasewise.serving.prefix_store.opening import PrefixSettings
    from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
    from phasewise.topology import Machine
    from phasewise.tuner.plans import DefaultPlan, Phase, ServicePlan
    from phasewise.workflows.opening.open_model import OpenModel, Weights
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse
    from phasewise.workflows.serve.instance_process import InstanceSpec
    from phasewise.workflows.serve.pools import PlannedInstance
    from phasewise.workflows.serve.settings import ServeSettings

    Plans = Mapping[Phase, ServicePlan]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedModel:
    """A model that is served by an engine of its own, or by `instances` in pools, as `spec` says of each.

    `lines` tell its plans. `cores`: CPUs of this host that compute it. `drafts`: of its own engine.
    """

    spec: InstanceSpec
    open_model: OpenModel
    opened: Served
    host: OpenHost
    predictor: Predictor | None
    lines: Sequence[str]
    cores: frozenset[int]
    instances: Sequence[PlannedInstance] = ()
    drafts: DraftSource | None = None

    def opened_as(self) -> Iterator[tuple[PlannedInstance | None, OpenModel]]:
        """The model as this host opens it for each of its instances; without instances as it is opened."""
        from phasewise.topology import read_machine
        from phasewise.workflows.opening.open_model import open_under

        spec = self.spec
        for instance in self.instances:
            yield instance, open_under(instance.plans, spec.model, spec.weights, spec.db, read_machine())
        if not self.instances:
            yield None, self.open_model

    def uses(self, model: OpenModel) -> list[ScheduleUse]:
        """The schedules that a model opened so runs by."""
        size = self.opened.size
        return model.explain(size.step_tokens, size.limits.max_sequences, size.kv.format)


def row_of(
    served: OpenedModel, names: tuple[str, ...], settings: ServeSettings, answers: AnswerPolicy
) -> TextRow:
    """The model's row in the table of the server. names: what requests may call it, its id first."""
    from phasewise.serving.model_table import TextRow

    sampling = sampling_of(served.open_model, settings)
    return TextRow(served.opened, names, served.host, sampling, served.predictor, answers)


def sampling_of(opened: OpenModel, settings: ServeSettings) -> SamplingDefaults:
    """The sampling of answers where requests state nothing."""
    answering = settings.answering
    return opened.model.sampling.with_overrides(answering.temperature, answering.top_p, answering.min_p)


def open_models(
    refs: Sequence[str], settings: ServeSettings, stack: ExitStack, report: Report
) -> list[OpenedModel]:
    """Each with its share of the memory for keys and values; `stack` closes them."""
    from phasewise.topology import read_machine
    from phasewise.tuner.first_duels import FIRST_S
    from phasewise.workflows.opening.first_start import pull_what_fits
    from phasewise.workflows.opening.open_model import check_settings, open_model

    running, deadline_s = settings.running, time.monotonic() + FIRST_S
    for ref, weights in zip(refs, _weights_of(refs, settings), strict=True):
        check_settings(ref, weights, settings.kv.kv_format, report)
    pull_what_fits(settings.remote, settings.db, FIRST_S, report)
    opened = [
        open_model(ref, weights, running.threads, settings.db, report, running.ranks)
        for ref, weights in zip(refs, _weights_of(refs, settings), strict=True)
    ]
    if settings.remote.remote is not None:
        machine = read_machine()
        opened = [
            _fought(model, settings, machine, deadline_s - time.monotonic(), report) for model in opened
        ]
    budgets = _budgets(opened, settings.kv)
    owns = [replace(settings, weights=weights) for weights in _weights_of(refs, settings)]
    return [
        open_sized(sized(ref, model, kv_bytes, own, report), own, stack, report)
        for ref, model, kv_bytes, own in zip(refs, opened, budgets, owns, strict=True)
    ]


def _weights_of(refs: Sequence[str], settings: ServeSettings) -> list[Weights]:
    """Adapters are of the first model."""
    return [settings.weights, *(replace(settings.weights, lora=None) for _ in refs[1:])]


def _fought(
    opened: OpenModel, settings: ServeSettings, machine: Machine, seconds: float, report: Report
) -> OpenModel:
    """The model after hints for its products were fought over, on the cores of each of its instances."""
    from phasewise.workflows.opening.first_start import fight_first
    from phasewise.workflows.serve.pools import planned_instances

    instances = planned_instances(settings.pools, machine)
    plans = [instance.plans for instance in instances] or [opened.plans]
    return fight_first(opened, plans, settings.weights, settings.db, machine, seconds, report)


@dataclass(frozen=True)
class SizedModel:
    """A model whose engine is not open yet. `drafts`: where drafts of answers come from; None: nowhere."""

    ref: str
    open_model: OpenModel
    drafts: DraftSource | None
    size: EngineSize

    @property
    def n_bytes(self) -> int:
        """Bytes of weights, keys and values, scratch and vocabulary, its draft model's as well."""
        from phasewise.serving.engine.engine_size import engine_bytes

        draft = None if self.drafts is None else self.drafts.model
        return engine_bytes(self.open_model.model, self.open_model.plans, self.size, draft)


def sized(
    ref: str, opened: OpenModel, kv_bytes: int | None, settings: ServeSettings, report: Report
) -> SizedModel:
    """The size of its engine. kv_bytes: for keys and values; None: a default."""
    from phasewise.workflows.opening.drafts import find_drafts

    running = settings.running
    tokens, with_head = running.draft_tokens, not settings.prefixes.is_asked
    drafts = (
        None
        if settings.pools.is_asked
        else find_drafts(running.draft, opened, settings.db, report, tokens, with_head=with_head)
    )
    return SizedModel(ref, opened, drafts, _size(opened, kv_bytes, settings, drafts))


def open_sized(model: SizedModel, settings: ServeSettings, stack: ExitStack, report: Report) -> OpenedModel:
    """Its engine or its pools, which `stack` closes."""
    from phasewise.serving.engine.engine_thread import EngineThread
    from phasewise.serving.engine.open_engine import ModelText
    from phasewise.workflows.serve.embedding import cores_beside
    from phasewise.workflows.serve.instance_process import InstanceSpec
    from phasewise.workflows.serve.pools import open_pools
    from phasewise.workflows.serve.ray_pools import KvWanted, open_ray_pools

    running, db, opened, size = settings.running, settings.db, model.open_model, model.size
    text = ModelText(opened.model, allow_special=settings.accepting.allow_special)
    predictor = open_predictor(running.predictor, opened.model.name, report)
    prefixes = settings.prefixes.for_engines()
    beside = cores_beside(settings.embeddings) if settings.pools.cluster is None else 0
    spec = InstanceSpec(model.ref, settings.weights, size, None, db, prefixes=prefixes, other_cores=beside)
    wanted = KvWanted(settings.kv.kv_budget_bytes, running.context_tokens)
    if settings.pools.is_asked:
        pooled = stack.enter_context(
            open_pools(settings.pools, opened, text, spec, wanted.context_tokens)
            if settings.pools.cluster is None
            else open_ray_pools(settings.pools, opened, text, spec, wanted)
        )
        return OpenedModel(
            spec, opened, pooled, pooled.host, predictor, pooled.lines, pooled.cores, pooled.instances
        )
    alone = stack.enter_context(_open_engine(opened, size, text, model.drafts, prefixes))
    alone.engine.cores = watch_of_server(
        opened, model.ref, settings, most=size.threads, in_one_rank=alone.engine.ranks.moves_in_place
    )
    host: OpenHost = partial(EngineThread, alone.engine)
    lines = [plan.describe() for plan in opened.plans.values()]
    cores = frozenset(core for plan in opened.plans.values() for core in plan.all_cores)
    return OpenedModel(spec, opened, alone, host, predictor, lines, cores, drafts=model.drafts)


def open_predictor(text: str, model_name: str, report: Report = silent) -> Predictor | None:
    """The predictor of answers' lengths, which learns how long they became. PredictorError where its file
    cannot be read.

    text: its file; `auto` for the model's own file, None where there is none; `off` for None.
    """
    if text == "off":
        return None
    from phasewise.serving.model_table import Predictor
    from phasewise.serving.pools.contract import Estimate
    from phasewise.tuner.predictor.files import default_file, load_predictor
    from phasewise.tuner.predictor.live import LiveEstimator
    from phasewise.tuner.predictor.log import PromptFacts

    path = default_file(model_name) if text == "auto" else text
    if text == "auto" and not default_file(model_name).exists():
        report(f"there is no predictor of {model_name} at {path}: answers' lengths are not predicted")
        return None
    trained = load_predictor(path)
    n_answers = counted(int(trained.trained_on.get("answers", 0)), "answer")
    report(f"answers' lengths are predicted by {path}, trained on {n_answers}")
    if trained.model_name != model_name:
        report(f"it was trained on answers of {trained.model_name}, not of {model_name}")
    estimator = LiveEstimator(trained)
    return Predictor(
        estimate=lambda facts: Estimate(*estimator(PromptFacts(*facts))),
        learn=lambda facts, output_tokens: estimator.observe(PromptFacts(*facts), output_tokens),
    )


def _size(
    opened: OpenModel,
    kv_bytes: int | None,
    settings: ServeSettings,
    drafts: DraftSource | None,
) -> EngineSize:
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.ranks.rank_layout import teams_of

    running, kv = settings.running, settings.kv
    is_elsewhere = settings.pools.cluster is not None  # whose nodes have memory of their own
    teams = () if settings.pools.is_asked else teams_of(opened.plans)  # pools have plans of their own
    size = EngineSize.for_many(
        opened.model,
        settings.accepting.max_sequences,
        running.context_tokens,
        None if is_elsewhere else kv_bytes,
        kv.kv_format,
        None if drafts is None else drafts.model,
        kv_shared=settings.pools.is_asked or settings.prefixes.is_asked,
        free=(lambda: None) if is_elsewhere else None,
        teams=teams,
    )
    limits = replace(
        size.limits, max_batch_tokens=running.max_batch_tokens, prefix_reuse=not kv.no_prefix_reuse
    )
    touched = replace(size.kv, touched=True)
    return replace(
        size,
        limits=limits,
        kv=touched,
        kv_policy=kv.kv_policy,
        tpot_ms=running.tpot_ms,
        threads=0 if settings.pools.is_asked else most_threads(running.threads),
    )


def _open_engine(
    opened: OpenModel,
    size: EngineSize,
    text: ModelText,
    drafts: DraftSource | None,
    prefixes: PrefixSettings | None,
) -> OpenEngine:
    from phasewise.serving.engine.open_engine import open_engine

    return open_engine(
        opened.model, opened.plans, size, text, opened.schedules, drafts=drafts, prefixes=prefixes
    )


def _budgets(models: Sequence[OpenModel], kv: KeysAndValues) -> list[int | None]:
    """Bytes for keys and values of each model. Of one budget each gets what pays for as many tokens as the
    others have; without one that is a quarter of the free memory, and no more than a model alone would take.
    """
    from phasewise.serving.engine.engine_size import KV_SHARE_OF_FREE_MEMORY, default_kv_bytes
    from phasewise.serving.models.forward import kv_bytes_per_slot
    from phasewise.serving.processes.headroom import available_bytes
    from phasewise.serving.ranks.rank_layout import teams_of

    if len(models) == 1:
        return [kv.kv_budget_bytes]
    per_slot = [kv_bytes_per_slot(each.model, kv.kv_format, teams_of(each.plans)) for each in models]
    budget, free = kv.kv_budget_bytes, available_bytes()
    if budget is None:
        alone = [default_kv_bytes(model.model, free) for model in models]
        if free is None:
            return list(alone)
        share = free * KV_SHARE_OF_FREE_MEMORY
        return [
            min(most, int(share * own / sum(per_slot))) for most, own in zip(alone, per_slot, strict=True)
        ]
    return [budget * own // sum(per_slot) for own in per_slot]


def most_threads(threads: int | None) -> int:
    """Threads for which a rank of a server has room: its flag's, else one on every core of the machine."""
    from phasewise.topology import Kind, read_machine

    machine = read_machine()
    return threads or len(machine.nodes(Kind.CORE)) or len(machine.allowed_pus)


def watch_of_server(
    opened: OpenModel, ref: str, settings: ServeSettings, *, most: int, in_one_rank: bool
) -> CoreWatch:
    """The watch over the cores of an engine that computes both phases.

    most: threads that a rank has room for. in_one_rank: the engine stays one rank.
    """
    from phasewise.serving.engine.core_watch import CoreWatch
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate
    from phasewise.topology.process_limits import read_limits
    from phasewise.tuner.plans import model_key
    from phasewise.workflows.opening.open_model import suited_default

    name = locate(ref, cache_root(None), silent).name
    key = model_key(name, settings.weights.weight_format)
    default = suited_default(ref, settings.weights.weight_format, silent)

    def plans_on(machine: Machine) -> Plans:
        plans = plans_now(key, settings, machine, default)
        if in_one_rank:
            return {phase: _one_rank(plan, machine, most) for phase, plan in plans.items()}
        return plans

    replan = partial(replanned, opened, plans_on, settings.weights, settings.db)
    return CoreWatch(opened.plans, read_limits, replan)


def plans_now(key: str, settings: ServeSettings, machine: Machine, default: DefaultPlan) -> Plans:
    """The plans of a server on the cores of `machine`, its flags kept as far as these go."""
    from phasewise.tuner.plans import default_thread_count, plans_for
    from phasewise.workflows.serve.embedding import cores_of_embeddings

    running, n_cores = settings.running, default_thread_count(machine)
    threads, ranks = running.threads, running.ranks
    if threads is not None:
        most = len(machine.allowed_pus)
        if settings.embeddings.embed_model is not None and not settings.pools.is_asked:
            most = max(1, n_cores - cores_of_embeddings(settings.embeddings, n_cores))
        threads = min(threads, most)
    if ranks is not None:
        ranks = min(ranks, n_cores if threads is None else threads)
    return plans_for(settings.db, machine, key, threads, _log.warning, ranks, default)


def _one_rank(plan: ServicePlan, machine: Machine, most: int) -> ServicePlan:
    from phasewise.tuner.plans import default_plan, default_thread_count

    if len(plan.ranks) == 1 and len(plan.cores) <= most:
        return plan.with_bands_that(lambda band: len(band.cores) <= most)
    threads = min(most, default_thread_count(machine))
    return replace(default_plan(machine, plan.phase, threads), source="default")
