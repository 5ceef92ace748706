"""Settings of an encoder's layers, and of the pooling of texts and pairs of texts to vectors and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.models.fields import LATER, check_whole

MOST_POSITIONS = 1 << 26
POOLINGS = ("mean", "first", "last")
PAIR_PLACES = ("{instruction}", "{query}", "{document}")
_MOST_TASKS, _MOST_TASK_RANKS, _MOST_TASK_SCALE = 64, 1 << 10, 1e6


@dataclass(frozen=True)
class EncoderTasks:
    """The tasks that texts may be embedded for. Each has a low-rank adapter of every product of the layers
    and of the embeddings of tokens and segments: W + scale B A."""

    names: tuple[str, ...]
    rank: int
    scale: float

    @property
    def numbers(self) -> int:
        """Numbers of a token's products with all tasks' A, and a 1 behind them."""
        return len(self.names) * self.rank + 1

    def __post_init__(self) -> None:
        sane = all(isinstance(name, str) and 0 < len(name) <= 256 for name in self.names)
        if not sane or not 1 <= len(self.names) <= _MOST_TASKS or len(set(self.names)) < len(self.names):
            raise ModelError(f"the tasks {self.names!r:.120}: 1 to {_MOST_TASKS} different names expected")
        check_whole("the rank of tasks' adapters", self.rank, 1, _MOST_TASK_RANKS // len(self.names))
        if not math.isfinite(self.scale) or abs(self.scale) > _MOST_TASK_SCALE:
            raise ModelError(f"the tasks' adapters are scaled by {self.scale!r:.40}")


@dataclass(frozen=True)
class Encoder:
    """The layers of an encoder: h = N(h + A(h)), h = N(h + F(h)), N a LayerNorm with weight and bias,
    attention A over the whole text, F(x) = down(act(gate(x)) * up(x)) or down(act(up(x)))."""

    positions: bool
    """True if positions are embeddings of their own, one for each position of the context; else RoPE, or
    `distances`."""
    segments: bool
    """True if the two texts of a pair have an embedding each."""
    scores: bool = False
    """True if a head gives a pair of texts one score: a cross-encoder."""
    pre_norms: bool = field(default=False, metadata=LATER)
    """True for h = h + A(N(h)), h = h + F(N(h)), norms without biases, and one more after the last layer. The
    first layer's attention reads h as it is."""
    norm_head: bool = field(default=False, metadata=LATER)
    """True if a cross-encoder's head is out(N(gelu(dense(row)))), else out(tanh(dense(row)))."""
    distances: bool = field(default=False, metadata=LATER)
    """True if scores of attention fall with the distance of their positions (ALiBi)."""
    tasks: EncoderTasks | None = field(default=None, metadata=LATER)


@dataclass(frozen=True)
class Embedding:
    """The pooling of a text's rows to one vector."""

    pooling: str
    """One of POOLINGS."""
    normalised: bool
    """True if vectors have length 1."""
    max_tokens: int
    """Most tokens of an input, the special tokens around it included."""
    lower_case: bool = False
    """True if texts are lower-cased before they are tokenized."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Prompts that may stand before a text, by name."""
    default_prompt: str | None = None
    """The name of the prompt of a text whose request names none."""
    pair_template: str | None = None
    """The text that a pair becomes, with PAIR_PLACES for its parts; None: it is tokenized as two texts."""
    instruction: str = ""
    """The template's instruction for a request without one."""

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ModelError(f"pooling {self.pooling!r:.60}; {', '.join(POOLINGS)} can run")
        check_whole("the longest input", self.max_tokens, 1, MOST_POSITIONS)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Embedding:
        """The embedding whose `dataclasses.asdict` was written as JSON."""
        prompts = tuple((name, text) for name, text in fields.get("prompts", ()))
        return cls(**{**fields, "prompts": prompts})
