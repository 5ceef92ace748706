"""Settings of commands that open a model: its weights, and the remote that a start learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phasewise._options import changed, option, refuse_unused
from phasewise.serving.models.storage_modes import PackMode, SparseMode
from phasewise.workflows.database.settings import Trust
from phasewise.workflows.errors import UsageError
from phasewise.workflows.options import ARITHMETIC, FORMAT, LORA, PACK, SPARSE, ArithmeticChoice


@dataclass(frozen=True)
class Weights:
    """The storage and arithmetic of a model's weights, in every process that computes with them."""

    PANEL = "Engine and memory"

    weight_format: str = FORMAT("native")
    sparse: SparseMode = SPARSE("auto")
    pack: PackMode = PACK("keep")
    arithmetic: ArithmeticChoice = ARITHMETIC("tuned")
    lora: Sequence[str] | None = LORA(None)
    sequences: int = field(default=1, kw_only=True)

    @property
    def is_canonical(self) -> bool:
        """True where products are to have the same bits on every CPU."""
        return self.arithmetic == "canonical"


NATIVE = Weights()


@dataclass(frozen=True)
class ReadWeights(Weights):
    """Weights of a command that computes and ends."""

    PANEL = "Options"

    sparse: SparseMode = SPARSE("auto", config_only=True)


@dataclass(frozen=True)
class Remote:
    """The remote of a start, and the reason to believe it: a pinned digest of its index, or signers' keys."""

    PANEL = "What was learnt elsewhere"

    remote: str | None = option(
        None,
        "a folder or an address, as for db pull: pull the schedules for cores like these, and time the best "
        "beside those in use first, for at most a minute",
        metavar="REMOTE",
        envvar="PHASEWISE_REMOTE",
    )
    remote_digest: str | None = option(
        None,
        "believe the remote's index if it has this digest",
        metavar="SHA256",
        envvar="PHASEWISE_REMOTE_DIGEST",
    )
    remote_signers: Path | None = option(
        None,
        "believe the remote's index if one of these signed it",
        metavar="FILE",
        envvar="PHASEWISE_REMOTE_SIGNERS",
    )

    def __post_init__(self) -> None:
        if self.remote is None:
            believing = "they are reasons to believe what --remote names; name one, or leave that out"
            refuse_unused("without --remote", changed(self, "remote_digest", "remote_signers"), believing)

    def trust(self) -> Trust:
        """The trust in the remote. UsageError where neither a digest nor signers are given."""
        trust = Trust(self.remote_digest, self.remote_signers)
        if not trust.is_given:
            raise UsageError(
                "--remote is believed by --remote-digest, which its owner tells you, or by --remote-signers, "
                "a file of their public keys"
            )
        return trust
