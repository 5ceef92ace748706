"""Settings of one answer: what the prompt is, how tokens are chosen, when the answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise._files import read_input
from phasewise._options import option
from phasewise.serving.models.storage_modes import PackMode, SparseMode
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.options import (
    ARITHMETIC,
    DB,
    DRAFT,
    DRAFT_TOKENS,
    FORMAT,
    KV_FORMAT,
    ONE_LORA,
    PACK,
    RANKS,
    SPARSE,
    THREADS,
    ArithmeticChoice,
)

if TYPE_CHECKING:
    from phasewise.serving.sampling.sampling import SamplingParams
    from phasewise.serving.sampling.sampling_defaults import SamplingDefaults

MAX_PROMPT_BYTES = 64 << 20


@dataclass(frozen=True)
class SamplingChoice:
    """The choice of tokens; None: the default of the caller."""

    PANEL = "How tokens are chosen"

    temperature: float | None = option(None, "0: always choose the likeliest token", min=0.0, max=100.0)
    top_k: int | None = option(None, "choose among the K likeliest tokens", min=1, metavar="K")
    top_p: float | None = option(
        None, "keep the likeliest tokens whose probabilities sum to P", min=0.0, max=1.0, metavar="P"
    )
    min_p: float | None = option(
        None, "drop tokens less likely than P times the likeliest", min=0.0, max=1.0, metavar="P"
    )
    repetition_penalty: float | None = option(
        None, "above 1: make tokens that occurred before less likely", min=0.01, max=100.0
    )
    seed: int | None = option(None, "the same seed gives the same text")

    def params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Sampling parameters: these values over `defaults`. RequestError for a value out of its range."""
        from phasewise.serving.sampling.sampling import SamplingParams

        base = defaults.with_overrides(self.temperature, self.top_p, self.min_p)
        penalty = self.repetition_penalty
        return SamplingParams(
            temperature=base.temperature,
            top_k=base.top_k if self.top_k is None else self.top_k,
            top_p=base.top_p,
            min_p=base.min_p,
            seed=self.seed,
            repetition_penalty=base.repetition_penalty if penalty is None else penalty,
        )


@dataclass(frozen=True)
class ChatSettings:
    """Settings of a conversation."""

    system: str | None = option(None, "system message", metavar="TEXT")
    n_tokens: int | None = option(
        None,
        "most tokens of an answer [default: 4096, or until it only repeats itself]",
        "-n",
        "--n-tokens",
        min=1,
        metavar="N",
    )
    context: int | None = option(None, "most tokens of the conversation", min=32, metavar="N")
    weight_format: str = FORMAT("native")
    kv_format: str = KV_FORMAT("auto")
    pack: PackMode = PACK("keep")
    threads: int | None = THREADS(None)
    lora: str | None = ONE_LORA(None)
    db: str | None = DB(None)


@dataclass(frozen=True)
class AnswerSettings:
    """Settings of a run and of the end of its answer."""

    n_tokens: int | None = option(
        None,
        "generate at most N tokens [default: 64; with --chat the whole answer]",
        "-n",
        "--n-tokens",
        min=1,
        metavar="N",
    )
    stop: Sequence[str] | None = option(None, "end the answer before this text [repeatable]", metavar="TEXT")
    ignore_eos: bool = option(False, "do not end at the end token", "--ignore-eos")
    chat: bool = option(False, "apply the chat template to the prompt: answer it as a message", "--chat")
    system: str | None = option(None, "system message, with which --chat is implied", metavar="TEXT")
    weight_format: str = FORMAT("native")
    kv_format: str = KV_FORMAT("auto")
    sparse: SparseMode = SPARSE("auto")
    pack: PackMode = PACK("keep")
    threads: int | None = THREADS(None)
    ranks: int | None = RANKS(None)
    arithmetic: ArithmeticChoice = ARITHMETIC("tuned")
    lora: str | None = ONE_LORA(None)
    draft: str | None = DRAFT(None)
    draft_tokens: int | None = DRAFT_TOKENS(None)

    @property
    def weights(self) -> Weights:
        return Weights(
            self.weight_format,
            self.sparse,
            self.pack,
            arithmetic=self.arithmetic,
            lora=None if self.lora is None else [self.lora],
        )

    @property
    def is_message(self) -> bool:
        """True if the prompt goes through the model's chat template."""
        return self.chat or self.system is not None


def prompt_from(text: str | None, option: str | None, file: Path | None, stdin: str | None) -> str:
    """The one prompt that was given: as an argument, with an option, in a UTF-8 file, or else on stdin.

    UsageError where several were given or none; WorkflowError for a file that cannot be read.
    """
    given = [prompt for prompt in (text, option) if prompt is not None]
    if len(given) + (file is not None) > 1:
        raise UsageError("give one prompt: as an argument, with --prompt, or in a --file")
    if file is not None:
        try:
            return read_input(file, MAX_PROMPT_BYTES).decode()
        except UnicodeDecodeError as error:
            raise WorkflowError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
        except OSError as error:
            raise WorkflowError(f"the prompt in {file} cannot be read: {error.strerror}") from None
    if given:
        return given[0]
    if stdin is None:
        raise UsageError("give a prompt: as an argument, with --prompt, in a --file, or on stdin")
    return stdin
