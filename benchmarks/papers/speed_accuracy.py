"""Fig. 10 of SparAMX for a model on this machine: decoding speed against quality, by method and zeros."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from benchmarks.harness import Model, Rounds, Yielded, in_turns, listed, machine, note, ratios
from benchmarks.papers.ladder import Rung, speeds_of
from benchmarks.perplexity import english_text
from benchmarks.pruning_table import RECOVERED, method_options, perplexity, prune
from phasewise._files import write_file
from phasewise.serving.engine.throughput import Workload
from phasewise.workflows.evaluate.run import evaluate
from phasewise.workflows.evaluate.settings import EvalSettings
from phasewise.workflows.line_chart import Chart, Panel, draw_chart
from phasewise.workflows.opening.open_model import Weights, open_model

DENSE = "not pruned"
METHODS = f"magnitude,wanda,sparsegpt{RECOVERED}"


@dataclass(frozen=True)
class Point:
    """A share of zeros by a method. over_dense: its speed over that of the model as it was, in turns."""

    zeros: float
    method: str
    tokens_per_s: float
    over_dense: float
    perplexity: float
    accuracy: float | None


class KeptPoints:
    """Points in a file, each written when it is measured, all by the same settings."""

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self._path, self._settings = path, dict(settings)
        self._points: dict[str, Point] = {}
        if path.exists():
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["settings"] != self._settings:
                raise SystemExit(f"{path} has points of other settings: give another --into, or remove it")
            self._points = {name: Point(**fields) for name, fields in told["points"].items()}

    def take(self, zeros: float, method: str, measure: Callable[[float, str], Point]) -> Point:
        """The point, measured unless it is kept."""
        name = f"{method} {zeros:g}"
        if name not in self._points:
            self._points[name] = measure(zeros, method)
            points = {key: asdict(point) for key, point in self._points.items()}
            text = json.dumps({"settings": self._settings, "points": points}, indent=1)
            write_file(self._path, text)
        return self._points[name]


@dataclass(frozen=True)
class Bench:
    """Prunes a model and measures what is left, beside the model in bf16."""

    model: str
    folder: Path
    choices: Sequence[Path]
    questions: int | None
    tokens: int
    calibration_tokens: int
    answer: int
    rounds: int

    def dense(self) -> Path:
        """The model as a directory in bf16."""
        out = self.folder / "dense"
        if not out.exists():
            prune([self.model, "-o", str(out), "--skip", "embed,lm_head,q,k,v,o,gate,up,down"])
        return out

    def pruned(self, zeros: float, method: str) -> Path:
        out, text = self.folder / f"{method}-{zeros:g}", self.folder / "calibrating.txt"
        whole = english_text()
        text.write_text(whole[len(whole) // 2 :], encoding="utf-8")  # the first half is measured
        options = method_options(method, text, self.calibration_tokens)
        prune([self.model, "-o", str(out), "--sparsity", f"{zeros:g}", *options])
        return out

    def measure(self, zeros: float, method: str) -> Point:
        note(f"{method} {zeros:g}")
        directory = self.dense() if method == DENSE else self.pruned(zeros, method)
        systems = {name: str(path) for name, path in ((DENSE, self.dense()), (method, directory))}
        taken = in_turns({name: partial(self._rate, path) for name, path in systems.items()}, self.rounds)
        point = Point(
            zeros,
            method,
            statistics.median(taken[method]),
            ratios(taken[method], taken[DENSE]).median,
            perplexity(str(directory), self.tokens),
            self._accuracy(str(directory)),
        )
        if method != DENSE:
            shutil.rmtree(directory)
        return point

    def _rate(self, directory: str) -> float:
        """Tokens/s of decoding, weights stored as `--sparse auto` chooses."""
        opened = open_model(directory, Weights("bf16", "auto"))
        decode = {"decode": Workload(0, self.answer, 1)}
        return speeds_of(opened, Rung("as it is", opened.plans, opened.schedules), decode)["decode"]

    def _accuracy(self, directory: str) -> float | None:
        """The share of all questions that are answered rightly."""
        if not self.choices:
            return None
        settings = EvalSettings(
            choices=list(self.choices), questions=self.questions, weight_format="bf16", sparse="never"
        )
        told = [figures.accuracy for figures in evaluate(directory, settings).choices]
        right = sum(accuracy.accuracy.value * accuracy.questions for accuracy in told)
        return right / sum(accuracy.questions for accuracy in told)


def picture(
    points: Sequence[Point], caption: str, y_name: str, y_of: Callable[[Point], float], **form: Any
) -> str:
    """A line for each method, from the model that is not pruned on, as SVG."""
    (dense,) = (point for point in points if point.method == DENSE)
    methods = dict.fromkeys(point.method for point in points if point.method != DENSE)
    lines = {
        method: sorted((p.tokens_per_s, y_of(p)) for p in points if p.method in (DENSE, method))
        for method in methods
    }
    rates = [point.tokens_per_s for point in points]
    level = [(min(rates), y_of(dense)), (max(rates), y_of(dense))]
    return draw_chart(
        Chart(
            title="Speed against accuracy by share of zeros",
            caption=caption,
            x_name="tokens/s of decoding, bf16",
            y_name=y_name,
            limit_name=DENSE,
            emphasised=None,
            panels=[Panel(y_name, lines, level)],
            **form,
        )
    )


def speed_accuracy(
    model: Model,
    into: Annotated[Path, Option(help="folder of points.json and of the pictures")] = Path("speed-accuracy"),
    zeros: Annotated[str, Option(help="shares of zeros")] = "0.3,0.5,0.6,0.7",
    methods: Annotated[str, Option(help="of prune; +recover fits what is kept")] = METHODS,
    choices: Annotated[list[Path] | None, Option(help="questions, as `phasewise eval` reads them")] = None,
    questions: Annotated[int | None, Option(help="of each file, at most")] = None,
    tokens: Annotated[int, Option(help="of the text")] = 4096,
    calibration_tokens: int = 8192,
    answer: Annotated[int, Option(help="tokens that are decoded")] = 64,
    rounds: Rounds = 5,
) -> Yielded:
    """Decoding speed against perplexity, and against the share of right answers where questions are given.

        python benchmarks/figures.py speed-accuracy MODEL --into FOLDER --choices FILE.jsonl

    The model in bf16, then each method at each share of zeros, decoding in turns with the model that is not
    pruned. A point is kept in FOLDER/points.json when it is measured, so that the command can be interrupted
    and given again; points of other settings, or of another machine, are refused. Pictures:
    FOLDER/perplexity.svg and FOLDER/choices.svg. Of the text of pruning_table.py the first tokens are
    measured, and the second half calibrates.
    """
    asked = [str(path) for path in choices or ()]
    settings = {
        "model": model,
        "machine": machine(),
        "choices": asked,
        "questions": questions,
        "tokens": tokens,
    }
    settings |= {"calibration tokens": calibration_tokens, "answer": answer, "rounds": rounds}
    into.mkdir(parents=True, exist_ok=True)
    kept, points = KeptPoints(into / "points.json", settings), []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            model, Path(folder), choices or (), questions, tokens, calibration_tokens, answer, rounds
        )
        pairs = [(0.0, DENSE)] + [(float(share), name) for share in listed(zeros) for name in listed(methods)]
        for share, method in pairs:
            points.append(kept.take(share, method, bench.measure))
            yield asdict(points[-1])
    caption = f"{Path(model).name}; zeros {zeros}"
    drawn = {"perplexity": picture(points, caption, "perplexity", lambda point: point.perplexity)}
    if choices:
        drawn["choices"] = picture(
            points, caption, "right answers", lambda point: point.accuracy or 0.0, y_is_share=True
        )
    for name, svg in drawn.items():
        (into / f"{name}.svg").write_text(svg, encoding="utf-8")
        yield f"drawn: {into / name}.svg"
