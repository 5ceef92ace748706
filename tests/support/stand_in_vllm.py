"""Stand-ins for the classes of vLLM that the plugin replaces methods of, and what it counts on in vLLM.

`INTERFACE` holds of the stand-ins and of vLLM itself: a test of each says so.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

LAYERS = "vllm.model_executor.layers"
LINEAR = f"{LAYERS}.linear"
EMBEDDING = f"{LAYERS}.vocab_parallel_embedding"
COMPRESSED = f"{LAYERS}.quantization.compressed_tensors.compressed_tensors"

METHODS = (
    (LINEAR, "UnquantizedLinearMethod"),
    (EMBEDDING, "UnquantizedEmbeddingMethod"),
    (COMPRESSED, "CompressedTensorsLinearMethod"),
)


def broken_promises() -> list[str]:
    """Differences between vLLM, or its stand-in, and what the plugin needs."""
    broken = []
    for module, name in METHODS:
        method = getattr(importlib.import_module(module), name)
        for function, wanted in (
            ("process_weights_after_loading", ["self", "layer"]),
            ("apply", ["self", "layer", "x", "bias"]),
        ):
            signature = inspect.signature(getattr(method, function))
            if list(signature.parameters) != wanted:
                broken.append(f"{name}.{function}{signature}")
    embedding = importlib.import_module(EMBEDDING)
    if not isinstance(embedding.ParallelLMHead, type):
        broken.append("ParallelLMHead")
    if not isinstance(importlib.import_module("vllm.envs").environment_variables, dict):
        broken.append("environment_variables")
    if not callable(importlib.import_module("vllm.platforms").current_platform.is_cpu):
        broken.append("current_platform.is_cpu")
    return broken


def stand_in(monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool = True) -> SimpleNamespace:
    """Modules of vLLM with classes of their own for one test: `linear`, `embedding`, `compressed`, `head`."""
    import torch

    class Method:
        """Keeps the weight as it is, and multiplies by torch."""

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.of_vllm = True

        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return torch.nn.functional.linear(x, layer.weight, bias)

    method, embedding, compressed = (
        type(name, (), {key: value for key, value in vars(Method).items() if not key.startswith("__")})
        for _, name in METHODS
    )
    head = type("ParallelLMHead", (torch.nn.Module,), {})
    modules: dict[str, dict[str, Any]] = {
        LINEAR: {"UnquantizedLinearMethod": method},
        EMBEDDING: {"UnquantizedEmbeddingMethod": embedding, "ParallelLMHead": head},
        COMPRESSED: {"CompressedTensorsLinearMethod": compressed},
        "vllm.envs": {"environment_variables": {}},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: is_cpu)},
    }
    for path, fields in modules.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if not isinstance(sys.modules.get(name), StandIn):
                monkeypatch.setitem(sys.modules, name, StandIn(name))
                if depth > 1:
                    setattr(sys.modules[name.rpartition(".")[0]], parts[depth - 1], sys.modules[name])
        vars(sys.modules[path]).update(fields)
    return SimpleNamespace(linear=method, embedding=embedding, compressed=compressed, head=head)


class StandIn(ModuleType):
    """A module of this file's, which may have others in it."""

    __path__ = ()


def layer_of(weight: Any, kind: type | None = None, **fields: Any) -> Any:
    """A layer with a loaded weight; kind: its class."""
    import torch

    layer = (kind or torch.nn.Module)()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    for name, value in fields.items():
        setattr(layer, name, value)
    return layer
