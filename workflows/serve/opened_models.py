"""The models that generate text: each opened, sized, and given a host in the server's way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from phasewise._words import counted
from phasewise.serving.drafts.opening import DraftSource
from phasewise.serving.engine.engine_size import KV_SHARE_OF_FREE_MEMORY, EngineSize, default_kv_bytes
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.open_engine import ModelText
from phasewise.serving.model_table import AnswerPolicy, Predictor, TextRow
from phasewise.serving.models.forward import kv_bytes_per_slot
from phasewise.serving.pools.contract import Estimate
from phasewise.serving.processes.headroom import available_bytes
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.topology import read_machine
from phasewise.tuner.first_duels import FIRST_S
from phasewise.tuner.predictor import default_file
from phasewise.workflows.opening.drafts import find_drafts
from phasewise.workflows.opening.first_start import fight_first, pull_what_fits
from phasewise.workflows.opening.open_model import OpenModel, check_settings, open_model, open_under
from phasewise.workflows.opening.tuned_schedules import Plans
from phasewise.workflows.report import Report, silent
from phasewise.workflows.serve.core_plans import most_threads
from phasewise.workflows.serve.settings import KeysAndValues, ServeSettings
from phasewise.workflows.serve.ways import InThisProcess, OnNodes, PlannedInstance, SizedModel, Way

ALONE = InThisProcess()


@dataclass(frozen=True)
class OpenedModel:
    """A model that is served. `lines`: text about its plans. `cores`: CPUs of this host that compute it."""

    sized: SizedModel
    row: TextRow
    lines: Sequence[str]
    cores: frozenset[int]


@dataclass(frozen=True)
class Opener:
    """Opens models of a server by its settings, all in one way."""

    settings: ServeSettings
    way: Way = ALONE
    report: Report = silent

    def open_models(
        self, refs: Sequence[str], names: Sequence[tuple[str, ...]], stack: ExitStack
    ) -> list[OpenedModel]:
        """Open each model with its share of the memory for keys and values; `stack` closes them.

        names: for each model, names that requests may use; its id comes first.
        """
        settings, deadline_s = self.settings, time.monotonic() + FIRST_S
        plain = replace(self, settings=replace(settings, weights=replace(settings.weights, lora=None)))
        openers = [self, *[plain] * len(refs[1:])]  # adapters are the first model's
        for ref, own in zip(refs, openers, strict=False):
            check_settings(ref, own.settings.weights, settings.kv.kv_format, self.report)
        learns = settings.remote.remote is not None and not isinstance(self.way, OnNodes)  # which learn there
        if learns:
            pull_what_fits(settings.remote, settings.db, FIRST_S, self.report)
        opened = [own.loaded(ref) for ref, own in zip(refs, openers, strict=False)]
        if learns:
            opened = [self._fought(model, deadline_s - time.monotonic()) for model in opened]
        budgets = _budgets(opened, settings.kv)
        return [
            own.open(own.sized(ref, model, kv_bytes), called, stack)
            for own, ref, model, kv_bytes, called in zip(openers, refs, opened, budgets, names, strict=False)
        ]

    def loaded(self, ref: str) -> OpenModel:
        """The model in memory, with the plans of one engine."""
        settings, running = self.settings, self.settings.running
        return open_model(ref, settings.weights, running.threads, settings.db, self.report, running.ranks)

    def _fought(self, opened: OpenModel, seconds: float) -> OpenModel:
        """The model after hints for its products were fought over, on the cores of each of its instances."""
        settings, plans = self.settings, self.plans_of(opened)
        return fight_first(opened, plans, settings.weights, settings.db, read_machine(), seconds, self.report)

    def plans_of(self, opened: OpenModel) -> Sequence[Plans]:
        """The plans of each instance of a model; of its one engine where there are no instances."""
        return [instance.plans for instance in self.way.instances] or [opened.plans]

    def sized(self, ref: str, opened: OpenModel, kv_bytes: int | None) -> SizedModel:
        """The model with its engine's size. kv_bytes: for keys and values; None: a default."""
        settings, running = self.settings, self.settings.running
        is_whole = {role for role, _ in settings.pools.named} <= {"mixed"}
        has_head = is_whole and settings.prefixes.prefix_cache is None
        drafts = find_drafts(
            running.draft, opened, settings.db, self.report, running.draft_tokens, with_head=has_head
        )
        return SizedModel(ref, opened, drafts, self._size(opened, kv_bytes, drafts))

    def _size(self, opened: OpenModel, kv_bytes: int | None, drafts: DraftSource | None) -> EngineSize:
        running, kv, kept = self.settings.running, self.settings.kv, self.settings.prefixes.prefix_cache
        is_alone = self.way == ALONE  # instances have plans of their own, and nodes memory of their own
        is_elsewhere = isinstance(self.way, OnNodes)
        size = EngineSize.for_many(
            opened.model,
            self.settings.accepting.max_sequences,
            running.context_tokens,
            None if is_elsewhere else kv_bytes,
            kv.kv_format,
            None if drafts is None else drafts.model,
            kv_shared=not is_alone or kept is not None,  # they leave what computed them
            free=(lambda: None) if is_elsewhere else None,
            teams=teams_of(opened.plans) if is_alone else (),
        )
        limits = replace(
            size.limits, max_batch_tokens=running.max_batch_tokens, prefix_reuse=not kv.no_prefix_reuse
        )
        return replace(
            size,
            limits=limits,
            kv=replace(size.kv, touched=True),
            kv_policy=kv.kv_policy,
            tpot_ms=running.tpot_ms,
            threads=most_threads(running.threads) if is_alone else 0,
        )

    def open(self, sized: SizedModel, names: tuple[str, ...], stack: ExitStack) -> OpenedModel:
        """Open the model's host, which `stack` closes. names: names that requests may use, the id first."""
        settings, model = self.settings, sized.open_model.model
        text = ModelText(model, allow_special=settings.accepting.allow_special)
        predictor = open_predictor(settings.running.predictor, model.name, self.report)
        hosted = stack.enter_context(self.way.open(sized, text, settings))
        answering = settings.answering
        sampling = model.sampling.with_overrides(answering.temperature, answering.top_p, answering.min_p)
        policy = AnswerPolicy(settings.accepting.max_prompt_tokens, answering.tool_format, answering.receipts)
        row = TextRow(model, text, hosted.size, names, hosted.host, sampling, predictor, policy)
        return OpenedModel(sized, row, hosted.lines, hosted.cores)

    def opened_as(self, served: OpenedModel) -> Iterator[tuple[PlannedInstance | None, OpenModel]]:
        """Yield the model as this host opens it for each instance; without instances, as it is opened."""
        weights, db, sized = self.settings.weights, self.settings.db, served.sized
        ref = sized.open_model.model.ref_here(sized.ref)
        for instance in self.way.instances:
            yield instance, open_under(instance.plans, ref, weights, db, read_machine())
        if not self.way.instances:
            yield None, served.sized.open_model


