"""Kernels written for AVX2, moved to the widest set here and tuned: how many times as fast as their
originals?

    python benchmarks/user_kernels.py [--only dot_q8,silu_gate] [--sizes 256,4096] [--family] [--exhaustive
    dot_f32]

For each sample and size: the C file as its author wrote it (compiled for AVX2) against the tuned
variant, in pairs of turns (tuner.timing.duel), median gain and the lower end of its 99 % interval. The
original takes part in the tuning, and is in use where no parameters are proven faster. `--family` holds
RMSNorm with quantising, raised and tuned, against the engine's own kernels. `--exhaustive` times every
choice of one sample, and says how far what the search found is from the best and how many choices it
asked for. Warm caches, one core.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

import phasewise.ir
from benchmarks.harness import Row, Yielded, commands, listed, numbers
from phasewise.ir.build import built, chosen, target_named
from phasewise.ir.original import is_original, original_of
from phasewise.ir.raising.raise_file import raise_file
from phasewise.ir.reading import read
from phasewise.ir.running import cases as drawing
from phasewise.ir.running.checking import in_folder
from phasewise.ir.running.compiling import compile_c
from phasewise.ir.running.timing import TimingProcess, library_of
from phasewise.ir.targets import TARGETS
from phasewise.ir.tunable import with_parameters
from phasewise.kerneldb.store import open_store
from phasewise.topology import core_signature, read_machine
from phasewise.tuner import timing
from phasewise.tuner.measurement_lock import NoLock
from phasewise.tuner.search.parameters import Point, most_asked, search_parameters
from phasewise.tuner.search.protocol import drive
from phasewise.workflows.report import silent
from phasewise.workflows.user_kernels.files import best_target
from phasewise.workflows.user_kernels.tune import KernelSetting, tune_user_kernel

SAMPLES = Path(phasewise.ir.__file__).parent / "samples"
OURS = Path(__file__).parent / "kernels"
FAMILIES = Path(phasewise.ir.__file__).parent.parent / "cython_kernels"
FIXED = {"attention": {"dim": 64}, "gemm_tile": {"lda": 520}}
SIZE_OF = {"attention": "tokens", "gemm_tile": "k"}
MOST = {"attention": 96, "gemm_tile": 512, "rope": 1024, "softmax": 2048}
CORE = read_machine().allowed_cores()[-1][0]


def take_of(process: TimingProcess, kernel: int) -> timing.Take:
    first = max(1, min(process.call_ns(kernel, 3, 10)) // 10)
    turn = timing.plan_turn(first)
    return lambda: tuple(
        max(1, round(loop_ns / turn.calls_a_loop))
        for loop_ns in process.call_ns(kernel, turn.loops, turn.calls_a_loop)
    )


def compared(name: str, source: Path, sizes: list[int], rival: Path | None, seconds: float) -> Iterator[Row]:
    """Tune a kernel for the sizes; a row for each."""
    text = with_parameters(raise_file(source, name, reassociate=True), str(source))
    target = target_named(best_target(text))
    variable, most = SIZE_OF.get(name, "n"), MOST.get(name, 4096)
    shapes = [
        tuple(sorted({variable: size, **FIXED.get(name, {})}.items())) for size in sizes if size <= most
    ] or [tuple(sorted({variable: most, **FIXED.get(name, {})}.items()))]
    with open_store(":memory:", silent) as store, in_folder() as folder_name:
        folder = Path(folder_name)
        author = original_of(source, read(text), target) if rival is None else None
        setting = KernelSetting(
            text, str(source), target, core_signature(read_machine()), CORE, store, NoLock(), silent, seconds,
            original=author,
        )  # fmt: skip
        outcomes = tune_user_kernel(setting, shapes)
        function = chosen(text, {})
        rng = np.random.default_rng(0)
        drawn = [drawing.draw(function, rng, dict(shape), is_plain=True) for shape in shapes]
        original = folder / "original.so"
        home = TARGETS["avx2"] if rival is None else target
        compile_c([rival or source], original, home, (f"-I{FAMILIES}",), is_library=True)
        with TimingProcess(function, drawn, folder, CORE) as process:
            old = process.load(original)
            for number, outcome in enumerate(outcomes):
                is_kept = is_original(dict(outcome.choice))
                lowered = (
                    author.file()
                    if author and is_kept
                    else built(text, dict(outcome.choice), target).file(target)
                )
                new = process.load(library_of(lowered, f"tuned{number}", folder, target))
                process.use_case(number)
                taken = timing.duel(take_of(process, old), take_of(process, new))
                comparison = timing.compare(taken)
                ns = [timing.estimate_ns(sum((pair[i] for pair in taken), ())) for i in (0, 1)]
                choice = " ".join(f"{key}={value}" for key, value in outcome.choice)
                yield {
                    "kernel": name,
                    "shape": " ".join(f"{key}={value}" for key, value in outcome.problem.shape),
                    "original ns": ns[0],
                    "tuned ns": ns[1],
                    "gain": f"{comparison.gain:.2f}",
                    "at least": f"{comparison.gain_low:.2f}",
                    "parameters": "the original" if is_kept else choice,
                    "timed": outcome.timed,
                }


def every_choice(name: str, size: int) -> str:
    """Every choice of a sample timed in turns; what the search finds of the same kernel, beside it."""
    source = SAMPLES / f"{name}.c"
    text = with_parameters(raise_file(source, name, reassociate=True), str(source))
    target = target_named(best_target(text))
    function = read(text)
    names, values = (
        [parameter.name for parameter in function.parameters],
        [parameter.values for parameter in function.parameters],
    )
    default = chosen(text, {})
    shape = {SIZE_OF.get(name, "n"): size, **FIXED.get(name, {})}
    case = drawing.draw(default, np.random.default_rng(0), shape, is_plain=True)
    with in_folder() as folder_name:
        folder = Path(folder_name)
        with TimingProcess(default, [case], folder, CORE) as process:
            process.use_case(0)
            kernels: dict[Point, timing.Take] = {}
            for number, point in enumerate(itertools.product(*values)):
                lowered = built(text, dict(zip(names, point, strict=True)), target).file(target)
                kernels[point] = take_of(
                    process, process.load(library_of(lowered, f"k{number}", folder, target))
                )
            asked: set[Point] = set()

            def timed(points: list[Point]) -> list[int]:
                asked.update(points)
                return [
                    timing.estimate_ns(samples)
                    for samples in timing.race([kernels[point] for point in points])
                ]

            winner = drive(search_parameters(values), timed)
            points = list(kernels)
            rounds = [[timing.estimate_ns(kernels[point]()) for point in points] for _ in range(7)]
            middle = np.median(np.array(rounds) / np.median(rounds, axis=1, keepdims=True), axis=0)
            finalists = [points[i] for i in np.argsort(middle)[:8]]
            if winner not in finalists:
                finalists.append(winner)
            last = np.array(
                [[timing.estimate_ns(kernels[point]()) for point in finalists] for _ in range(41)], float
            )
            settled = np.median(last / last.mean(axis=1, keepdims=True), axis=0)
    behind = settled[finalists.index(winner)] / settled.min() - 1
    return (
        f"{name} {shape}: {len(points)} choices, the search asked for {len(asked)} "
        f"({len(asked) / len(points):.0%}, at most {most_asked(values)}) and is {behind:.1%} behind the best"
    )


def user_kernels(
    only: str = "",
    sizes: str = "256,4096",
    seconds: Annotated[float, Option(help="tuning budget for each kernel")] = 25.0,
    family: Annotated[bool, Option("--family")] = False,
    exhaustive: str = "",
) -> Yielded:
    began_s = time.monotonic()
    if exhaustive:
        yield every_choice(exhaustive, numbers(sizes)[0])
        return
    if family:
        rival = OURS / "rmsnorm_q8_family.c"
        yield from compared("rmsnorm_q8", OURS / "rmsnorm_q8.c", numbers(sizes), rival, seconds)
    else:
        for name in listed(only) or sorted(path.stem for path in SAMPLES.glob("*.c")):
            yield from compared(name, SAMPLES / f"{name}.c", numbers(sizes), None, seconds)
    yield f"{core_signature(read_machine())}, core {CORE}; {time.monotonic() - began_s:.0f} s"


app = commands(__doc__, user_kernels)

if __name__ == "__main__":
    app()
