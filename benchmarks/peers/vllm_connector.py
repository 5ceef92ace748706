"""A KV connector of vLLM that keeps the keys and values of whole prompts in files, token by token.

vLLM loads it by `kv_connector_module_path`, in its own environment. A prompt is computed in one step there,
alone. On CPUs blocks lie as the kernels of attention read them: [block][KV head], the keys of a head before
its values, in an order that depends on the instruction set. It is not assumed here but found: numbers are
written by vLLM's own operator, and looked for.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

DIGIT = 256
"""Whole numbers up to here are exact in bfloat16."""


def places(block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of a block's keys, and of its values, within their halves: [block_size, head_dim]."""
    count = block_size * head_dim
    numbers = torch.arange(count).reshape(block_size, 1, head_dim)
    counts = [torch.zeros(count, dtype=torch.long) for _ in range(2)]
    for unit in (1, DIGIT, DIGIT * DIGIT):
        digits = (numbers // unit % DIGIT).to(dtype)
        block = torch.zeros(1, 1, 2 * block_size, head_dim, dtype=dtype)
        halves = block.chunk(2, dim=2)
        isa = _get_attn_isa(dtype, block_size, head_dim)
        ops.cpu_attn_reshape_and_cache(digits, digits.clone(), *halves, torch.arange(block_size), isa)
        for own, half in zip(counts, halves, strict=True):
            own += half.reshape(-1).long() * unit
    keys, values = (torch.argsort(own).reshape(block_size, head_dim) for own in counts)
    return keys, values


def layout(where: torch.Tensor) -> str:
    """The order of a half of a block, in words, where it is one of two."""
    tokens, dims = where.shape
    rows = torch.arange(tokens * dims)
    if torch.equal(where, rows.reshape(tokens, dims)):
        return "[token][dimension]"
    if torch.equal(where, rows.reshape(dims, tokens).T):
        return "[dimension][token]"
    return "another order"


class PromptConnector(KVConnectorBase_V1):
    """Keeps; loads nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(self._kv_transfer_config.get_from_extra_config("folder", "."))
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._spent_s = 0.0

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        first, end = attn_metadata.query_start_loc[:2].tolist()
        n_tokens = int(attn_metadata.seq_lens[0])
        if end - first != n_tokens:
            return  # tokens of an answer
        _, n_heads, block_size, both = kv_layer.shape
        if self._places is None:
            self._places = places(block_size, both // 2, kv_layer.dtype)
        keys_at, values_at = self._places
        began = time.perf_counter()
        blocks = attn_metadata.block_table[0, : -(-n_tokens // block_size)]
        halves = kv_layer[blocks.long()].reshape(len(blocks), n_heads, 2, -1)

        def by_token(half: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
            return half[..., where].permute(0, 2, 1, 3).flatten(0, 1)[:n_tokens]  # [token, head, dimension]

        self._layers.append((by_token(halves[:, :, 0], keys_at), by_token(halves[:, :, 1], values_at)))
        self._spent_s += time.perf_counter() - began

    def wait_for_save(self) -> None:
        if not self._layers or self._places is None:
            return
        keys, values = (torch.stack(rows).float().numpy() for rows in zip(*self._layers, strict=True))
        np.savez(
            self._folder / "prompt.npz",
            keys=keys,
            values=values,
            order=[layout(where) for where in self._places],
            seconds=self._spent_s,
        )
        self._layers, self._spent_s = [], 0.0

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()
