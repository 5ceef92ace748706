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
    """The same for a step of the finetune."""
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
    """A slice confirms the previous ones if each side differs from their average by at most this share, .."""
    reuse_within: float = 0.03
    """.. or if theirs is slower by at most this share. The default must not beat a fixed one by more."""
    finals: int = 4
    """The fastest schedules of each m, the better half of twice as many, timed again side by side with the
    default before one is chosen, .."""
    final_laps: int = 3
    """.. this number of times."""
    stay_within: float = 0.01
    """The previous slice is kept if it is slower by at most this share."""
    probes: int = 4
    """The m at which the ways of computing are compared before one is chosen for the group."""
    switch_gain: float = 0.02
    """Another way of computing than the default one must be faster by this share, .."""
    split_gain: float = 0.05
    """.. and by this one if it sums k in another number of parts. The gain is that over all m together, .."""
    fewest_rows_keep: float = 0.97
    """.. and the fewest rows, those of an answer, must keep this share of their speed."""
