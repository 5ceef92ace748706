"""Attention alone, as a program runs it: GFLOP/s of a prompt, and GB/s of keys and values that a token reads.

    python benchmarks/attention.py --formats f32,f16,int16,int8 --tokens 4096
    python benchmarks/attention.py --heads 32 --kv-heads 4 --head-dim 64 --isa avx512_vnni

A prompt is computed in steps of --step tokens; what tokens see is counted, four operations for each number
of a key. Then single tokens with the whole prompt behind them, over as many layers as --cold-mib of keys and
values, so that no cache holds them. Formats take turns in --rounds rounds; the best of each is printed.
--busy: one thread, by the CPU time that it took, for a machine that does other things too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
from typer import Option

from benchmarks.harness import Rounds, Threads, Yielded, commands, in_turns, listed
from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.kv_formats import KV_FORMATS, kv_slot_bytes


@dataclass(frozen=True)
class Settings:
    """Heads of a layer, tokens of a prompt and of a step, and how time is taken."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    step: int
    cold_mib: int
    busy: bool


class Layers:
    """Layers of attention and nothing else, with random projections."""

    def __init__(self, team: _native.Team, kv_format: str, options: Settings, layers: int) -> None:
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
        return sum(self.run(start, min(self._step, tokens - start)) for start in range(0, tokens, self._step))


def _slice(start: int, rows: int) -> Any:
    return SimpleNamespace(
        token_ids=[0] * rows,
        start=start,
        slot_base=0,
        wants_logits=False,
        table=None,
        n_drafted=0,
        ring=None,
        adapter=0,
    )


def attention(
    isas: Annotated[str, Option("--isa")] = isa.active(),
    formats: str = ",".join(KV_FORMATS),
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    tokens: int = 4096,
    step: int = 512,
    cold_mib: int = 256,
    threads: Threads = 2,
    rounds: Rounds = 3,
    busy: Annotated[bool, Option("--busy")] = False,
) -> Yielded:
    options = Settings(heads, kv_heads, head_dim, tokens, step, cold_mib, busy)
    with isa.using(isas):
        team = _native.Team(list(range(1 if busy else threads)))
        layers = {name: _layers(name, options) for name in listed(formats)}

        systems = {name: Layers(team, name, options, count) for name, count in layers.items()}

        def times_ns(name: str) -> tuple[float, float]:
            """Time in one layer: of a whole prompt, and of one token behind it."""
            prompt_ns = systems[name].prompt(tokens)
            token_ns = min(systems[name].run(tokens - 1, 1) for _ in range(5))
            return prompt_ns / layers[name], token_ns / layers[name]

        taken = in_turns({name: partial(times_ns, name) for name in systems}, rounds, warm_ups=0)
    for name, own in taken.items():
        prompt_ns, token_ns = (min(times) for times in zip(*own, strict=True))
        flops = 2 * heads * head_dim * tokens * (tokens + 1)
        read = tokens * kv_heads * kv_slot_bytes(name, head_dim)
        row = {"KV format": name, "prompt, ms a layer": prompt_ns / 1e6, "GFLOP/s": flops / prompt_ns}
        yield row | {"token, us a layer": token_ns / 1e3, "GB/s": read / token_ns}


def _layers(kv_format: str, options: Settings) -> int:
    layer_bytes = options.tokens * options.kv_heads * kv_slot_bytes(kv_format, options.head_dim)
    return int(max(1, -(-(options.cold_mib << 20) // layer_bytes)))


app = commands(__doc__, attention)

if __name__ == "__main__":
    app()
