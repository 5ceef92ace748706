"""The parts that benchmarks share: the command line, turns, medians and spread, the machine, forms of output.

A benchmark is a function whose parameters are its options. It yields rows (mappings from column to value) and
remarks (text). `commands` runs it: rows are printed as Markdown as they come, or together as JSON (`--json`).
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from phasewise._version import SCHEMA_VERSION

MODEL = "smollm2-135m-instruct"

Row = Mapping[str, object]
Yielded = Iterable[Row | str]
Measure = Callable[..., Yielded]
T = TypeVar("T")

Rounds = Annotated[int, typer.Option("-r", "--rounds", min=1, help="turns of each contestant")]
Threads = Annotated[int, typer.Option("-t", "--threads", min=1, help="cores to use")]
Model = Annotated[str, typer.Argument(help="a known name, a GGUF file or a Hugging Face directory")]


class Broken(str):
    """A remark that something does not hold; the exit code is 1 then."""


@dataclass(frozen=True)
class Spread:
    """Median, least and largest of the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{shown(self.median)} ({shown(self.least)} to {shown(self.most)})"


def in_turns(
    systems: Mapping[str, Callable[[], T]], rounds: int, *, warm_ups: int = 1, pause_s: float = 0.005
) -> dict[str, list[T]]:
    """Run each system once a round, in alternating order, so that a drift of the machine meets all.

    pause_s: lets the threads of the one before stop spinning.
    """
    taken: dict[str, list[T]] = {name: [] for name in systems}
    for number in range(-warm_ups, rounds):
        for name in list(systems) if number % 2 == 0 else [*systems][::-1]:
            time.sleep(pause_s)
            given = systems[name]()
            if number >= 0:
                taken[name].append(given)
    return taken


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Ratio of two systems, round by round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def seconds_of(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def listed(text: str) -> list[str]:
    """The parts of a text with commas."""
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    return [int(part) for part in listed(text)]


def shapes(text: str) -> list[tuple[int, int]]:
    """`n,k;n,k;..`"""
    pairs = (part.split(",") for part in text.split(";"))
    return [(int(n), int(k)) for n, k in pairs]


def cores_of(threads: int) -> list[int]:
    """The first allowed CPUs."""
    return sorted(os.sched_getaffinity(0))[:threads]


def note(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """The machine and the program that the figures are of."""
    from phasewise.cython_kernels import isa
    from phasewise.topology import core_signature, read_machine

    cpus = sorted(os.sched_getaffinity(0))
    return {"core": core_signature(read_machine()), "isa": isa.active(), "cpus": cpus}


# ---- rows ------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """A cell of a table: three figures, or all whole ones."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "/")


class _Table:
    """Rows as Markdown, as they come; other columns begin another table."""

    def __init__(self) -> None:
        self._columns: tuple[str, ...] = ()

    def add(self, row: Row) -> None:
        if tuple(row) != self._columns:
            print(f"\n| {' | '.join(row)} |" if self._columns else f"| {' | '.join(row)} |")
            print("|---" * len(row) + "|")
            self._columns = tuple(row)
        print(f"| {' | '.join(map(shown, row.values()))} |", flush=True)


def _plain(value: object) -> object:
    """For JSON: what is none of its types."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def show(yielded: Yielded, *, as_json: bool) -> int:
    """Print rows and remarks; the exit code."""
    rows: list[Row] = []
    remarks: list[str] = []
    table = _Table()
    for part in yielded:
        if isinstance(part, str):
            remarks.append(part)
            print(part, file=sys.stderr if as_json else None, flush=True)
        else:
            rows.append(part)
            if not as_json:
                table.add(part)
    if as_json:
        said = {"schema_version": SCHEMA_VERSION, "machine": machine(), "rows": rows, "remarks": remarks}
        print(json.dumps(said, default=_plain))
    return int(any(isinstance(remark, Broken) for remark in remarks))


# ---- the command line ------------------------------------------------------------------------------------


def command_of(measure: Measure) -> Callable[..., None]:
    """The function that typer calls: the benchmark's parameters, and `--json`."""
    hints = get_type_hints(measure, include_extras=True)
    given = inspect.signature(measure).parameters.values()
    parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in given]
    form = Annotated[
        bool, typer.Option("--json", help="one JSON object: schema_version, machine, rows, remarks")
    ]
    last = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=form)

    def run(as_json: bool, **options: Any) -> None:
        raise typer.Exit(show(measure(**options), as_json=as_json))

    run.__signature__ = inspect.Signature([*parameters, last])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*parameters, last)}
    run.__name__ = measure.__name__
    return run


def commands(doc: str | None, *measures: Measure) -> typer.Typer:
    """A program of one benchmark, or of several that its first argument chooses from."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    text = _verbatim(doc or "")
    if len(measures) > 1:
        app.callback(help=text, no_args_is_help=True)(lambda: None)
    for measure in measures:
        own = text if len(measures) == 1 else _verbatim(inspect.getdoc(measure) or "")
        app.command(measure.__name__.replace("_", "-"), help=own)(command_of(measure))
    return app


def _verbatim(text: str) -> str:
    """Help whose lines stay as they are."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip().split("\n\n"))
