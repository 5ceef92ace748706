"""The Python API: open a model, generate, tune, look at the machine and at the tuning database.

`import phasewise` imports this module at the first use of one of its names. Nothing here prints; `report` is
called with one line of text wherever something takes long.

An argument that is None comes from where a command has it from: a PHASEWISE_* variable, then the table of the
configuration file that the function names, then the default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from phasewise._interrupts import keep_interrupts
from phasewise.kerneldb.errors import KernelDbError as KernelDbError
from phasewise.serving.errors import ContextLengthExceeded as ContextLengthExceeded
from phasewise.serving.errors import ModelError as ModelError
from phasewise.serving.errors import RequestError as RequestError
from phasewise.topology import Machine, read_lstopo
from phasewise.topology import read_machine as read_sysfs
from phasewise.tuner.errors import EvaluationError as EvaluationError
from phasewise.tuner.errors import PlanError as PlanError
from phasewise.tuner.errors import TraceError as TraceError
from phasewise.workflows.config_file import StandingOptions
from phasewise.workflows.errors import UsageError as UsageError
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.opening.open_model import OpenModel
from phasewise.workflows.opening.open_model import open_model as open_for_running
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.kerneldb.store import Store
    from phasewise.serving.models.storage_modes import PackMode, SparseMode
    from phasewise.tuner.config.steps import EvaluatorKind
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.tuner.tuning_run import TuningProgress
    from phasewise.workflows.options import ArithmeticChoice
    from phasewise.workflows.tune_config.run import Found
    from phasewise.workflows.tune_kernels.rounds import TunedRound

keep_interrupts()

BOTH: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Generation:
    """An answer that has ended, and its times."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    """`stop`: an end token or a stop text; `length`: max_tokens were generated."""
    ttft_ms: float
    """Time to first token, in milliseconds."""
    tpot_ms: float | None
    """Mean time of each token after the first, in milliseconds; None where there is one token only."""


class Model:
    """A model in memory, with its service plans and tuned schedules. From `open_model`; for one thread."""

    def __init__(self, opened: OpenModel, db: str | None = None, report: Report = silent) -> None:
        self._opened = opened
        self._db = db
        self._cores = KeptCores(report)

    @property
    def name(self) -> str:
        return self._opened.model.name

    @property
    def weight_format(self) -> str:
        return self._opened.model.format

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._opened.model.config.context_length

    @property
    def plans(self) -> Mapping[Phase, ServicePlan]:
        """The cores that each phase runs on, by phase."""
        return self._opened.plans

    def generate(
        self,
        prompt: str,
        max_tokens: int = 64,
        *,
        chat: bool = False,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        kv_format: str | None = None,
        draft: str | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Generation:
        """Continue a text, or with `chat` answer a user's message by the model's chat template.

        temperature: 0 takes the likeliest token at each step. top_k, top_p: sample from the k likeliest
        tokens, and from the likeliest ones whose probabilities sum to top_p. kv_format: auto, f32, f16,
        bf16, int16, int8 or int4. draft: `lookup`, `mtp`, or a model that drafts tokens,
        which stay the same; `off`: nothing does, not even a head in the model's own files. Both, if
        None: PHASEWISE_KV_FORMAT and PHASEWISE_DRAFT, then [generate]. on_text: called with each piece of
        text as soon as it is made. Raises RequestError for a request that the model cannot take,
        ContextLengthExceeded for one that is too long.
        """
        if max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {max_tokens}", "max_tokens")
        from phasewise.serving.engine.engine_size import EngineSize
        from phasewise.serving.engine.messages import Submit
        from phasewise.serving.engine.one_answer import OneAnswer
        from phasewise.serving.engine.open_engine import ModelText, open_engine
        from phasewise.serving.sampling.sampling import SamplingParams
        from phasewise.workflows.opening.drafts import find_drafts

        standing = StandingOptions.of("generate")
        kv_format = kv_format or standing.text("kv_format") or "auto"
        drafts = find_drafts(draft or standing.text("draft"), self._opened, self._db)
        opened, text = self._opened, ModelText(self._opened.model)
        prompt_ids = tuple(text.chat_prompt(prompt) if chat else text.tokenizer.encode(prompt, True))
        size = EngineSize.for_one(opened.model, len(prompt_ids), max_tokens, kv_format)
        sampling = SamplingParams(temperature, top_k, top_p, seed=seed)
        answer = OneAnswer(Submit("generate", prompt_ids, max_tokens, sampling, tuple(stop)))
        with open_engine(opened.model, opened.plans, size, text, opened.schedules, drafts=drafts) as engine:
            for piece in answer.pieces(engine.engine):
                if on_text is not None:
                    on_text(piece)
        self._cores.tell_changes()
        return Generation(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            prompt_tokens=len(prompt_ids),
            finish_reason=answer.finish_reason or "",
            ttft_ms=answer.ttft_ms,
            tpot_ms=answer.tpot_ms,
        )


def open_model(
    ref: str,
    *,
    weight_format: str | None = None,
    threads: int | None = None,
    db: str | None = None,
    report: Report = silent,
) -> Model:
    """Open a model for running on this machine.

    ref: a known name such as `smollm2-135m-instruct`, a GGUF file, a Hugging Face directory, a hub
    name or a packed file. weight_format: native, f32, bf16, int8 or int4. threads: cores of each phase. db:
    URL or file of the tuning database. If None, and how weights are stored: PHASEWISE_FORMAT, _THREADS,
    _DB, _SPARSE, _PACK and _ARITHMETIC, then [generate], then as the commands do. Raises ModelError,
    PlanError, KernelDbError, and UsageError for a variable that says what cannot be.
    """
    from phasewise.serving.models.storage_modes import PACK_MODES, SPARSE_MODES
    from phasewise.workflows.options import ARITHMETIC_CHOICES

    standing = StandingOptions.of("generate")
    arithmetic = cast("ArithmeticChoice", standing.text("arithmetic", ARITHMETIC_CHOICES) or "tuned")
    weights = Weights(
        weight_format or standing.text("format") or "native",
        cast("SparseMode", standing.text("sparse", SPARSE_MODES) or "auto"),
        cast("PackMode", standing.text("pack", PACK_MODES) or "keep"),
        arithmetic=arithmetic,
    )
    db = db or standing.text("db")
    opened = open_for_running(ref, weights, threads or standing.count("threads"), db, report)
    return Model(opened, db, report)


def read_machine(source: str | Path | None = None) -> Machine:
    """Read this machine, or the machine of an lstopo XML file or a folder with a sysfs snapshot."""
    if source is None:
        return read_sysfs()
    path = Path(source)
    return read_sysfs(path) if path.is_dir() else read_lstopo(path)


def open_store(db: str | None = None, *, report: Report = silent) -> AbstractContextManager[Store]:
    """The tuning database, for use in `with`: plans, schedules and measurements. It is created if absent.

    db: URL or file; None: PHASEWISE_DB, then [db.show], then the user's own. Raises KernelDbError.
    """
    from phasewise.kerneldb.store import open_store as open_in_room

    return open_in_room(db or StandingOptions.of("db", "show").text("db"), report)


def tune_kernels(
    model: Model,
    *,
    budget_s: float = 600.0,
    phases: Sequence[Phase] = BOTH,
    max_rows: int = 512,
    db: str | None = None,
    resume: bool = True,
    report: Report = silent,
    progress: Callable[[TuningProgress], None] = lambda _: None,
) -> list[TunedRound]:
    """Tune the matrix products and the attention of a model on this machine, for at most `budget_s` seconds.

    db: None: PHASEWISE_DB, then [tune-kernels], then the database that the model was opened with. Each timing
    is stored at once, so a later call goes on from there. One result for each set of cores.
    Waits while another phasewise process of this user measures, and says so by `report`.
    """
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.tune_kernels.run import rounds_of_model, tune_rounds

    machine = read_sysfs()
    db = db or StandingOptions.of("tune-kernels").text("db") or model._db
    rounds = rounds_of_model(model._opened, machine, phases, max_rows)
    return tune_rounds(rounds, machine, db, budget_s, resume, user_lock(report), report, progress)


def tune_config(
    ref: str,
    *,
    budget_s: float = 900.0,
    phases: Sequence[Phase] = BOTH,
    requests: str | None = None,
    evaluator: EvaluatorKind = "measured",
    machine_file: Path | None = None,
    top_k: int = 10,
    concurrency: Sequence[int] = (1,),
    weight_format: str | None = None,
    db: str | None = None,
    resume: bool = True,
    report: Report = silent,
) -> Found:
    """Find the cores and ranks on which each phase of a model runs best, for at most `budget_s` seconds.

    requests: a trace file, or lengths such as `fixed:512/64` (prompt/output tokens); None for built-in
    lengths. evaluator: measured times plans here and stores the best ones. modelled computes step times and
    stores nothing, also for the machine that the lstopo XML `machine_file` describes. top_k: plans that go
    on to kernels and a last run. concurrency: sequences that decode together, rising; decode gets cores for
    each number (`Found.bands`). weight_format, db: None: PHASEWISE_FORMAT and PHASEWISE_DB, then
    [tune-config]. Raises ModelError, PlanError, EvaluationError, TraceError, UsageError.
    """
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.tune_config.loads import tune_loads
    from phasewise.workflows.tune_config.settings import Show, TuneConfigSettings
    from phasewise.workflows.tune_config.subject import open_subject

    started_s, standing = time.monotonic(), StandingOptions.of("tune-config")
    wish = TuneConfigSettings(
        model=ref,
        weight_format=weight_format or standing.text("format") or "native",
        phase="both" if len(set(phases)) > 1 else phases[0],
        budget_s=budget_s,
        evaluator=evaluator,
        machine=machine_file,
        lengths=requests,
        top_k=top_k,
        db=db or standing.text("db"),
        resume=resume,
        concurrency=tuple(concurrency),
    )
    wish.check()
    return tune_loads(wish, open_subject(wish, report), started_s, Show(report), user_lock(report))
