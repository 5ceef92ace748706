"""Replace the linear layers of a PyTorch model by packed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch

from phasewise.torch.packed_linear import PackedLinear, Storage, WeightFormat


@dataclass(frozen=True)
class Replacement:
    """The outcome of one linear layer."""

    name: str
    replaced: bool
    zeros: float
    """The share of its weights."""
    why: str


def replace_linear(
    model: torch.nn.Module,
    storage: Storage = "auto",
    min_sparsity: float = 0.3,
    skip: Collection[str] = ("lm_head",),
    weight_format: WeightFormat = "native",
) -> list[Replacement]:
    """Replace, in place, the linear layers of which at least `min_sparsity` of the weights are zero.

    skip: layers that stay, by their last name or their whole name. weight_format: as for
    `PackedLinear.from_linear`; `int8` keeps zeros, and with `min_sparsity=0` it is for any layer. Subclasses
    of torch.nn.Linear, and layers that share their weight with another module, stay too.
    """
    uses = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    report = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear):
            continue
        zeros = float((module.weight == 0).float().mean()) if module.weight.numel() else 0.0
        why = _obstacle(name, module, uses[id(module.weight)], zeros, min_sparsity, skip)
        if why is None:
            try:
                packed = PackedLinear.from_linear(module, storage, weight_format)
            except ValueError as error:
                why = str(error)
            else:
                model.set_submodule(name, packed)
                report.append(Replacement(name, True, zeros, f"packed, {packed.stored_as}"))
                continue
        report.append(Replacement(name, False, zeros, why))
    return report


def _obstacle(
    name: str,
    module: torch.nn.Linear,
    uses: int,
    zeros: float,
    min_sparsity: float,
    skip: Collection[str],
) -> str | None:
    """The reason that a layer stays; None: it does not."""
    if name in skip or name.rpartition(".")[2] in skip:
        return "it is to be skipped"
    if type(module) is not torch.nn.Linear:
        return f"it is a {type(module).__name__}, not a torch.nn.Linear"
    if uses > 1:
        return "its weight is tied to another module's"
    if not name:
        return "it is the model itself"
    if zeros < min_sparsity:
        return f"{100 * zeros:.0f} % of its weights are zero, less than {100 * min_sparsity:.0f} %"
    return None
