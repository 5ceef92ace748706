"""Linear layers whose weights are packed for our kernels, and their place in a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch

from phasewise.cython_kernels import _native, packing, sparse
from phasewise.cython_kernels._native import OpenMPProduct
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.torch.shared_threads import multiply, torch_team

Storage = Literal["auto", "sparse", "dense"]
WeightFormat = Literal["native", "bf16", "int8"]

WORTH_ZEROS = 0.3
"""Share of zeros from which on `auto` stores weights sparse, on a CPU with an instruction to expand."""

_FIELDS = ("kind", "n", "k", "group", "zero_point", "top_exponent")
_ARRAYS = ("values", "scales", "mins", "offsets")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class PackedLinear(torch.nn.Module):
    """y = x W^T + b for inference, on any leading dimensions; x float32, float16 or bfloat16, y like x.

    bfloat16 weights stay so; others become float32, or what `weight_format` says: `bf16`, `int8`. Sums are
    float32, on the threads of torch's own operations. It cannot be trained: gradients and `train()` raise
    RuntimeError.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.bias: torch.Tensor | None
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32).clone())
        self._take(weight)
        super().train(False)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, storage: Storage = "auto", weight_format: WeightFormat = "native"
    ) -> Self:
        """Pack the layer's weight and bias. ValueError for a weight that cannot be packed."""
        return cls(packed_weight(linear.weight, storage, weight_format), linear.bias)

    @property
    def in_features(self) -> int:
        return self._weight.k

    @property
    def out_features(self) -> int:
        return self._weight.n

    @property
    def is_sparse(self) -> bool:
        """True if the weight is stored without its zeros."""
        return self._weight.is_sparse

    @property
    def stored_as(self) -> str:
        """The storage in words, e.g. `bf16, dense`."""
        return f"{self._weight.kind}, {'sparse' if self.is_sparse else 'dense'}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("PackedLinear has no gradient: call it under torch.no_grad()")
        if x.shape[-1:] != (self.in_features,) or x.dtype not in _DTYPES:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}: a float tensor [..., {self.in_features}] expected"
            )
        product = OpenMPProduct(torch_team(), self._weight)
        bias = None if self.bias is None else self.bias.to(torch.float32)
        return multiply(product, x.detach().to(torch.float32), bias).to(x.dtype)

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise RuntimeError("PackedLinear cannot be trained: train the linear layer, then pack it")
        return super().train(False)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {self.stored_as}"

    def get_extra_state(self) -> dict[str, Any]:
        """The packed weight for a state dict: its fields, and its arrays as tensors of bytes or numbers."""
        state: dict[str, Any] = {name: getattr(self._weight, name) for name in _FIELDS}
        for name in _ARRAYS:
            array = getattr(self._weight, name)
            if array is not None:
                state[name] = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
                state[f"{name}_form"] = (array.dtype.str, tuple(array.shape))
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Set the weight from a state dict. ValueError or WeightError where its arrays make no weight."""
        arrays = {name: _array(state, name) for name in _ARRAYS}
        values = arrays.pop("values")
        if values is None:
            raise ValueError("a state without values is none of a PackedLinear")
        fields = {name: state[name] for name in _FIELDS}
        self._take(PackedWeight(values=values, **fields, **arrays))

    def _take(self, weight: PackedWeight) -> None:
        if weight.is_sparse:
            sparse.kept(weight)  # WeightError unless masks, offsets and length agree
        _native.prepared_row_bytes(weight)  # the same of what kernels check
        self._weight = weight


def _array(state: dict[str, Any], name: str) -> Any:
    if name not in state:
        return None
    dtype, shape = state[f"{name}_form"]
    return state[name].numpy().view(np.dtype(dtype)).reshape(shape).copy()


def packed_weight(
    weight: torch.Tensor, storage: Storage = "auto", weight_format: WeightFormat = "native"
) -> PackedWeight:
    """Pack a weight [outputs, inputs] as `PackedLinear` does. ValueError where it cannot be packed."""
    weight = weight.detach()
    if weight.dtype not in _DTYPES or weight.device.type != "cpu":
        raise ValueError(f"a weight of {weight.dtype} on {weight.device}: a float weight on the CPU expected")
    rows = weight.to(torch.float32).numpy()
    if weight_format == "int8":
        packed = packing.pack_quant(packing.quantise(rows, 8, symmetric=True))
    else:
        is_bf16 = weight.dtype == torch.bfloat16 or weight_format == "bf16"
        packed = packing.pack_dense(rows, "bf16" if is_bf16 else "f32")
    return stored(packed, storage)


def stored(weight: PackedWeight, storage: Storage) -> PackedWeight:
    """Store a packed weight sparse or dense. ValueError for `sparse` if its format has no sparse storage."""
    can = sparse.can_be_sparse(weight.kind, weight.mins is not None)
    if storage == "sparse" and not can:
        raise ValueError(f"{weight.kind} weights have no sparse storage: bfloat16 and int8 have")
    if storage == "dense" or not can:
        return weight
    expands = _native.lanes() == 16 and _native.expands()
    if storage == "auto" and (not expands or sparse.density(weight) > 1 - WORTH_ZEROS):
        return weight
    return sparse.to_sparse(weight)


@dataclass(frozen=True)
class Replacement:
    """The outcome for one linear layer of `replace_linear`."""

    name: str
    replaced: bool
    zeros: float
    """Share of the layer's weights that are zero."""
    why: str


def replace_linear(
    model: torch.nn.Module,
    storage: Storage = "auto",
    min_sparsity: float = 0.3,
    skip: Collection[str] = ("lm_head",),
    weight_format: WeightFormat = "native",
) -> list[Replacement]:
    """Replace, in place, the linear layers of which at least `min_sparsity` of the weights are zero.

    skip: layers that stay, by their last name or their whole name. weight_format: format of
    `PackedLinear.from_linear`; `int8` keeps zeros, and with `min_sparsity=0` it replaces any layer.
    Subclasses of torch.nn.Linear, and layers that share their weight with another module, stay too.
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
    name: str, module: torch.nn.Linear, uses: int, zeros: float, min_sparsity: float, skip: Collection[str]
) -> str | None:
    """The reason that a layer stays as it is; None for a layer to replace."""
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
