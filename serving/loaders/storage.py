"""Whether a weight is packed dense or sparse: by how many of its numbers are zero, and by the CPU.

A weight is one or the other in both phases. Storage changes no bit of any result (cython_kernels/sparse.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phasewise.cython_kernels import _native, packing, sparse
from phasewise.cython_kernels.packing import COLUMN_GROUP
from phasewise.serving.loaders.forms import WeightForm
from phasewise.serving.sparse_mode import SparseMode

WORTH_BYTES = {"bf16": 0.45, "q8": 0.7, "q8 column": 0.3}
"""Where nothing was measured, a sparse weight takes at most this share of the dense one's bytes.

Bytes alone would say 0.9, but expanding takes time beside reading: benchmarks/notes/0009-sparsity.md.
"""

NEARLY_DENSE = 0.95
"""The kept share of a weight's first rows from which on `auto` looks at no others."""

Measured = Callable[[WeightForm, int, int, float], bool | None]
"""Whether sparse is faster for a form, outputs, inputs and kept share; None where nothing was measured."""


def _nothing_measured(form: WeightForm, n: int, k: int, density: float) -> None:
    del form, n, k, density


@dataclass(frozen=True)
class StorageChoice:
    """How storage is chosen. measured: what a tuning database says, asked under `auto`."""

    mode: SparseMode = "auto"
    measured: Measured = _nothing_measured

    @property
    def wants_sparse(self) -> bool:
        """Whether any weight may be stored sparse on this CPU."""
        return self.mode == "always" or (self.mode == "auto" and expands_here())

    @property
    def file_suffix(self) -> str:
        """Of packed files: those of one choice do not replace those of another."""
        if self.mode == "always":
            return "-sparse"
        return "" if self.wants_sparse else "-dense"

    def is_sparse(self, form: WeightForm, n: int, k: int, kept: int | None) -> bool:
        """Whether such a weight is stored sparse. kept: how many numbers are not zero; None: nearly all."""
        if not self.wants_sparse or not can_be_sparse(form):
            return False
        if self.mode == "always":
            return True
        if kept is None:
            return False
        faster = self.measured(form, n, k, kept / (n * k))
        return bytes_share(form, n, k, kept / (n * k)) <= worth_bytes(form) if faster is None else faster


def expands_here() -> bool:
    """Whether the instruction set in use reads sparse weights at full speed."""
    return _native.lanes() == 16 and _native.expands()


def can_be_sparse(form: WeightForm) -> bool:
    """Whether there is a sparse storage of this form."""
    return sparse.can_be_sparse(form.kind, form.has_mins)


def worth_bytes(form: WeightForm) -> float:
    """Of a form that can be sparse: see WORTH_BYTES."""
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
