"""Settings of `tune-config`, as its user states them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from phasewise._options import changed, option, parse_budget, parse_numbers, refuse_unused
from phasewise.workflows.errors import UsageError
from phasewise.workflows.options import DB, FORMAT
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.tuner.config.simulate import Objective, ObjectiveKind
    from phasewise.tuner.config.study import Event
    from phasewise.tuner.plans import Phase
    from phasewise.tuner.tuning_run import TuningProgress


class Show:
    """Receiver of a run's reports; this one passes on the lines that stay, and drops the rest."""

    def __init__(self, say: Report = silent) -> None:
        self.say = say

    def searching(self, phase: Phase) -> Callable[[Event], None]:
        """The receiver of the events of a phase's search."""
        return lambda event: None

    def tuning(self, progress: TuningProgress) -> None:
        """The progress of the tuning of kernels."""

    def stage(self, name: str) -> None:
        """Note the current stage, where nothing else is reported."""


@dataclass(frozen=True)
class TuneConfigSettings:
    """The model, requests (`trace` or `lengths`), objective, budget, and what the search may use."""

    phase: str = option("both", "phase to find a plan for", kind=Literal["prefill", "decode", "both"])
    trace: Path | None = option(
        None, "requests: Azure csv, ShareGPT json or jsonl, Mooncake jsonl", metavar="FILE"
    )
    lengths: str | None = option(
        None,
        "tokens of prompts and answers instead of a trace, e.g. fixed:512/64 or uniform:1-1024/16-256",
        metavar="DIST",
    )
    objective: str = option(
        "e2e",
        "what plans are ranked by: time to the first token, time per later token, both, or requests/s within"
        " --slo",
        kind=Literal["ttft", "tpot", "e2e", "goodput"],
    )
    slo: str | None = option(
        None, "with goodput: latencies that a request must keep to count", metavar="ttft=MS,tpot=MS"
    )
    concurrency: tuple[int, ...] = option(
        (1,),
        "sequences that decode together; for a list, e.g. 1,8,32, decode gets cores for each number, in use"
        " from that number on",
        metavar="N[,N..]",
        parser=parse_numbers,
        written="1",
    )
    budget_s: float = option(
        900.0,
        "time that the command may take, e.g. 90s, 15m, 1h; work in progress is finished: reading and packing"
        " the model, and the timing of one plan",
        "--budget",
        metavar="TIME",
        parser=parse_budget,
        written="15m",
    )
    evaluator: str = option(
        "measured", "source of step times: measured here, or modelled", kind=Literal["measured", "modelled"]
    )
    machine: Path | None = option(None, "lstopo XML of the machine to plan for", metavar="FILE.xml")
    hidden: Path | None = option(
        None,
        "with --evaluator modelled: resources that cores of the machine share and lstopo does not show",
        metavar="FILE.json",
    )
    cores: str | None = option(None, "use no CPUs but these, e.g. 0-3,8", metavar="LIST")
    ranks: int | None = option(None, "only plans with N ranks", min=1, max=256)
    top_k: int = option(
        10,
        "how many of the best plans get tuned kernels and enter the final comparison",
        min=1,
        max=1000,
        config_only=True,
    )
    seed: int = option(
        0, "seed of the drawn requests and of the order of equal plans", min=0, config_only=True
    )
    weight_format: str = FORMAT("native")
    db: str | None = DB(None)
    storage: str | None = option(
        None, "where trials are kept and shared [default: the database]", metavar="URL|FILE"
    )
    resume: bool = option(True, "use stored trials; --no-resume searches anew", "--resume/--no-resume")
    model: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if self.evaluator != "modelled":
            hides = "a real machine hides what it hides; leave that out"
            refuse_unused("without --evaluator modelled", changed(self, "hidden"), hides)
        if self.objective != "goodput":
            refuse_unused("without --objective goodput", changed(self, "slo"))

    @property
    def phases(self) -> tuple[Phase, ...]:
        from phasewise.tuner.plans import PHASES

        return tuple(phase for phase in PHASES if self.phase in ("both", phase))

    @property
    def bands(self) -> tuple[int, ...]:
        """Further numbers of sequences that decode together, each with cores of its own."""
        return self.concurrency[1:]

    @property
    def requests(self) -> str | None:
        """A trace file or a distribution; None: the built-in lengths."""
        return self.lengths if self.trace is None else str(self.trace)

    @property
    def goal(self) -> Objective:
        """The objective by which plans are ranked. UsageError for an SLO that cannot be read."""
        from phasewise.tuner.config.simulate import Objective, parse_slo
        from phasewise.tuner.errors import TraceError

        try:
            slo = parse_slo(self.slo) if self.slo else None
        except TraceError as error:
            raise UsageError(f"--slo: {error}") from None
        return Objective(cast("ObjectiveKind", self.objective), slo, self.concurrency[0])

    def check(self) -> None:
        """Raise UsageError where settings exclude each other, as far as that needs no machine."""
        from phasewise.tuner.plans import MAX_BAND_SEQUENCES, MAX_BANDS

        if self.trace is not None and self.lengths is not None:
            raise UsageError("give either --trace or --lengths")
        if self.trace is not None and not self.trace.is_file():
            raise UsageError(f"--trace: there is no file {self.trace}")
        listed = ",".join(map(str, self.concurrency))
        if not 1 <= len(self.concurrency) <= 1 + MAX_BANDS:
            raise UsageError(f"--concurrency takes 1 to {1 + MAX_BANDS} numbers, not {len(self.concurrency)}")
        if not all(1 <= sequences <= MAX_BAND_SEQUENCES for sequences in self.concurrency):
            raise UsageError(f"--concurrency {listed}: numbers from 1 to {MAX_BAND_SEQUENCES} are meant")
        if list(self.concurrency) != sorted(set(self.concurrency)):
            raise UsageError(f"--concurrency {listed}: each number must be more than the one before")
        if self.bands and "decode" not in self.phases:
            raise UsageError(f"--concurrency {listed}: bands are decode's, leave --phase prefill out")
        _ = self.goal
