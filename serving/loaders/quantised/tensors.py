"""Every quantised weight of a directory's safetensors as a tensor of ours."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.quantised.floats import fp8_tensor, mxfp4_tensor, nvfp4_tensor
from phasewise.serving.loaders.quantised.integers import awq_tensor, bytes_tensor, gptq_tensor, packed_tensor
from phasewise.serving.loaders.quantised.parts import Opened, Parts, quantised_parts
from phasewise.serving.loaders.quantised.scheme import Quantisation
from phasewise.serving.loaders.source import SourceTensor


def quantised_tensors(
    opened: Opened, quantisation: Quantisation
) -> tuple[Iterator[tuple[str, SourceTensor]], set[str]]:
    """Names and tensors, made one by one, and the names of all tensors of the files that they are made of."""
    parts, used = quantised_parts(opened)
    return ((name, _tensor(name, tensors, quantisation)) for name, tensors in parts.items()), used


def _tensor(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    if "qweight" in parts and quantisation.method in ("awq", "gptq"):
        return (awq_tensor if quantisation.method == "awq" else gptq_tensor)(name, parts, quantisation)
    if quantisation.method in ("compressed-tensors", "fp8"):
        if "weight_packed" in parts:
            dtype = parts["weight_packed"][1].dtype
            if dtype == "I32":
                return packed_tensor(name, parts, quantisation)
            return (nvfp4_tensor if "weight_global_scale" in parts else mxfp4_tensor)(
                name, parts, quantisation
            )
        if "weight" in parts:
            is_float = parts["weight"][1].dtype != "I8"
            return (fp8_tensor if is_float else bytes_tensor)(name, parts, quantisation)
    names = ", ".join(sorted(parts))
    raise ModelError(
        f"the quantised tensor {name!r:.80} is made of {names}, which {quantisation.method} does not have"
    )
