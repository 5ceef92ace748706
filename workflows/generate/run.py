"""One answer of a model, streamed: `phasewise generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phasewise._interrupts import remembered_interrupts
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.one_answer import OneAnswer
from phasewise.serving.engine.open_engine import ModelText, open_engine
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
from phasewise.workflows.errors import UsageError
from phasewise.workflows.generate.answer_settings import AnswerSettings, SamplingChoice
from phasewise.workflows.opening.drafts import DraftRule, check_draft, find_drafts, rule_of
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.opening.open_model import check_settings, hint_at_tuning, open_model
from phasewise.workflows.report import Report, silent
from phasewise.workflows.topo.plan_json import plan_cores

if TYPE_CHECKING:
    from phasewise.workflows.opening.memory_placement import MemoryPlacement
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse

GREEDY = SamplingDefaults(temperature=0.0, top_p=1.0, min_p=0.0)
"""The sampling of `generate` where nothing is given: the same text every time."""

DEFAULT_TOKENS = 64
MOST_MESSAGE_TOKENS = 4096
"""Most tokens of the answer to a message where no number is given: its KV cache has to fit."""


@dataclass(frozen=True)
class Generated:
    """A model's answer. `n_tokens`: the answer's limit."""

    answer: OneAnswer
    model_name: str
    model_format: str
    plan: dict[str, Any]
    n_tokens: int

    @property
    def is_cut(self) -> bool:
        """True if the answer ended only because it had as many tokens as were allowed."""
        return self.answer.finish_reason == "length"

    def fields(self) -> dict[str, Any]:
        """The JSON that `generate --json` prints."""
        from phasewise.cython_kernels._native import isa_active

        answer = self.answer
        return {
            "model": self.model_name,
            "format": self.model_format,
            "isa": isa_active(),
            "plan": self.plan,
            "text": answer.text,
            "prompt_token_ids": list(answer.request.prompt_token_ids),
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "ttft_ms": answer.ttft_ms,
            "tpot_ms": answer.tpot_ms,
            "tokens_per_second": answer.tokens_per_second,
            "drafts": None if answer.drafts is None else answer.drafts._asdict(),
        }


def generate_text(
    model: str,
    prompt: str,
    settings: AnswerSettings,
    sampling: SamplingChoice,
    *,
    db: str | None = None,
    on_text: Callable[[str], None] = lambda _: None,
    report: Report = silent,
    explain: Callable[[list[ScheduleUse], MemoryPlacement | None, DraftRule | None], None] | None = None,
) -> Generated:
    """Continue `prompt`, or answer it as a message; `on_text` gets the text as it is made.

    Raises ModelError, PlanError, KernelDbError, RequestError, ContextLengthExceeded and UsageError.
    """
    with remembered_interrupts() as check_interrupts:
        stop = tuple(settings.stop or ())
        if "" in stop:
            raise UsageError("a stop text must not be empty")
        params = sampling.params(GREEDY)
        check_draft(settings.draft, report)
        check_settings(model, settings.weights, settings.kv_format, report)
        loaded = open_model(model, settings.weights, settings.threads, db, report, settings.ranks)
        for plan in loaded.plans.values():
            report(plan.describe())
        hint_at_tuning(model, db, report)
        drafts = find_drafts(settings.draft, loaded, db, report, settings.draft_tokens)
        text = ModelText(loaded.model)
        prompt_ids = tuple(_prompt_ids(text, prompt, settings))
        n_tokens = _most_tokens(settings, len(prompt_ids), loaded.model.config.context_length)
        size = EngineSize.for_one(loaded.model, len(prompt_ids), n_tokens, settings.kv_format)
        if explain is not None:
            rows = size.limits.max_batch_tokens, size.limits.max_sequences
            explain(loaded.explain(*rows, settings.kv_format), loaded.memory(), rule_of(drafts))
        adapter = loaded.model.adapters[0].name if loaded.model.adapters else ""
        request = Submit("generate", prompt_ids, n_tokens, params, stop, settings.ignore_eos, adapter=adapter)
        answer, cores = OneAnswer(request), KeptCores(report)
        with open_engine(loaded.model, loaded.plans, size, text, loaded.schedules, drafts=drafts) as opened:
            for piece in answer.pieces(opened.engine):
                on_text(piece)
                check_interrupts()
            cores.tell_changes()
            cores_used = plan_cores(opened.plans)
            return Generated(answer, opened.model.name, opened.model.format, cores_used, n_tokens)


def _prompt_ids(text: ModelText, prompt: str, settings: AnswerSettings) -> list[int]:
    if not settings.is_message:
        return text.tokenizer.encode(prompt, True)
    messages = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    return text.conversation([*messages, {"role": "user", "content": prompt}])


def _most_tokens(settings: AnswerSettings, n_prompt: int, context_length: int) -> int:
    if settings.n_tokens is not None:
        return settings.n_tokens
    if not settings.is_message:
        return DEFAULT_TOKENS
    return max(1, min(MOST_MESSAGE_TOKENS, context_length - n_prompt))
