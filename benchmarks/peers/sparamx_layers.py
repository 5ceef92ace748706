r"""SparAMX's own layers of bf16, dense and sparse, beside torch's; weights are read anew for each call.

    TORCH_PYTHON benchmarks/peers/sparamx_layers.py CHECKOUT --zeros 0.5 --rows 1,16
    phasewise bench kernels --threads 2 --format bf16 --m 1,16 --density 1,.5 \
        --shape "4096,4096;1024,4096;14336,4096;4096,14336"

CHECKOUT is a folder with IntelLabs/Hardware-Aware-Automated-Machine-Learning. TORCH_PYTHON has torch and what
that repository installs, the package `sparamx`, whose kernels need a CPU with AMX. Their results are held
against exact products before they are timed. The second command is ours, for the same minutes.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "SparAMX"
REPOSITORY = "IntelLabs/Hardware-Aware-Automated-Machine-Learning"
MODULES = ("layer.dense_linear", "layer.sparse_linear")
NEEDED_FLAGS = ("amx_tile", "amx_bf16")
SHAPES = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
}
COLD_BYTES = 192 << 20
TILE_ROWS = 16
PAIR_COLUMNS = 32
"""Columns of two tiles, which their sparse kernel multiplies together."""
MOST_ERROR = 0.01
BASELINE = "torch bf16"
BETWEEN_TURNS_S = 0.005
"""For the threads of the one before to stop spinning."""


# ---- what is refused -------------------------------------------------------------------------------------


def obstacle(checkout: Path, cpu_flags: Set[str]) -> str | None:
    """The first reason for which their kernels cannot run, as one line."""
    for module in MODULES:
        path = checkout / FOLDER / f"{module.replace('.', '/')}.py"
        if not path.is_file():
            return f"{path} is missing: CHECKOUT is a folder with {REPOSITORY}"
    lacking = [flag for flag in NEEDED_FLAGS if flag not in cpu_flags]
    if lacking:
        return f"this CPU has no {' and no '.join(lacking)}: SparAMX's kernels need AMX"
    return None


def unfit(options: argparse.Namespace) -> str | None:
    """The first option that their layers have no form for, as one line."""
    if not 0 <= options.zeros < 1 or options.rounds < 1 or options.threads < 1:
        return "--zeros from 0 to below 1, --rounds and --threads of at least 1 are expected"
    for m in options.rows:
        if m < 1 or (m > TILE_ROWS and m % TILE_ROWS):
            return f"--rows {m}: their tiles take 1 to {TILE_ROWS} rows, or a multiple of {TILE_ROWS}"
    for name in options.shapes:
        if name not in SHAPES:
            return f"--shapes {name}: not one of {', '.join(SHAPES)}"
        pairs = SHAPES[name][0] // PAIR_COLUMNS
        if pairs % options.threads:
            return f"--threads {options.threads}: the {pairs} pairs of tiles of {name} are no multiple of it"
    return None


def flags_of_this_cpu() -> set[str]:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def their_layers(checkout: Path) -> tuple[Any, Any]:
    """Their classes, dense and sparse; SystemExit with one line where the interpreter lacks something."""
    sys.path.insert(0, str(checkout / FOLDER))
    try:
        dense, sparse = map(importlib.import_module, MODULES)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise SystemExit(f"{sys.executable} cannot load SparAMX's layers: {reason}") from None
    return dense.DenseLinear, sparse.SparseLinear


# ---- what is timed ---------------------------------------------------------------------------------------


class Contestant(NamedTuple):
    """Copies of a layer take turns. Together they are larger than every cache."""

    copies: Sequence[Callable[[Any], Any]]
    n_bytes: int  # of the weight of one copy
    dimensions: int  # of the rows that it takes

    @classmethod
    def of(cls, layer: Any, n_bytes: int, dimensions: int = 2) -> Contestant:
        n_copies = max(2, -(-COLD_BYTES // n_bytes))
        return cls([copy.deepcopy(layer) for _ in range(n_copies)], n_bytes, dimensions)

    def calls(self, x: Any) -> list[Callable[[], Any]]:
        rows = x.reshape((1,) * (self.dimensions - 2) + x.shape)
        return [lambda layer=layer: layer(rows) for layer in self.copies]  # type: ignore[misc]


def contestants(linear: Any, classes: tuple[Any, Any], threads: int) -> dict[str, Contestant]:
    """torch's layer, then theirs with the same weight."""
    dense, sparse = classes
    packed = sparse.from_linear(linear, num_threads=threads)
    packed_bytes = packed.weight_metadata.nbytes + packed.weight_values.nbytes
    return {
        BASELINE: Contestant.of(linear, linear.weight.nbytes),
        "SparAMX dense": Contestant.of(dense.from_linear(linear), linear.weight.nbytes),
        "SparAMX sparse": Contestant.of(packed, packed_bytes, dimensions=3),
    }


