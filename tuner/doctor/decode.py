"""Reasons for the speed of decoding: its share of the read bandwidth, and the processor's counters by phase.

Decoding reads every weight once for a token, so that the bandwidth of memory is its limit, and prefill is the
phase that computes (Sandwich, Fig. 1). What keeps it from that limit the counters tell, where there are any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phasewise._words import number, percent
from phasewise.kerneldb.product_counts import ProductCounts
from phasewise.tuner.doctor.host import NONE_TUNED, Finding, FindingEvidence, Severity

NEAR_LIMIT = 0.7
"""Share of the read bandwidth from which on only more bandwidth makes decoding much faster."""

MUCH_STALLED = 0.5
LINES_OF_SMALL_PAGES = 256
"""A page of 4 KiB has 64 lines and one of 2 MiB 32768: with a miss of the TLB for so few misses of the last
level, most pages are small."""


@dataclass(frozen=True)
class PhaseFigures:
    """The speed of a phase, its share of its own limit, and its counters; None: not counted here."""

    tokens_per_s: float
    limit_share: float
    """Share of the phase's limit that it reached: of the peak multiply rate in prefill, of the read bandwidth
    in decode."""
    instructions_per_cycle: float | None = None
    llc_misses_pki: float | None = None
    dtlb_misses_pki: float | None = None
    """Misses of the data TLB per thousand instructions."""
    stalled_share: float | None = None

    def describe(self, limit: str) -> str:
        """The phase's figures in one line; what is not counted is left out."""
        parts = [f"{number(self.tokens_per_s, 3)} tokens/s, {percent(self.limit_share)} of the {limit}"]
        if self.instructions_per_cycle is not None:
            parts.append(f"{number(self.instructions_per_cycle, 3)} instructions a cycle")
        if self.stalled_share is not None:
            parts.append(f"{percent(self.stalled_share)} of the cycles stalled")
        if misses := self.misses():
            parts.append(f"misses per 1000 instructions: {misses}")
        return "; ".join(parts)

    def misses(self) -> str:
        named = (("last-level cache", self.llc_misses_pki), ("data TLB", self.dtlb_misses_pki))
        return ", ".join(f"{name} {number(pki, 3)}" for name, pki in named if pki is not None)


@dataclass(frozen=True)
class DecodeFigures:
    """Figures of a model, measured on the cores of its plans."""

    model: str
    n_cores: int
    prefill: PhaseFigures
    decode: PhaseFigures
    bytes_per_s: float
    """Bytes of weights, keys and values that decode reads in a second."""
    read_limit_bytes_per_s: float
    absence: str | None
    """The reason why nothing is counted, in a line; None where something is."""
    products: ProductCounts = NONE_TUNED
    """The model's products, with what the database knows of their schedules."""

    def describe(self) -> Iterator[str]:
        yield f"prefill: {self.prefill.describe('peak')}."
        yield f"decode: {self.decode.describe('read bandwidth')}."
        yield f"Products of this model: {self.products.describe()}."
        if self.absence is not None:
            yield f"No counters: {self.absence}."


def explain_decode(figures: DecodeFigures) -> tuple[Finding, ...]:
    """Reasons why decoding is not faster here, the weightiest first; at least one."""
    if figures.decode.limit_share >= NEAR_LIMIT:
        return (*_small_pages(figures), _bandwidth(figures))
    reasons = (*_small_pages(figures), *_waits(figures), *_computes(figures))
    return reasons or (_unknown(figures),)


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


def _small_pages(figures: DecodeFigures) -> Iterator[Finding]:
    llc, dtlb = figures.decode.llc_misses_pki, figures.decode.dtlb_misses_pki
    if llc and dtlb is not None and dtlb * LINES_OF_SMALL_PAGES > llc:
        yield Finding(
            "decode-small-pages",
            Severity.medium,
            "decoding misses the TLB as weights in small pages do",
            (_counted(figures), _rates(figures)),
            "A miss of the TLB costs a walk through tables before the line itself can be read.",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled, then open the model anew; "
            "phasewise doctor names what else denies huge pages",
        )


def _waits(figures: DecodeFigures) -> Iterator[Finding]:
    stalled = figures.decode.stalled_share
    if stalled is not None and stalled >= MUCH_STALLED:
        yield Finding(
            "decode-waits",
            Severity.medium,
            "decoding waits for memory though bandwidth is left",
            (_counted(figures), _rates(figures)),
            "Lines come late, not too few: from another NUMA node, or through a memory controller that "
            "others load as well.",
            f"phasewise tune-config {figures.model} finds the cores and ranks",
        )


def _computes(figures: DecodeFigures) -> Iterator[Finding]:
    stalled = figures.decode.stalled_share
    if stalled is not None and stalled < MUCH_STALLED:
        yield Finding(
            "decode-computes",
            Severity.medium,
            "decoding computes more than it waits: unpacking weights is its limit",
            (_counted(figures), _rates(figures)),
            "Cores are busy with instructions while memory could give more.",
            f"phasewise tune-kernels {figures.model}; more cores (--threads); a format that takes less "
            "unpacking",
        )


def _unknown(figures: DecodeFigures) -> Finding:
    absence = figures.absence or "stalls are not counted on this core"
    return Finding(
        "decode-below-bandwidth",
        Severity.medium,
        "decoding does not read as fast as these cores can, and no counter tells why",
        (_rates(figures), FindingEvidence("perf_event_open", absence)),
        "Either cores wait (pages, nodes, neighbours) or they compute (unpacking, schedules).",
        f"phasewise doctor; phasewise tune-kernels {figures.model}; the same where there are counters",
    )


def _rates(figures: DecodeFigures) -> FindingEvidence:
    rates = (number(rate / 1e9, 3) for rate in (figures.bytes_per_s, figures.read_limit_bytes_per_s))
    return FindingEvidence(
        "decode of one sequence", "{} of {} GB/s that were measured beside it".format(*rates)
    )


def _counted(figures: DecodeFigures) -> FindingEvidence:
    decode = figures.decode
    parts = [] if decode.stalled_share is None else [f"{percent(decode.stalled_share)} of the cycles stalled"]
    if misses := decode.misses():
        parts.append(f"misses per 1000 instructions: {misses}")
    return FindingEvidence("perf_event_open", "; ".join(parts))
