"""Serve LLMs on CPUs with two execution plans, one for prefill and one for decode.

The names below are the Python API; `docs/guide/python.md` shows it. They are imported at their first use,
so that `import phasewise` loads neither numpy nor the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phasewise._version import __version__

if TYPE_CHECKING:
    from phasewise._api import (
        Generation,
        Model,
        open_model,
        open_store,
        read_machine,
        tune_config,
        tune_kernels,
    )
    from phasewise.kerneldb.errors import KernelDbError
    from phasewise.serving.errors import ContextLengthExceeded, ModelError, RequestError
    from phasewise.tuner.errors import EvaluationError, PlanError, TraceError
    from phasewise.workflows.errors import UsageError

__all__ = [
    "ContextLengthExceeded",
    "EvaluationError",
    "Generation",
    "KernelDbError",
    "Model",
    "ModelError",
    "PlanError",
    "RequestError",
    "TraceError",
    "UsageError",
    "__version__",
    "open_model",
    "open_store",
    "read_machine",
    "tune_config",
    "tune_kernels",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from phasewise import _api

        return getattr(_api, name)
    raise AttributeError(f"module 'phasewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
