"""Settings of `bench run`: the tests of each model, and how they are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise.workflows.errors import UsageError

if TYPE_CHECKING:
    from phasewise.serving.engine.throughput import Workload

CACHE_TYPES = {"f32": "f32", "f16": "f16", "bf16": "bf16", "q8_0": "int8", "int8": "int8", "int4": "int4"}
"""Formats of keys and values by llama.cpp's names and ours. Its q4_0 has 4.5 bits a number, int4 has 5."""


@dataclass(frozen=True)
class BenchTests:
    """Lengths in tokens: prompts, decodes, pairs of both, and positions computed before each test."""

    prompts: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    pairs: tuple[tuple[int, int], ...] = ()
    depths: tuple[int, ...] = (0,)
    sequences: tuple[int, ...] = (1,)

    def workloads(self) -> list[Workload]:
        """By number of sequences, then depth: the prefills, the decodes, the pairs."""
        from phasewise.serving.engine.throughput import Workload

        tests = [(p, 0) for p in self.prompts] + [(0, n) for n in self.n_gen] + list(self.pairs)
        return [
            Workload(n_prompt, n_gen, n_sequences, n_depth)
            for n_sequences in self.sequences
            for n_depth in self.depths
            for n_prompt, n_gen in tests
        ]


@dataclass(frozen=True)
class BenchRunning:
    """The way tests are run: prefill steps of at most `batch_tokens`, cores, formats of keys and values.

    An empty tuple: the plan's cores, or the format of `--kv-format`.
    """

    batch_tokens: tuple[int, ...] = (2048,)
    threads: tuple[int, ...] = ()
    cache_k: tuple[str, ...] = ()
    cache_v: tuple[str, ...] = ()
    repetitions: int = 5
    no_warmup: bool = False
    counters: bool = False

    def kv_formats(self, default: str) -> list[str]:
        """UsageError where keys and values should differ: they have one format here."""
        if not self.cache_k and not self.cache_v:
            return [default]
        if self.cache_k != self.cache_v:
            raise UsageError(
                f"-ctk {_listed(self.cache_k)} with -ctv {_listed(self.cache_v)}: keys and values have one"
                " format; give the same to both, or --kv-format"
            )
        return list(self.cache_k)


def _listed(names: Sequence[str]) -> str:
    return ",".join(names) or "unset"
