"""Sparse weights of four bits (SQFT's form): bytes and speed of a prototype, and their quality.

    python benchmarks/sparse_int4.py speed --zeros 0.5,0.7
    python benchmarks/sparse_int4.py quality smollm2-135m-instruct

The prototype is `kernels/sparse_int4.c`: symmetric groups of 32, a bit for each weight and four for each that
is kept, on one core with AVX-512 VBMI2 and VNNI. Nothing of the product loads it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Option

from benchmarks.harness import Broken, Model, Yielded, commands, listed
from benchmarks.perplexity import english_text
from benchmarks.pruning_table import perplexity, prune

SOURCE = Path(__file__).with_name("kernels") / "sparse_int4.c"
SETS = ("avx512f", "avx512bw", "avx512vl", "avx512vbmi2", "avx512vnni", "f16c", "fma", "popcnt")
FLAGS = ("-O3", "-std=gnu11", *(f"-m{name}" for name in SETS))
GROUP = 32
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def speed(
    zeros: Annotated[str, Option(help="shares of zeros")] = "0.5,0.7",
    k: Annotated[int, Option(help="inputs")] = 4096,
    pool_mib: Annotated[int, Option(help="of weights that are read from memory")] = 1024,
    calls: int = 5,
) -> Yielded:
    """Bits a weight and nanoseconds for 64 weights, dense and sparse, from memory and from the caches.

    The last column: below this rate of one core's reads, bytes decide and not the expansion.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "sparse_int4")
        subprocess.run(["cc", *FLAGS, "-o", str(program), str(SOURCE)], check=True)
        for share in listed(zeros):
            taken = subprocess.run(
                [str(program), str(k), share, str(pool_mib), str(calls)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            equal, dense_bits, bits, dense_ns, sparse_ns, dense_cached_ns, cached_ns = map(float, taken)
            if not equal:
                yield Broken(f"{share} zeros: the results are not equal in every bit")
            yield {
                "zeros": share,
                "bits, dense": dense_bits,
                "bits": bits,
                "bytes gain at most": dense_bits / bits,
                "from memory, dense ns": dense_ns,
                "ns": sparse_ns,
                "gain": dense_ns / sparse_ns,
                "from caches, dense ns": dense_cached_ns,
                "ns, cached": cached_ns,
                "GB/s of a core": 8 * bits / cached_ns,
            }


# ---- quality ---------------------------------------------------------------------------------------------


def rounded(weights: np.ndarray, bits: int) -> np.ndarray:
    """Symmetric groups of 32 of a row's inputs, each with a scale of its own; zeros stay zeros."""
    groups = weights.reshape(len(weights), -1, GROUP)
    most = 2 ** (bits - 1) - 1
    scale = np.abs(groups).max(axis=2, keepdims=True) / most
    steps = np.rint(np.divide(groups, scale, out=np.zeros_like(groups), where=scale > 0))
    return (steps * scale.astype(np.float16).astype(np.float32)).reshape(weights.shape)


def round_linear_layers(folder: Path, bits: int) -> None:
    """Overwrites the linear layers of a bf16 directory by what they are in so many bits."""
    for path in sorted(folder.glob("*.safetensors")):
        raw = bytearray(path.read_bytes())
        length = int.from_bytes(raw[:8], "little")
        table: dict[str, Any] = json.loads(raw[8 : 8 + length])
        for name, entry in table.items():
            if name.removesuffix(".weight").rpartition(".")[2] in LINEAR and entry["dtype"] == "BF16":
                first, end = (8 + length + offset for offset in entry["data_offsets"])
                words = np.frombuffer(raw, np.uint16, count=(end - first) // 2, offset=first)
                weights = (words.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
                bits32 = rounded(weights, bits).view(np.uint32).astype(np.uint64)
                words[:] = ((bits32 + 0x7FFF + (bits32 >> 16 & 1)) >> 16).ravel()
        path.write_bytes(raw)


def quality(
    model: Model,
    zeros: str = "0.5",
    tokens: int = 4096,
    calibration_tokens: int = 8192,
) -> Yielded:
    """Perplexity of sparse int4 beside dense formats of as many bits, all linear layers in groups of 32."""
    text = english_text()
    with tempfile.TemporaryDirectory() as name:
        calibrating = Path(name, "calibrating.txt")
        calibrating.write_text(text[len(text) // 2 :], encoding="utf-8")
        dense, sparse = Path(name, "dense"), Path(name, "sparse")
        prune([model, "-o", str(dense), "--skip", "embed,lm_head,q,k,v,o,gate,up,down"])
        arguments = ["--sparsity", zeros, "--method", "sparsegpt", "--calibration", str(calibrating)]
        arguments += ["--calibration-tokens", str(calibration_tokens)]
        prune([model, "-o", str(sparse), *arguments])
        kept = 1 - float(zeros)
        yield {"linear layers": "as they are", "bits": 16.0, "perplexity": perplexity(str(dense), tokens)}
        for label, folder, bits, stored_bits in (
            ("int4", dense, 4, 4.5),
            ("int3", dense, 3, 3.5),
            (f"int4, {zeros} zeros", sparse, 4, 1 + 4 * kept + 0.5),
        ):
            copied = Path(name, "rounded")
            shutil.copytree(folder, copied)
            round_linear_layers(copied, bits)
            yield {"linear layers": label, "bits": stored_bits, "perplexity": perplexity(str(copied), tokens)}
            shutil.rmtree(copied)


app = commands(__doc__, speed, quality)

if __name__ == "__main__":
    app()
