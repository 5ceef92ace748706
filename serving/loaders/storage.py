"""Choice of dense or sparse storage of a weight: by how many of its numbers are zero, and by the CPU. A
weight has the same storage in both phases, which changes no bit of any result (cython_kernels/sparse.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phasewise.cython_kernels import _native, packing, sparse
from phasewise.cython_kernels.packing import COLUMN_GROUP
from phasewise.serving.loaders.source import WeightForm
from phasewise.serving.models.storage_modes import SparseMode

WORTH_BYTES = {"bf16": 0.9, "q8": 0.7, "q8 column": 0.3}
"""The largest bytes of a sparse weight, as a share of its dense bytes, where nothing was measured: then
neither one row nor eight wait longer for it (benchmarks/notes/sparse.md)."""

UNMEASURED_SEQUENCES = 8
"""Most sequences that decode together by sparse weights that were not measured; arithmetic limits more."""

NEARLY_DENSE = 0.95
"""The share of kept numbers in a weight's first rows above which `auto` stores the weight dense."""


_AUTO, _SPARSE, _DENSE, _SERVED = FILE_SUFFIXES = ("", "-sparse", "-dense", "-served")
"""Suffixes of packed files, by how their weights are stored."""


@dataclass(frozen=True)
class StorageDecision:
    """The storage of a weight, and the reason."""

    is_sparse: bool
    why: str
    """For people, e.g. `bytes: 0.38 of dense`."""


Measured = Callable[[WeightForm, int, int, float], StorageDecision | None]
"""Returns what was measured for a form, outputs, inputs and share of kept numbers; None: nothing was."""


@dataclass(frozen=True)
class StorageChoice:
    """Settings of the choice of storage. `measured`: decisions of a tuning database, asked under `auto`;
    None: no database. `sequences`: most sequences that are expected to decode together."""

    mode: SparseMode = "auto"
    measured: Measured | None = None
    sequences: int = 1

    @property
    def wants_sparse(self) -> bool:
        """True if any weight may be stored sparse on this CPU."""
        return self.mode == "always" or (
            self.mode == "auto" and (self._goes_by_bytes or self.measured is not None)
        )

    @property
    def _goes_by_bytes(self) -> bool:
        """True if a weight that was not measured is stored sparse where that takes fewer bytes."""
        return expands_here() and self.sequences <= UNMEASURED_SEQUENCES

    @property
    def file_suffix(self) -> str:
        """Suffix of packed files: files of one choice do not replace those of another."""
        if self.mode == "always":
            return _SPARSE
        if not self.wants_sparse:
            return _DENSE
        return _AUTO if self.sequences == 1 else _SERVED

    def is_sparse(self, form: WeightForm, n: int, k: int, kept: int | None) -> bool:
        """True if such a weight is stored sparse. `kept`: numbers that are not zero; None: nearly all."""
        return self.decide(form, n, k, kept).is_sparse

    def decide(self, form: WeightForm, n: int, k: int, kept: int | None) -> StorageDecision:
        """Decide the storage of a weight. `kept`: numbers that are not zero; None: nearly all."""
        if not can_be_sparse(form):
            return StorageDecision(False, f"there is no sparse storage of {form.kind} weights of this kind")
        if self.mode != "auto":
            return StorageDecision(self.mode == "always", f"--sparse {self.mode}")
        if not self.wants_sparse:
            return StorageDecision(False, self._unmeasured)
        if kept is None or kept > NEARLY_DENSE * n * k:
            return StorageDecision(False, "nearly all weights are kept")
        density = kept / (n * k)
        decision = None if self.measured is None else self.measured(form, n, k, density)
        if decision is not None:
            return decision
        if not self._goes_by_bytes:
            return StorageDecision(False, "nothing was measured at this shape and density")
        share, most = bytes_share(form, n, k, density), worth_bytes(form)
        return StorageDecision(share <= most, f"bytes: {share:.2f} of dense, sparse up to {most:.2f}")

    @property
    def _unmeasured(self) -> str:
        if not expands_here():
            return "no instruction expands sparse weights here, nothing was measured"
        return f"nothing was measured for {self.sequences} sequences at once: tune-kernels does"


def expands_here() -> bool:
    """True if the instruction set in use reads sparse weights at full speed."""
    return _native.lanes() == 16 and _native.expands()


def can_be_sparse(form: WeightForm) -> bool:
    """True if there is a sparse storage of this form."""
    return sparse.can_be_sparse(form.kind, form.has_mins)


def worth_bytes(form: WeightForm) -> float:
    """The share of dense bytes up to which sparse storage of a form is worth it (WORTH_BYTES)."""
    has_one_scale = form.kind == "q8" and form.group == COLUMN_GROUP
    return WORTH_BYTES["q8 column" if has_one_scale else form.kind]


def bytes_share(form: WeightForm, n: int, k: int, density: float) -> float:
    """Bytes of a sparse weight, of which the share `density` is kept, as a share of the dense one's."""
    dense = form.nbytes(n, k)
    values = packing.padded_n(n) * packing.padded_k(k) * (2 if form.kind == "bf16" else 1)
    return (dense - values + sparse.values_bytes(form.kind, n, k, density)) / dense


def break_even(form: WeightForm, n: int, k: int) -> float:
    """The share of zeros from which on a sparse weight is stored sparse where nothing was measured."""
    all_kept, none_kept = bytes_share(form, n, k, 1.0), bytes_share(form, n, k, 0.0)
    return min(1.0, max(0.0, (all_kept - worth_bytes(form)) / (all_kept - none_kept)))