def check(calls_of: Mapping[str, list[Callable[[], Any]]], exact: Any) -> None:
    """SystemExit if a contestant's result is not the product."""
    for what, calls in calls_of.items():
        off = float((calls[0]().float().reshape(exact.shape) - exact).norm() / exact.norm())
        if not off < MOST_ERROR:
            raise SystemExit(f"{what}: results are {100 * off:.2g} % off, so nothing is timed")


def medians_s(calls_of: Mapping[str, list[Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Median seconds of a call. All take turns in alternating order, each copy once in a turn."""
    taken: dict[str, list[float]] = {what: [] for what in calls_of}
    for number in range(-1, rounds):
        for what in list(calls_of) if number % 2 == 0 else [*calls_of][::-1]:
            time.sleep(BETWEEN_TURNS_S)
            for call in calls_of[what]:
                began = time.perf_counter()
                call()
                if number >= 0:
                    taken[what].append(time.perf_counter() - began)
    return {what: statistics.median(seconds) for what, seconds in taken.items()}


def figures(name: str, classes: tuple[Any, Any], options: argparse.Namespace) -> Iterator[str]:
    """Lines of a Markdown table."""
    import torch

    n, k = SHAPES[name]
    torch.manual_seed(0)
    linear = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    linear.weight[torch.rand(n, k) < options.zeros] = 0
    contested = contestants(linear, classes, options.threads)
    for m in options.rows:
        x = torch.randn(m, k, dtype=torch.bfloat16)
        calls_of = {what: contestant.calls(x) for what, contestant in contested.items()}
        check(calls_of, x.float() @ linear.weight.float().T)
        seconds = medians_s(calls_of, options.rounds)
        for what, (_, n_bytes, _) in contested.items():
            gain = seconds[BASELINE] / seconds[what]
            rate = n_bytes / seconds[what] / 1e9
            yield f"| {name} | {m} | {what} | {1e6 * seconds[what]:.0f} | {rate:.1f} | {gain:.2f} |"


# ---- the command line ------------------------------------------------------------------------------------


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--zeros", type=float, default=0.5, help="share of the weights")
    parser.add_argument("--rows", type=numbers, default=[1, 16], help="of each product")
    parser.add_argument("--shapes", type=names, default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def names(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    options = options_of()
    if reason := unfit(options) or obstacle(options.checkout, flags_of_this_cpu()):
        raise SystemExit(reason)
    # Before torch is loaded: their kernels can have an OpenMP of their own, which torch does not set.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    classes = their_layers(options.checkout)

    import torch

    torch.set_num_threads(options.threads)
    print("| layer | rows | what | us | GB/s | over torch bf16 |\n|---|---|---|---|---|---|", flush=True)
    with torch.no_grad():
        for name in options.shapes:
            for line in figures(name, classes, options):
                print(line, flush=True)


if __name__ == "__main__":
    main()
