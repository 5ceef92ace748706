"""Fig. 10 of SparAMX for a model on this machine: decoding speed against quality, by method and zeros."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import Model, Rounds, Yielded, in_turns, listed, machine, note, ratios
from benchmarks.papers.ladder import Rung, speeds_of
from benchmarks.perplexity import english_text
from benchmarks.pruning_table import RECOVERED, method_options, perplexity, prune
from phasewise._files import write_file
from phasewise._words import counted
from phasewise.serving.engine.throughput import Workload
from phasewise.workflows.line_chart import Chart, Panel, draw_chart
from phasewise.workflows.opening.open_model import OpenModel, Weights, open_model

DENSE = "not pruned"
METHODS = f"magnitude,wanda,sparsegpt{RECOVERED}"


@dataclass(frozen=True)
class Quality:
    """A share of zeros by a method, and what is left of the model's answers, which no load disturbs."""

    zeros: float
    method: str
    perplexity: float

    @property
    def name(self) -> str:
        return name_of(self.zeros, self.method)


@dataclass(frozen=True)
class Point(Quality):
    """The same with its speed. over_dense: over that of the model as it was, in turns."""

    tokens_per_s: float
    over_dense: float


def name_of(zeros: float, method: str) -> str:
    return f"{method} {zeros:g}"


class KeptPoints:
    """Points in a file, all by the same settings: each when it is measured, its speed when that is."""

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self._path, self._settings = path, dict(settings)
        self._points: dict[str, Quality] = {}
        if path.exists():
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["settings"] != self._settings:
                raise SystemExit(f"{path} has points of other settings: give another --into, or remove it")
            for name, fields in told["points"].items():
                self._points[name] = Point(**fields) if "tokens_per_s" in fields else Quality(**fields)

    def take(self, zeros: float, method: str, measure: Callable[[float, str], Quality]) -> Quality:
        """The point, measured unless it is kept."""
        name = name_of(zeros, method)
        if name not in self._points:
            self._keep([measure(zeros, method)])
        return self._points[name]

    def timed(
        self, points: Sequence[Quality], measure: Callable[[Sequence[Quality]], Sequence[Point]]
    ) -> list[Point]:
        """The points with their speeds; those that have none yet are measured together."""
        speeds = {point.name: point for point in points if isinstance(point, Point)}
        missing = [point for point in points if point.name not in speeds]
        if missing:
            speeds |= {point.name: point for point in measure(missing)}
            self._keep(list(speeds.values()))
        return [speeds[point.name] for point in points]

    def _keep(self, points: Sequence[Quality]) -> None:
        self._points |= {point.name: point for point in points}
        fields = {name: asdict(point) for name, point in self._points.items()}
        write_file(self._path, json.dumps({"settings": self._settings, "points": fields}, indent=1))


