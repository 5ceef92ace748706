"""Settings of `phasewise db`: which rows leave, and why a remote is believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise._options import option

if TYPE_CHECKING:
    from phasewise.kerneldb.records import StoredRow


@dataclass(frozen=True)
class Leaving:
    """The rows that leave: of which machines, and which of those that name something of their owner."""

    signature: Sequence[str] | None = option(
        None,
        "only machines whose core or placement signature contains TEXT; `here`: like this one",
        metavar="TEXT",
    )
    step_times: bool = option(
        False, "also the step times of `tune-config`; they contain the names of your models", "--step-times"
    )
    user_kernels: bool = option(
        False,
        "also parameters of your own kernels; they contain the names of their functions",
        "--user-kernels",
    )
    plans: bool = option(True, "plans too; they contain the names of your models", "--plans/--no-plans")
    scores: bool = option(
        True, "scores of length predictors too; they contain the names of your models", "--scores/--no-scores"
    )

    @property
    def also(self) -> list[type[StoredRow]]:
        """The kinds of rows that leave although they name something of their owner."""
        from phasewise.kerneldb.records import PlanRecord, PredictorScore, StepTime, UserPromotion, UserTiming

        asked: dict[type[StoredRow], bool] = {
            PlanRecord: self.plans,
            PredictorScore: self.scores,
            StepTime: self.step_times,
            UserTiming: self.user_kernels,
            UserPromotion: self.user_kernels,
        }
        return [kind for kind, wanted in asked.items() if wanted]


@dataclass(frozen=True)
class Trust:
    """Evidence for a remote's index: its digest, allowed signers, or both."""

    digest: str | None = option(
        None, "believe the remote's index if it has this digest, as `push` prints", metavar="SHA256"
    )
    allowed_signers: Path | None = option(
        None,
        "believe the remote's index if one of these signed it; a file as ssh-keygen reads it",
        "--allowed-signers",
        metavar="FILE",
    )

    @property
    def is_given(self) -> bool:
        """True if a digest or signers are given."""
        return self.digest is not None or self.allowed_signers is not None
