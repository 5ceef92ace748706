"""Weights of a directory's safetensors that are made of several tensors of the files."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.quantised.bitmask import bitmask_tensor
from phasewise.serving.loaders.quantised.floats import (
    STACK,
    fp8_tensor,
    mxfp4_stack,
    mxfp4_tensor,
    nvfp4_tensor,
)
from phasewise.serving.loaders.quantised.integers import awq_tensor, bytes_tensor, gptq_tensor, packed_tensor
from phasewise.serving.loaders.quantised.parts import OF_INPUTS, PARTS, SPARSE, Found, Opened, Parts, parts_in
from phasewise.serving.loaders.quantised.scheme import Quantisation
from phasewise.serving.loaders.source import SourceTensor


def made_tensors(
    opened: Opened, quantisation: Quantisation | None
) -> tuple[Iterator[tuple[str, SourceTensor]], set[str]]:
    """Names and tensors, made one by one, and the names of all tensors of the files that they are made of."""
    sparse, stacks = parts_in(opened, SPARSE), parts_in(opened, STACK, "_")
    stacks = {stem: own for stem, own in stacks.items() if len(own) == len(STACK)}
    quantised: dict[str, dict[str, Found]] = {}
    used = {f"{stem}.{part}" for stem, own in sparse.items() for part in own}
    used |= {f"{stem}_{part}" for stem, own in stacks.items() for part in own}
    if quantisation is not None:
        quantised = parts_in(opened, PARTS)
        for file, entries in opened:
            for stem in quantised:
                if (entry := entries.get(f"{stem}.weight")) is not None:
                    quantised[stem]["weight"] = file, entry
            used |= {theirs for theirs in entries if theirs.rpartition(".")[2] in OF_INPUTS}
        used |= {f"{stem}.{part}" for stem, own in quantised.items() for part in own}

    def composed() -> Iterator[tuple[str, SourceTensor]]:
        for stem, own in quantised.items():
            assert quantisation is not None
            yield f"{stem}.weight", _quantised(f"{stem}.weight", own, quantisation)
        for stem, own in sparse.items():
            yield f"{stem}.weight", bitmask_tensor(f"{stem}.weight", own)
        for stem, own in stacks.items():
            yield f"{stem}.mxfp4", mxfp4_stack(stem, own)

    return composed(), used


def _quantised(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    if "qweight" in parts and quantisation.method in ("awq", "gptq"):
        return (awq_tensor if quantisation.method == "awq" else gptq_tensor)(name, parts, quantisation)
    if quantisation.method in ("compressed-tensors", "fp8"):
        if "weight_packed" in parts:
            dtype = parts["weight_packed"][1].dtype
            if dtype == "I32":
                return packed_tensor(name, parts, quantisation)
            has_scale = "weight_global_scale" in parts
            return (nvfp4_tensor if has_scale else mxfp4_tensor)(name, parts, quantisation)
        if "weight" in parts:
            is_float = parts["weight"][1].dtype != "I8"
            return (fp8_tensor if is_float else bytes_tensor)(name, parts, quantisation)
    names = ", ".join(sorted(parts))
    raise ModelError(
        f"the quantised tensor {name!r:.80} is made of {names}, which {quantisation.method} does not have"
    )
