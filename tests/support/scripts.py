"""Scripts of the repository as modules: those of `benchmarks/` and `docs/` are in no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.support import ROOT


def script(path: str) -> ModuleType:
    """The module of a script, e.g. `benchmarks/flatness.py`. Dataclasses look their module up by name."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