@dataclass(frozen=True)
class Bench:
    """Prunes a model and measures what is left, beside the model in bf16. folder: of models not timed yet."""

    model: str
    folder: Path
    tokens: int
    calibration_tokens: int
    answer: int
    rounds: int

    def directory(self, zeros: float, method: str) -> Path:
        """The model in bf16, pruned unless it lies there already."""
        out = self.folder / name_of(zeros, method).replace(" ", "-")
        if not out.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            prune([self.model, "-o", str(out), *self._prune_options(zeros, method)])
        return out

    def _prune_options(self, zeros: float, method: str) -> list[str]:
        if method == DENSE:
            return ["--skip", "embed,lm_head,q,k,v,o,gate,up,down"]
        text, whole = self.folder / "calibrating.txt", english_text()
        text.write_text(whole[len(whole) // 2 :], encoding="utf-8")  # the first half is measured
        return ["--sparsity", f"{zeros:g}", *method_options(method, text, self.calibration_tokens)]

    def quality(self, zeros: float, method: str) -> Quality:
        note(name_of(zeros, method))
        return Quality(zeros, method, perplexity(str(self.directory(zeros, method)), self.tokens))

    def timed(self, points: Sequence[Quality]) -> list[Point]:
        """The points with their speeds: their models and the one that is not pruned decode in turns."""
        dense = name_of(0.0, DENSE)
        systems = {dense: self._opened(0.0, DENSE)}
        systems |= {point.name: self._opened(point.zeros, point.method) for point in points}
        note(f"decoding by {counted(len(systems), 'model')} in turns")
        taken = in_turns({name: partial(self._rate, opened) for name, opened in systems.items()}, self.rounds)
        return [
            Point(
                **asdict(point),
                tokens_per_s=statistics.median(taken[point.name]),
                over_dense=ratios(taken[point.name], taken[dense]).median,
            )
            for point in points
        ]

    def _opened(self, zeros: float, method: str) -> OpenModel:
        """Weights stored as `--sparse auto` chooses."""
        return open_model(str(self.directory(zeros, method)), Weights("bf16", "auto"))

    def _rate(self, opened: OpenModel) -> float:
        """Tokens/s of decoding."""
        decode = {"decode": Workload(0, self.answer, 1)}
        return speeds_of(opened, Rung("as it is", opened.plans, opened.schedules), decode)["decode"]


def picture(points: Sequence[Point], caption: str) -> str:
    """A line for each method, from the model that is not pruned on, as SVG."""
    (dense,) = (point for point in points if point.method == DENSE)
    methods = dict.fromkeys(point.method for point in points if point.method != DENSE)
    lines = {
        method: sorted((p.tokens_per_s, p.perplexity) for p in points if p.method in (DENSE, method))
        for method in methods
    }
    rates = [point.tokens_per_s for point in points]
    level = [(min(rates), dense.perplexity), (max(rates), dense.perplexity)]
    return draw_chart(
        Chart(
            title="Speed against perplexity by share of zeros",
            caption=caption,
            x_name="tokens/s of decoding, bf16",
            y_name="perplexity",
            limit_name=DENSE,
            emphasised=None,
            panels=[Panel("perplexity", lines, level)],
        )
    )


def speed_accuracy(
    model: Model,
    into: Annotated[Path, Option(help="folder of points.json and of the pictures")] = Path("speed-accuracy"),
    zeros: Annotated[str, Option(help="shares of zeros")] = "0.3,0.5,0.6,0.7",
    methods: Annotated[str, Option(help="of prune; +recover fits what is kept")] = METHODS,
    tokens: Annotated[int, Option(help="of the text")] = 4096,
    calibration_tokens: int = 8192,
    answer: Annotated[int, Option(help="tokens that are decoded")] = 64,
    rounds: Rounds = 5,
    speeds: Annotated[bool, Option(help="no: end before them; the same command measures them later")] = True,
) -> Yielded:
    """Decoding speed against perplexity.

        python benchmarks/figures.py speed-accuracy MODEL --into FOLDER --no-speeds
        python benchmarks/figures.py speed-accuracy MODEL --into FOLDER

    The model in bf16, then each method at each share of zeros: first what is left of its answers, point by
    point, which other work on the machine only delays, and then, on a quiet machine, the speeds of all models
    in turns. Points are kept in FOLDER/points.json when they are measured, so that the command can be
    interrupted and given again; points of other settings, or of another machine, are refused. FOLDER/models
    has the models until their speeds are measured. The picture is FOLDER/perplexity.svg. Of the
    text of pruning_table.py the first tokens are measured, and the second half calibrates.
    """
    settings = {"model": model, "machine": machine(), "tokens": tokens}
    settings |= {"calibration tokens": calibration_tokens, "answer": answer, "rounds": rounds}
    into.mkdir(parents=True, exist_ok=True)
    kept, models = KeptPoints(into / "points.json", settings), into / "models"
    bench = Bench(model, models, tokens, calibration_tokens, answer, rounds)
    pairs = [(0.0, DENSE)] + [(float(share), name) for share in listed(zeros) for name in listed(methods)]
    qualities = [kept.take(share, method, bench.quality) for share, method in pairs]
    if not speeds:
        yield from map(asdict, qualities)
        yield "the same command without --no-speeds measures the speeds, in turns"
        return
    points = kept.timed(qualities, bench.timed)
    shutil.rmtree(models, ignore_errors=True)
    yield from map(asdict, points)
    caption = f"{Path(model).name}; zeros {zeros}"
    drawn = into / "perplexity.svg"
    drawn.write_text(picture(points, caption), encoding="utf-8")
    yield f"drawn: {drawn}"
