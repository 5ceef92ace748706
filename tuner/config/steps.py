"""The interface of evaluators of service configurations, which time single steps.

A step is one turn of the engine with sequences of one phase only. An evaluator opens a configuration (spawns
pinned ranks, or models them) and returns a timer; the search asks for steps and knows neither cores nor
clocks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, Protocol

from phasewise._words import counted
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import PHASES, Phase

if TYPE_CHECKING:
    from phasewise.tuner.topotree import Configuration

EvaluatorKind = Literal["measured", "modelled"]

MAX_STEP_TOKENS = 1 << 24
MAX_SEQUENCES = 1 << 16


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A step of `sequences` sequences, each with `context` tokens behind it and `tokens` new ones."""

    phase: Phase
    tokens: int
    """New tokens of each sequence: the prompt's in prefill, 1 in decode."""
    sequences: int = 1
    context: int = 0
    """Tokens of each sequence whose keys and values are cached."""

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise EvaluationError(f"a step is one of prefill or decode, not {self.phase!r:.40}")
        bounds = (
            ("tokens", 1, MAX_STEP_TOKENS),
            ("sequences", 1, MAX_SEQUENCES),
            ("context", 0, MAX_STEP_TOKENS),
        )
        for name, low, high in bounds:
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise EvaluationError(
                    f"{name} of a step must be a number from {low} to {high}, not {value!r:.40}"
                )

    @property
    def rows(self) -> int:
        """Rows of activations in the step's products."""
        return self.tokens * self.sequences

    def describe(self) -> str:
        """The step for people, e.g. `decode of 1 token after 512`."""
        of_each = f" for each of {counted(self.sequences, 'sequence')}" if self.sequences > 1 else ""
        behind = f" after {self.context}" if self.context else ""
        return f"{self.phase} of {counted(self.tokens, 'token')}{of_each}{behind}"


class StepTimer(Protocol):
    """A timer of steps on one open configuration."""

    def __call__(self, step: Step) -> float:
        """Nanoseconds of one step, a robust estimate. EvaluationError, one line, if it cannot be timed."""
        ...


class StepEvaluator(Protocol):
    """The interface of the modelled and the measured evaluator."""

    @property
    def kind(self) -> EvaluatorKind: ...

    def open(self, configuration: Configuration, phase: Phase) -> AbstractContextManager[StepTimer]:
        """A timer of steps of `phase` on the configuration. EvaluationError, one line, if it cannot run."""
        ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model on which its speed depends."""

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    weight_bytes: int
    """Bytes of all packed weights that a step reads: with the lm head, without the embedding table."""
    kv_bytes_per_slot: int
    """Bytes of one token's keys and values over all layers."""
    ffn_matrices: int = 3
    """Weight matrices of a feed-forward layer: gate, up and down; 2 without a gate."""
    kv_vectors: int = 2
    """Vectors that a KV head keeps per token: a key and a value, or 1 for a vector that is both."""

    def __post_init__(self) -> None:
        for name in [field.name for field in fields(self)][1:]:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 1 << 50:
                raise EvaluationError(f"{name} of a model must be a positive number, not {value!r:.40}")

    @property
    def divided_heads(self) -> int:
        """Heads that ranks divide whole: KV heads, or query heads over one latent vector."""
        return self.n_heads if self.kv_vectors == 1 else self.n_kv_heads

    @property
    def attention_weights(self) -> int:
        """Number of weights of one layer's q, k, v and o."""
        return 2 * self.hidden * self.head_dim * (self.n_heads + self.n_kv_heads)

    @property
    def ffn_weights(self) -> int:
        """Number of weights of one layer's feed-forward part."""
        return self.ffn_matrices * self.hidden * self.ffn
