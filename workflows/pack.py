"""Packs a model into a file of the user's own, which commands open in place of the model."""

from __future__ import annotations

from pathlib import Path

from phasewise.serving.loaders import pack_model
from phasewise.serving.models.storage_modes import SparseMode
from phasewise.workflows.new_path import new_path
from phasewise.workflows.report import Report, silent

_READABLE_BY_ALL = 0o644
"""No user but the owner may write to a packed file, and who builds an image is not who runs it."""


def pack(model: str, weight_format: str, sparse: SparseMode, out: Path, report: Report = silent) -> None:
    """Write the packed file `out`, which appears when it is whole and reads back. Raises WorkflowError,
    ModelError."""
    with new_path(out, "packed") as written:
        pack_model(model, weight_format, written, f"{out}, which commands take as MODEL", report, sparse)
    out.chmod(_READABLE_BY_ALL)
