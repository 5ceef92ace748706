"""Hints for a wheel: the products of twenty common models, tuned on this machine and compressed.

    python benchmarks/hints.py kerneldb/shipped_figures/intel-6-207-2-threads.jsonl.gz --budget 7200
    make hints NAME=intel-6-207-2-threads BUDGET=7200

Weights are those of Q4_K_M files: q4_k, and q6_k for half of the values and of the last matrices, and for the
head. A machine whose other processes take more than a tenth of its cores is refused: `--busy` keeps its
timings all the same, each of which says so in its conditions. --db goes on with an earlier run; with
--budget 0 as well it writes what that found.
"""

from __future__ import annotations

import gzip
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from benchmarks.harness import Broken, Yielded, commands, note
from phasewise.kerneldb.portable import export_lines, in_use_groups
from phasewise.kerneldb.records import Measurement
from phasewise.kerneldb.store import open_store
from phasewise.topology import core_signature, read_machine

MOST_BYTES = 250_000
"""The most of one file: a wheel has three or four files."""
MOST_OTHERS = 0.1
"""Share of the cores that other processes may take, in the median of timings."""
ROWS = 16
"""Most rows of a product: those of decoding together. More are tuned on the machine itself."""


@dataclass(frozen=True)
class Sizes:
    """Of a layer: inputs, outputs of query, of key and of value, hidden units; and the vocabulary."""

    hidden: int
    query: int
    kv: int
    inner: int
    vocabulary: int

    def products(self) -> Iterator[tuple[str, int, int]]:
        """Format, outputs and inputs, as the engine multiplies: weights of one input and format are one."""
        yield "q4_k", self.query + 2 * self.kv, self.hidden
        yield "q4_k", self.query + self.kv, self.hidden
        yield "q6_k", self.kv, self.hidden
        yield "q4_k", self.hidden, self.query
        yield "q4_k", 2 * self.inner, self.hidden
        yield "q4_k", self.hidden, self.inner
        yield "q6_k", self.hidden, self.inner
        yield "q6_k", self.vocabulary, self.hidden


MODELS = {
    "SmolLM2 1.7B": Sizes(2048, 2048, 2048, 8192, 49152),
    "TinyLlama 1.1B": Sizes(2048, 2048, 256, 5632, 32000),
    "Llama 3.2 1B": Sizes(2048, 2048, 512, 8192, 128256),
    "Llama 3.2 3B": Sizes(3072, 3072, 1024, 8192, 128256),
    "Llama 3.1 8B": Sizes(4096, 4096, 1024, 14336, 128256),
    "Mistral 7B 0.3": Sizes(4096, 4096, 1024, 14336, 32768),
    "Mistral Nemo 12B": Sizes(5120, 4096, 1024, 14336, 131072),
    "Qwen 2.5 1.5B": Sizes(1536, 1536, 256, 8960, 151936),
    "Qwen 2.5 3B": Sizes(2048, 2048, 256, 11008, 151936),
    "Qwen 2.5 7B": Sizes(3584, 3584, 512, 18944, 152064),
    "Qwen 2.5 14B": Sizes(5120, 5120, 1024, 13824, 152064),
    "Qwen 3 0.6B": Sizes(1024, 2048, 1024, 3072, 151936),
    "Qwen 3 1.7B": Sizes(2048, 2048, 1024, 6144, 151936),
    "Qwen 3 4B": Sizes(2560, 4096, 1024, 9728, 151936),
    "Qwen 3 8B": Sizes(4096, 4096, 1024, 12288, 151936),
    "Gemma 2 2B": Sizes(2304, 2048, 1024, 9216, 256000),
    "Gemma 2 9B": Sizes(3584, 4096, 2048, 14336, 256000),
    "Phi 3.5 mini": Sizes(3072, 3072, 3072, 8192, 32064),
    "Phi 4": Sizes(5120, 5120, 1280, 17920, 100352),
    "Granite 3.1 2B": Sizes(2048, 2048, 512, 8192, 49155),
}


def hints(
    file: Annotated[Path, Argument()],
    budget: Annotated[float, Option(help="seconds of tuning")] = 7200.0,
    models: Annotated[int, Option(help="the first so many of the twenty")] = len(MODELS),
    busy: Annotated[bool, Option("--busy")] = False,
    db: Annotated[str | None, Option(help="a database that stays")] = None,
) -> Yielded:
    products = dict.fromkeys(product for sizes in [*MODELS.values()][:models] for product in sizes.products())
    formats = list(dict.fromkeys(name for name, _, _ in products))
    with tempfile.TemporaryDirectory() as folder:
        own = db or str(Path(folder) / "hints.db")
        total = sum(n * k for _, n, k in products)
        for name in formats:
            shapes = [(n, k) for of, n, k in products if of == name]
            share_s = budget * sum(n * k for n, k in shapes) / total
            if share_s:
                note(f"{name}: {len(shapes)} shapes, {share_s:.0f} s")
                _tune(name, shapes, share_s, own)
        yield from _written(file, own, products, busy)


def _tune(name: str, shapes: list[tuple[int, int]], seconds: float, db: str) -> None:
    asked = ";".join(f"{n},{k}" for n, k in shapes)
    options = ["--shapes", asked, "--format", name, "--max-m", str(ROWS), "--budget", f"{seconds:.0f}s"]
    subprocess.run(
        [sys.executable, "-m", "phasewise", "tune-kernels", *options, "--db", db],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _written(file: Path, db: str, products: dict[tuple[str, int, int], None], busy: bool) -> Yielded:
    core = core_signature(read_machine())
    with open_store(db, note) as store:
        groups = in_use_groups(store, lambda machine: machine.core_sig == core, also=())
        timings = [row for group in groups for row in group if isinstance(row, Measurement)]
    if not timings:
        yield Broken("not written: the database has no schedule in use for such cores")
        return
    others = statistics.median(row.sample.conditions.get("others", 0.0) for row in timings)
    content = gzip.compress("".join(export_lines([timings])).encode("ascii"), 9, mtime=0)
    timed = {(row.problem.format, row.problem.n, row.problem.k) for row in timings}
    yield {
        "shapes": f"{len(timed & products.keys())} of {len(products)}",
        "schedules": len(timings),
        "bytes": len(content),
        "others took, median": f"{others:.2f}",
    }
    if len(content) > MOST_BYTES:
        yield Broken(f"not written: the most is {MOST_BYTES} bytes; tune fewer --models")
    elif others > MOST_OTHERS and not busy:
        yield Broken(f"not written: other processes took {others:.0%} of the cores; see --busy")
    else:
        file.write_bytes(content)
        yield f"written: {file}"


app = commands(__doc__, hints)

if __name__ == "__main__":
    app()
