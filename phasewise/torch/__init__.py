"""PyTorch linear layers on our kernels, dense or sparse. Needs torch, which phasewise itself does not.

report = replace_linear(model)          # the linear layers that have enough zeros
for one in report: print(one.name, one.why)
"""

from phasewise.torch.packed_linear import PackedLinear, Replacement, replace_linear

__all__ = ["PackedLinear", "Replacement", "replace_linear"]
