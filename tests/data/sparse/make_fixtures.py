"""Writes the safetensors files beside this one, with compressed-tensors itself.

pip install torch safetensors compressed-tensors==0.10.2 transformers
python tests/data/sparse/make_fixtures.py
"""

from pathlib import Path

import torch
from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import Sparse24BitMaskTensor
from compressed_tensors.compressors.sparse_compressors.sparse_bitmask import BitmaskTensor
from safetensors.torch import save_file

HERE = Path(__file__).parent
torch.manual_seed(0)
rows = torch.randn(9, 44).to(torch.bfloat16)
half = torch.where(torch.rand(9, 44) < 0.5, 0, rows)
groups = rows.view(-1, 4)
two = torch.zeros_like(groups).scatter(
    1, groups.abs().topk(2).indices, groups.gather(1, groups.abs().topk(2).indices)
)
two = two.view(9, 44)
stem = "model.layers.0.mlp.up_proj"
save_file({"half": half, "two": two}, HERE / "dense.safetensors")
save_file(BitmaskTensor.from_dense(half).dict(stem), HERE / "bitmask.safetensors")
save_file(Sparse24BitMaskTensor.from_dense(two).dict(stem), HERE / "24.safetensors")
