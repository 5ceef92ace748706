"""Sparse keys and values of a frozen prefix (SparAMX, section 6): their bytes, and the speed of a prototype.

    python benchmarks/sparse_kv.py count
    python benchmarks/sparse_kv.py speed --threads 2
    python benchmarks/sparse_kv.py speed --heads 32 --kv-heads 8 --head-dim 128 --layers 8

The prototype is `kernels/sparse_kv.c`: a bit for each number of the prefix and float16 for each that is
kept, expanded in registers (AVX-512 VBMI2), and the engine's own attention beside it. Nothing of the product
loads it. What such prefixes cost in quality: frozen_prefix.py.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import Broken, Rounds, Spread, Threads, Yielded, commands, listed, ratios
from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.kv_formats import KV_FORMATS, kv_slot_bytes

SOURCE = Path(__file__).with_name("kernels") / "sparse_kv.c"
KERNELS = Path(__file__).parents[1] / "cython_kernels"
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-pthread")

Forms = Annotated[str, Option(help="formats of keys and values, and shares of zeros K:V, also K:V@int8")]


@dataclass(frozen=True)
class Form:
    """The form of a prefix: a format of the engine's, or a bitmap and the kept numbers in one."""

    kv_format: str
    zeros: tuple[float, float] | None = None

    @classmethod
    def of(cls, text: str) -> Form:
        shares, _, kv_format = text.partition("@")
        if ":" not in shares:
            return cls(text)
        keys, _, values = shares.partition(":")
        return cls(kv_format or "f16", (float(keys), float(values)))

    def bits(self, head_dim: int) -> float:
        """Of a number; those of scales are shared out."""
        dense = 8 * kv_slot_bytes(self.kv_format, head_dim) / (2 * head_dim)
        if self.zeros is None:
            return dense
        number = {"f16": 16, "int8": 8}[self.kv_format]
        return 1 + number * (1 - sum(self.zeros) / 2) + dense - number


def zeros_at(bits: float) -> float:
    """The share of zeros at which a bitmap and float16 take so many bits a number."""
    return (17 - bits) / 16


# ---- numbers as they are stored --------------------------------------------------------------------------


def rounded(rows: np.ndarray, kv_format: str) -> np.ndarray:
    """Keys or values [..., head_dim] of float32 as the engine's cache has them."""
    if kv_format == "f16":
        return rows.astype(np.float16).astype(np.float32)
    if kv_format == "int8":
        scale = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
        return np.rint(np.divide(rows, scale, out=np.zeros_like(rows), where=scale > 0)) * scale
    if kv_format == "int4":
        groups = rows.reshape(*rows.shape[:-1], -1, 32)
        least = _bf16(groups.min(axis=-1, keepdims=True), downwards=True)
        scale = _bf16((groups.max(axis=-1, keepdims=True) - least) / np.float32(15), downwards=False)
        factor = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        codes = np.minimum(np.rint((groups - least) * factor), np.float32(15))
        return (codes * scale + least).reshape(rows.shape)
    raise ValueError(f"no rounding to {kv_format} here")


def _bf16(x: np.ndarray, *, downwards: bool) -> np.ndarray:
    """The nearest bfloat16 that is not above x, or not below it."""
    bits = x.view(np.uint32)
    away = bits + np.where((bits >> 31 == 1) == downwards, np.uint32(0xFFFF), np.uint32(0))
    return (away & np.uint32(0xFFFF0000)).view(np.float32)


# ---- bytes -----------------------------------------------------------------------------------------------


def count(
    forms: Forms = "bf16,int8,int4,0.3:0.5,0.5:0.5,0.7:0.7,0.3:0.5@int8,0.5:0.5@int8",
    tokens: Annotated[int, Option(help="of the prefix")] = 16_384,
    layers: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    weights_gb: Annotated[float, Option(help="that a step reads")] = 15.01,
) -> Yielded:
    """Bytes that a decode step reads, and what they allow it to gain; by default Llama 3 8B in bf16.

    The last column: with each KV head stored once for every query head that reads it, as SparAMX's model has.
    """
    whole = 2 * layers * kv_heads * head_dim * tokens * 2 / 1e9
    repeats = heads // kv_heads
    for text in listed(forms):
        form = Form.of(text)
        bits = form.bits(head_dim)

        def gain(kv_gb: float, part: float = bits / 16) -> float:
            return (weights_gb + kv_gb) / (weights_gb + kv_gb * part)

        yield {
            "prefix": text,
            "bits": bits,
            "zeros of as many bits": zeros_at(bits) if form.zeros is None else None,
            "GB of keys and values": whole * bits / 16,
            "attention gains at most": 16 / bits,
            "a step gains at most": f"{gain(whole):.3f}",
            "heads repeated": f"{gain(whole * repeats):.3f}",
        }


# ---- speed -----------------------------------------------------------------------------------------------


def build(folder: Path) -> Path:
    """The prototype with the engine's attention, for this machine's instruction set."""
    name = isa.active()
    if not name.startswith(("avx512", "amx")) or not _native.expands():
        raise SystemExit("this CPU does not expand in registers: AVX-512 VBMI2 is needed")
    own = json.loads((KERNELS / "isa" / "flags.json").read_text())["x86_64"][name].split()
    program = folder / "sparse_kv"
    command = ["cc", *FLAGS, *own, f"-I{KERNELS}", "-include", f"isa/{name}.h", "-o", str(program)]
    subprocess.run([*command, str(SOURCE), str(KERNELS / "families" / "ops.c"), "-lm"], check=True)
    return program


def speed(
    forms: Forms = "f16,int16,int8,int4,0.3:0.5,0.5:0.5,0.53:0.53,0.7:0.7,0.75:0.75",
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: Annotated[int, Option(help="a multiple of 64")] = 64,
    layers: int = 30,
    tokens: Annotated[int, Option(help="of the prefix, a multiple of 128")] = 16_384,
    tail: Annotated[int, Option(help="tokens after it, never sparse")] = 200,
    threads: Threads = 2,
    rounds: Rounds = 15,
    busy: Annotated[bool, Option("--busy", help="one thread, by the processor time that it takes")] = False,
) -> Yielded:
    """Attention of one token over a prefix and a tail, in all layers, forms in turns; the first one is 1."""
    labels = listed(forms)
    given = [
        str(number)
        for number in (heads, kv_heads, head_dim, layers, tokens, tail, 0 if busy else threads, rounds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        asked = [text if ":" in text else str(KV_FORMATS.index(text)) for text in labels]
        command = [str(build(Path(folder))), *given, *asked]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    taken = {}
    for label, line in zip(labels, lines, strict=True):
        _, read, equal, *times_ns = line.split()
        if equal != "1":
            yield Broken(f"{label}: a bit is not that of the masked dense computation")
        taken[label] = int(read), [float(ns) for ns in times_ns]
    first_ns = taken[labels[0]][1]
    for label, (read, own_ns) in taken.items():
        numbers = 2 * layers * kv_heads * head_dim * (tokens + tail)
        yield {
            "prefix": label,
            "bits, with the tail": 8 * read / numbers,
            "MB a step": read / 1e6,
            "ms a step": Spread.of([ns / 1e6 for ns in own_ns]),
            "GB/s": read / min(own_ns),
            "gain": ratios(first_ns, own_ns),
        }


app = commands(__doc__, count, speed)

if __name__ == "__main__":
    app()