def open_predictor(text: str, model_name: str, report: Report = silent) -> Predictor | None:
    """Open the predictor of answers' lengths, which learns on. PredictorError for an unreadable file.

    text: the predictor's file; `auto`: the model's own file, if there is one; `off`: no predictor.
    """
    if text == "off":
        return None
    path = default_file(model_name) if text == "auto" else text
    if text == "auto" and not default_file(model_name).exists():
        report(f"there is no predictor of {model_name} at {path}: answers' lengths are not predicted")
        return None
    from phasewise.tuner.predictor.files import load_predictor
    from phasewise.tuner.predictor.live import LiveEstimator
    from phasewise.tuner.predictor.log import PromptFacts

    trained = load_predictor(path)
    n_answers = counted(int(trained.trained_on.get("answers", 0)), "answer")
    report(f"answers' lengths are predicted by {path}, trained on {n_answers}")
    if trained.model_name != model_name:
        report(f"it was trained on answers of {trained.model_name}, not of {model_name}")
    estimator = LiveEstimator(trained)

    def facts_of(asked: Submit) -> PromptFacts:
        about = asked.sampling.temperature, asked.max_tokens, asked.n_messages, asked.system_prompt_id
        return PromptFacts(asked.prompt_token_ids, *about)

    return Predictor(
        estimate=lambda asked: Estimate(*estimator(facts_of(asked))),
        learn=lambda asked, output_tokens: estimator.observe(facts_of(asked), output_tokens),
    )


def _budgets(models: Sequence[OpenModel], kv: KeysAndValues) -> list[int | None]:
    """Bytes of each model's keys and values, for as many tokens in each. They divide the budget; without a
    budget, a quarter of the free memory, where no model gets more than it would alone. None: a default.
    """
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
