"""The numbers of the search, from the paper where it gives them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search of one product and of one group of them. Shares are of times; 0.01 is one per
    cent.
    """

    batch: int = 12
    """Schedules that are timed side by side; one of them is the fastest so far, again."""
    gain: float = 0.01
    """A step of the fast start must be faster by this share, else it is rolled back."""
    fine_gain: float = 0.008
    """A step of the finetune must be faster by this share, else it is not taken."""
    keep_within: float = 0.5
    """Micro-kernels and grids slower than the best of their batch by more than this share are dropped."""
    kept_kernels: int = 4
    """Micro-kernels that get a fast start."""
    lines: int = 2
    """Micro-kernels whose slices are tried with every length of a pass over k."""
    finalists: int = 2
    """Pairs of micro-kernel and grid that are finetuned."""
    moves: int = 3
    """Most moves of each schedule that is finetuned: on a noisy machine moves seem to gain for ever."""
    patience: int = 1
    """Rounds of the finetune without a gain before it ends."""
    window: int = 16
    """The paper's sigma: for this many shapes every micro-kernel is a candidate, then only their winners."""
    per_octave: int = 4
    """Beyond the window, how many m of each octave are tuned; the others use a neighbour."""
    reuse_from: int = 64
    """Schedules may be fixed from this m on: where products stop being skinny."""
    steady: int = 3
    """Number of shapes in a row that must confirm the slice before it is fixed."""
    slice_threshold: float = 0.25
    """Share by which each side of a slice may differ from the average of the previous slices and still
    confirm them."""
    reuse_within: float = 0.03
    """Share by which the previous slice may be slower than the found one and still be confirmed.

    A fixed slice is given up if the default beats it by more.
    """
    finals: int = 4
    """Fastest schedules of each m that are timed again, side by side with the default, before one is chosen:
    the better half of twice as many."""
    final_laps: int = 3
    """Times that each of the `finals` is timed again."""
    stay_within: float = 0.01
    """The previous slice is kept if it is slower by at most this share."""
    probes: int = 4
    """The m at which the ways of computing are compared before one is chosen for the group."""
    switch_gain: float = 0.02
    """Share by which another way of computing must be faster than the default one, over all m together."""
    split_gain: float = 0.05
    """Share by which another way of computing must be faster, over all m together, if it sums k in another
    number of parts."""
    fewest_rows_keep: float = 0.97
    """Share of their speed that the fewest rows, those of an answer, must keep under another way of
    computing."""
