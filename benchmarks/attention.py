"""Attention alone, as a program runs it: GFLOP/s of a prompt, and GB/s of keys and values that a token reads.

    python benchmarks/attention.py --formats f32,f16,int16,int8 --tokens 4096
    python benchmarks/attention.py --heads 32 --kv-heads 4 --head-dim 64 --isa avx512_vnni

A prompt is computed in steps of --step tokens; what tokens see is counted, four operations for each number
of a key. Then single tokens with the whole prompt behind them, over as many layers as --cold-mib of keys and
values, so that no cache holds them. Formats take turns in --rounds rounds; the best of each is printed.
--busy: one thread, by the CPU time that it took, for a machine that does other things too.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.kv_formats import KV_FORMATS, kv_slot_bytes


class Layers:
    """Layers of attention and nothing else, with random projections."""

    def __init__(self, team: _native.Team, kv_format: str, options: argparse.Namespace, layers: int) -> None:
        heads, kv_heads, dim = options.heads, options.kv_heads, options.head_dim
        row = -(-(heads + 2 * kv_heads) * dim // 16) * 16
        self._team, self._step, self._busy = team, options.step, options.busy
        shape = {"n_layers": layers, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": dim}
        floats = options.step * (row + heads * dim)
        shape |= {"hidden": 1, "ffn": 1, "vocab": floats, "window": 0, "norm_eps": 1e-5}
        room = {"kv_slots": options.tokens, "max_tokens": options.step, "max_slices": 1, "max_logit_rows": 1}
        room |= {"max_threads": team.size, "kv_format": kv_format}
        self._program = _native.Program(shape, room, 1e4 ** (-np.arange(0, 1, 2 / dim)))
        for layer in range(layers):
            self._program.attend(layer, 0, row, options.step * row, heads * dim)
        self._program.seal(0)
        memory = np.asarray(self._program)[0]
        memory[: options.step * row] = np.random.default_rng(2).uniform(-1, 1, options.step * row)

    def run(self, start: int, rows: int) -> int:
        """Nanoseconds of one step."""
        before, before_cpu = self._program.native_ns, time.thread_time_ns()
        self._program.run(self._team, [_slice(start, rows)])
        return time.thread_time_ns() - before_cpu if self._busy else int(self._program.native_ns - before)

    def prompt(self, tokens: int) -> int:
        """Nanoseconds of a whole prompt."""
        return sum(self.run(at, min(self._step, tokens - at)) for at in range(0, tokens, self._step))


def _slice(start: int, rows: int) -> Any:
    return SimpleNamespace(
        token_ids=[0] * rows, start=start, slot_base=0, wants_logits=False, table=None, n_drafted=0, ring=None
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default=isa.active())
    parser.add_argument("--formats", default=",".join(KV_FORMATS))
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--step", type=int, default=512)
    parser.add_argument("--cold-mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    tokens, formats = options.tokens, options.formats.split(",")
    with isa.using(options.isa):
        team = _native.Team(list(range(1 if options.busy else options.threads)))
        best: dict[tuple[str, str], float] = {}
        layers = {name: _layers(name, options) for name in formats}
        systems = {name: Layers(team, name, options, layers[name]) for name in formats}
        for name in formats * options.rounds:
            prompt_ns = systems[name].prompt(tokens) / layers[name]
            token_ns = min(systems[name].run(tokens - 1, 1) for _ in range(5)) / layers[name]
            best[name, "prompt"] = min(prompt_ns, best.get((name, "prompt"), prompt_ns))
            best[name, "token"] = min(token_ns, best.get((name, "token"), token_ns))
    print("| KV format | prompt, ms a layer | GFLOP/s | token, us a layer | GB/s |\n|---|---|---|---|---|")
    for name in formats:
        flops = 2 * options.heads * options.head_dim * tokens * (tokens + 1)
        read = tokens * options.kv_heads * kv_slot_bytes(name, options.head_dim)
        prompt, token = best[name, "prompt"], best[name, "token"]
        print(
            f"| {name} | {prompt / 1e6:.1f} | {flops / prompt:.0f} | {token / 1e3:.0f} | {read / token:.1f} |"
        )


def _layers(kv_format: str, options: argparse.Namespace) -> int:
    layer_bytes = options.tokens * options.kv_heads * kv_slot_bytes(kv_format, options.head_dim)
    return int(max(1, -(-(options.cold_mib << 20) // layer_bytes)))


if __name__ == "__main__":
    main()
