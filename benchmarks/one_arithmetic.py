"""The price of one arithmetic on every instruction set: a table by instruction set and format.

    python benchmarks/one_arithmetic.py --before CHECKOUT --save one_arithmetic.json
    python benchmarks/one_arithmetic.py --model FILE.Q4_K_M.gguf --format native --isa avx2,avx512_vnni

Prefill of 64 and of 512 tokens, and decode of one sequence, each in turns with another commit of phasewise
that was built in CHECKOUT (with a .venv, as `make build` leaves it): a process for each, and one sleeps
while the other is timed. `price` is the time of this commit over that of the other, round by round, less 1:
median, least and most. Decode is of 16 tokens, a step of one row each.

Where bf16 weights have dots of 16 bits, a row of `canonical` sets `--arithmetic canonical` of this commit
beside its default. Without --before, rates stand alone elsewhere.

Nothing tuned is used: both sides run by the defaults of their builds. Instruction sets are those that both
builds have and this machine runs, without portable C (`--isa portable` takes it). The whole ends within
about --budget: each part (a model in a format on an instruction set) has an equal share of what is left, at
least two rounds of each test and at most --rounds; parts that found no time are named. `--save` writes the
rows as JSON, beside the table; `--json` prints them so instead.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.compare import PAUSE_S, Engine, Test, ours
from benchmarks.harness import MODEL, Rounds, Row, Spread, Threads, Yielded, commands, listed, note, ratios
from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import compute_paths

FORMATS = "native,int8,int4,f32,bf16"
TESTS = "prefill 64,prefill 512,decode 16"
LEAST_ROUNDS = 2
USABLE = "from phasewise.cython_kernels import isa; print(*isa.usable())"


def one_arithmetic(
    models: Annotated[list[str] | None, Option("--model", help="a known name or a file")] = None,
    before: Annotated[Path | None, Option(metavar="CHECKOUT", help="another commit, built there")] = None,
    isas: Annotated[str, Option("--isa", help="with commas [default: all but portable]")] = "",
    formats: Annotated[str, Option("--format", help="of weights, with commas")] = FORMATS,
    tests: Annotated[str, Option(help="with commas between them")] = TESTS,
    threads: Threads = 2,
    rounds: Rounds = 9,
    budget_s: Annotated[float, Option("--budget", min=1, metavar="SECONDS", help="of all of it")] = 660.0,
    save: Annotated[Path | None, Option(metavar="FILE", help="write the rows there as JSON too")] = None,
) -> Yielded:
    until_s, rows = time.monotonic() + budget_s, list[Row]()
    names = _instruction_sets(isas, before)
    parts = [Part(*fields) for fields in itertools.product(models or [MODEL], names, listed(formats))]
    asked = [Test.parse(text) for text in listed(tests)]
    with tempfile.TemporaryDirectory(prefix="pw-") as empty, _environment(XDG_DATA_HOME=empty):
        for index, part in enumerate(parts):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                yield f"no time was left for {part}"
                continue
            note(f"{part}, {left_s:.0f} s left")
            engines = part.opened(before, threads)
            try:
                for row in part.rows(
                    engines, asked, rounds, time.monotonic() + left_s / (len(parts) - index)
                ):
                    rows.append(row)
                    yield row
            finally:
                for engine in engines.values():
                    engine.close()
    if save is not None:
        save.write_text(json.dumps(rows, default=vars, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Part:
    """A model in a format on an instruction set."""

    model: str
    isa: str
    weight_format: str

    def __str__(self) -> str:
        return f"{Path(self.model).name} in {self.weight_format} on {self.isa}"

    def opened(self, before: Path | None, threads: int) -> dict[str, Engine]:
        """This commit, the other one, and `canonical` where it is another arithmetic."""
        engines: dict[str, Engine] = {}
        with _environment(PHASEWISE_ISA=self.isa):
            if before is not None:
                engines["before"] = ours(before, self.model, threads, self.weight_format)
            engines["now"] = ours(None, self.model, threads, self.weight_format)
            if self.weight_format == "bf16" and _has_own_dots(self.isa):
                engines["canonical"] = ours(None, self.model, threads, "bf16:auto:canonical")
        return engines

    def rows(
        self, engines: Mapping[str, Engine], tests: Sequence[Test], rounds: int, until_s: float
    ) -> Iterator[Row]:
        """The rows of each test."""
        what = {"model": Path(self.model).name, "isa": self.isa, "format": self.weight_format}
        for index, test in enumerate(tests):
            share_s = (until_s - time.monotonic()) / (len(tests) - index)
            turns = {label: _turn(engine, test) for label, engine in engines.items()}
            yield from _rows(what, test, timed_turns(turns, rounds, share_s))


def _instruction_sets(asked: str, before: Path | None) -> Sequence[str]:
    here = isa.usable()
    if before is not None:
        python = [str((before / ".venv/bin/python").absolute()), "-c", USABLE]
        told = subprocess.run(python, cwd=before, capture_output=True, text=True, check=False)
        if told.returncode:
            raise SystemExit(f"{before} does not run: --before names a checkout after `make build`")
        here = tuple(name for name in here if name in told.stdout.split())
    wanted = listed(asked) or [name for name in here if name != "portable"]
    if missing := [name for name in wanted if name not in here]:
        raise SystemExit(
            f"{', '.join(missing)} cannot be timed: of both builds this machine has {', '.join(here)}"
        )
    return wanted


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Variables of processes that start meanwhile."""
    kept = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _has_own_dots(name: str) -> bool:
    with isa.using(name):
        return bool(compute_paths("bf16", 0)[0] != "fma")


def _turn(engine: Engine, test: Test) -> Callable[[], float]:
    def take() -> float:
        time.sleep(PAUSE_S)
        return engine.rate(test)

    return take


def timed_turns(
    systems: Mapping[str, Callable[[], float]], rounds: int, share_s: float
) -> dict[str, list[float]]:
    """As `harness.in_turns`, after a warm-up, until the rounds are done or the share of time is."""
    taken: dict[str, list[float]] = {name: [] for name in systems}
    began_s = time.monotonic()
    for number in range(-1, rounds):
        if number >= LEAST_ROUNDS and time.monotonic() - began_s >= share_s:
            break
        for name in list(systems) if number % 2 == 0 else [*systems][::-1]:
            rate = systems[name]()
            if number >= 0:
                taken[name].append(rate)
    return taken


def _rows(what: Row, test: Test, rates: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    """Of the other commit beside this one, and of `canonical` beside the default; of none, rates alone."""
    pairs = [("before", "now")] if "before" in rates else []
    pairs += [("now", "canonical")] if "canonical" in rates else []
    for base, other in pairs or [("", "now")]:
        beside = rates.get(base)
        yield {
            **what,
            "test": test.name,
            "beside": base,
            "of": other,
            "tokens/s beside": None if beside is None else Spread.of(beside),
            "tokens/s": Spread.of(rates[other]),
            "price": None if beside is None else _less_one(ratios(beside, rates[other])),
            "rounds": len(rates[other]),
        }


def _less_one(ratio: Spread) -> Spread:
    return Spread(ratio.median - 1, ratio.least - 1, ratio.most - 1)


app = commands(__doc__, one_arithmetic)

if __name__ == "__main__":
    app()
