"""Reasons for the speed of decoding: its share of the read bandwidth, beside prefill's share of the peak.

Decoding reads every weight once per token, so memory bandwidth is its limit; prefill is limited by arithmetic
(Sandwich, Fig. 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phasewise._words import number, percent
from phasewise.kerneldb.product_counts import ProductCounts
from phasewise.tuner.doctor.host import NONE_TUNED, Finding, FindingEvidence, Severity

NEAR_LIMIT = 0.7
"""Share of the read bandwidth from which only more bandwidth makes decoding much faster."""


@dataclass(frozen=True)
class PhaseFigures:
    """The speed of a phase (prefill or decode), and its share of the phase's own limit."""

    tokens_per_s: float
    limit_share: float
    """Share of the phase's limit: of the peak multiply rate in prefill, of the read bandwidth in decode."""

    def describe(self, limit: str) -> str:
        """The phase's figures in one line."""
        return f"{number(self.tokens_per_s, 3)} tokens/s, {percent(self.limit_share)} of the {limit}"


@dataclass(frozen=True)
class DecodeFigures:
    """Measured figures of a model on the cores of its plans."""

    model: str
    n_cores: int
    prefill: PhaseFigures
    decode: PhaseFigures
    bytes_per_s: float
    """Bytes of weights, keys and values that decode reads per second."""
    read_limit_bytes_per_s: float
    products: ProductCounts = NONE_TUNED
    """The model's products, by the state of their schedules in the database."""

    def describe(self) -> Iterator[str]:
        yield f"prefill: {self.prefill.describe('peak')}."
        yield f"decode: {self.decode.describe('read bandwidth')}."
        yield f"Products of this model: {self.products.describe()}."


def explain_decode(figures: DecodeFigures) -> Finding:
    """The finding that explains why decoding is not faster on this host."""
    return (_bandwidth if figures.decode.limit_share >= NEAR_LIMIT else _below)(figures)


def _bandwidth(figures: DecodeFigures) -> Finding:
    return Finding(
        "decode-bandwidth",
        Severity.low,
        "decoding is slow because memory is: it reads as fast as these cores can",
        (_rates(figures),),
        "Every token reads all weights once. More threads, other kernels or a higher clock change little.",
        f"fewer bytes a token: a smaller format (phasewise quantise {figures.model}), drafts "
        "(serve --draft), or more requests at once, which share one reading",
    )


def _below(figures: DecodeFigures) -> Finding:
    return Finding(
        "decode-below-bandwidth",
        Severity.medium,
        "decoding does not read as fast as these cores can",
        (_rates(figures),),
        "Either cores wait (pages, nodes, neighbours) or they compute (unpacking, schedules).",
        f"phasewise doctor; phasewise tune-kernels {figures.model}; tune-config finds cores and ranks; "
        "`perf stat -d` counts stalls and misses where the host shows counters",
    )


def _rates(figures: DecodeFigures) -> FindingEvidence:
    rates = (number(rate / 1e9, 3) for rate in (figures.bytes_per_s, figures.read_limit_bytes_per_s))
    return FindingEvidence(
        "decode of one sequence", "{} of {} GB/s that were measured beside it".format(*rates)
    )
