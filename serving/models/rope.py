"""Rotary embeddings: the frequencies of their pairs, as models scale them for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels.exact import logarithm, power
from phasewise.serving.errors import ModelError


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies; `original_context` in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class FrequencyFactors:
    """One divisor per frequency, as GGUF files store Llama 3.1's scaling."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, section 3): frequencies that turn often within `original_context` tokens are
    kept, those that turn seldom divided by `factor`, with a ramp from `beta_fast` to `beta_slow` turns
    between them.

    `magnitude`: factor of cosines and sines. `truncate`: True if the ramp's ends are whole pairs."""

    factor: float
    original_context: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (Ding et al. 2024): a divisor per frequency, of two lists. The long one holds for every
    position where a service takes more than `original_context` tokens, the short one elsewhere."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    magnitude: float


Scaling = Llama3Scaling | LinearScaling | FrequencyFactors | YarnScaling | LongScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the first `dim` of a head, half-split pairs (i, i + dim/2)."""

    theta: float
    dim: int
    scaling: Scaling | None = None

    def inv_freq(self, context_length: int = 0) -> npt.NDArray[np.float64]:
        """Radians per position, float64 [dim / 2], for a context of that many tokens."""
        plain = np.array([power(self.theta, -pair, self.dim) for pair in range(0, self.dim, 2)])
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor):
                return plain / factor
            case FrequencyFactors(factors):
                return plain / np.asarray(factors, dtype=np.float64)
            case LongScaling(short, long, original_context):
                factors = long if context_length > original_context else short
                return plain / np.asarray(factors, dtype=np.float64)
            case Llama3Scaling():
                return _llama3(plain, self.scaling)
            case YarnScaling():
                return _yarn(plain, self.theta, self.dim, self.scaling)

    def check(self, head_dim: int) -> None:
        """Raise ModelError unless heads of `head_dim` numbers can be rotated by these frequencies."""
        if type(self.dim) is not int or head_dim % 2 or self.dim % 2 or not 2 <= self.dim <= head_dim:
            raise ModelError(f"RoPE over {self.dim} of {head_dim} head dimensions is not supported")
        for context_length in (0, 1 << 62):
            with np.errstate(all="ignore"):
                try:
                    inv_freq = self.inv_freq(context_length)
                except (ArithmeticError, ValueError):
                    inv_freq = np.array([math.nan])
            if inv_freq.shape != (self.dim // 2,) or not (np.isfinite(inv_freq) & (inv_freq > 0)).all():
                text = str(self)
                brief = text if len(text) < 200 else f"{text[:200]}..."
                raise ModelError(f"these RoPE parameters give no usable frequencies: {brief}")
        if not 0 < self.magnitude < 1e3:
            raise ModelError(
                f"the RoPE scaling multiplies by {self.magnitude!r:.80}: a number from 0 to 1000 expected"
            )

    @property
    def magnitude(self) -> float:
        """The factor of cosines and sines."""
        return self.scaling.magnitude if isinstance(self.scaling, YarnScaling | LongScaling) else 1.0


def _llama3(plain: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    """Keep short wavelengths, divide long ones by the factor, blend between (Llama 3.1's reference code)."""
    rotations = scaling.original_context * plain / (2 * math.pi)  # whole turns within the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    blended: npt.NDArray[np.float64] = keep * plain + (1 - keep) * plain / scaling.factor
    return blended


def _yarn(
    plain: npt.NDArray[np.float64], theta: float, dim: int, scaling: YarnScaling
) -> npt.NDArray[np.float64]:
    """Pair i makes r turns within the original context at i = dim log(context / (2 pi r)) / (2 log theta)."""

    def pair_of(turns: float) -> float:
        turned = logarithm(scaling.original_context / (turns * 2 * math.pi))
        return dim * turned / (2 * logarithm(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    divided = np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)
    blended: npt.NDArray[np.float64] = (1 - divided) * plain + divided * plain / scaling.factor
    return blended


SCALINGS: dict[str, Callable[..., Scaling]] = {
    kind.__name__: kind for kind in (Llama3Scaling, LinearScaling, FrequencyFactors, YarnScaling, LongScaling)
}
