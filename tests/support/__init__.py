"""Helpers that several tests share: fakes, factories, references, strategies.

Tests and benchmarks import `tests.support.NAME`; an editable install (`make setup`) puts the repository's
root on the path. Nothing in it begins with `test_`, and nothing of phasewise imports it.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
SHARED = Path(os.environ.get("PHASEWISE_SHARED_DATA") or ROOT.parent / "shared" / "data")
"""Reference data, which is no part of the repository."""
