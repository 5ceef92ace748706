"""Settings of `tune-kernels`: the products to tune, for which cores, in what time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from phasewise._options import changed, option, parse_budget, refuse_unused
from phasewise.workflows.options import DB, DEFINE, INCLUDE, THREADS

if TYPE_CHECKING:
    from phasewise.tuner.plans import Phase


@dataclass(frozen=True)
class TuneKernelsSettings:
    """Products to tune (a model's, those of `shapes`, or a user's kernel), their targets, and the time."""

    shapes: str | None = option(
        None,
        "outputs and inputs of products to tune instead of a model's; with --kernel e.g. n=64..4096",
        metavar="N,K;N,K;..",
    )
    kernel: Path | None = option(
        None, "tune a kernel's text, as `kernels raise` writes it", metavar="KERNEL.kir"
    )
    isa: str | None = option(
        None, "with --kernel: instruction set [default: the widest of this machine]", "--isa"
    )
    against: Path | None = option(
        None,
        "with --kernel: the C file that it was raised from, which is used where it is faster",
        metavar="FILE.c",
    )
    include: list[Path] | None = INCLUDE(None)
    define: list[str] | None = DEFINE(None)
    phase: str = option(
        "both", "phase whose cores and numbers of rows to tune for", kind=Literal["prefill", "decode", "both"]
    )
    weight_format: str = option(
        "native",
        "a model's weight format in memory; with --shapes a kernel's: f32, bf16, int8, int4m, ..",
        "--format",
        envvar="PHASEWISE_FORMAT",
    )
    max_m: int = option(512, "most rows of a product; the engine computes 512 at once", min=1, max=1 << 20)
    threads: int | None = THREADS(None)
    budget_s: float = option(
        600.0,
        "time that the command may take, e.g. 90s, 10m, 1h; work in progress is finished: a batch of timings",
        "--budget",
        metavar="TIME",
        parser=parse_budget,
        written="10m",
    )
    resume: bool = option(
        True, "use stored timings; --no-resume measures everything anew", "--resume/--no-resume"
    )
    db: str | None = DB(None)

    def __post_init__(self) -> None:
        of_c = changed(self, "include", "define")
        if self.kernel is None:
            refuse_unused("without --kernel", [*changed(self, "isa", "against"), *of_c])
        else:
            of_models = changed(self, "phase", "weight_format", "max_m", "threads")
            refuse_unused("with --kernel", of_models)
        if self.against is None:
            refuse_unused("without --against", of_c)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases to tune, prefill first."""
        from phasewise.tuner.plans import PHASES

        return tuple(phase for phase in PHASES if self.phase in ("both", phase))
