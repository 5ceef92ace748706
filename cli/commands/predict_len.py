"""`phasewise predict-len`: collect lengths of answers, train a predictor on them, judge it, ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise._options import REQUIRED, argument, option
from phasewise._words import counted, percent
from phasewise.cli.command_app import CommandApp
from phasewise.cli.options import JsonOption, ModelArgument
from phasewise.cli.present import check_target, note, on_one_line, owns_stdout, print_json, read_stdin, say
from phasewise.cli.tables import RowTable, present
from phasewise.workflows.predict_len.settings import PREDICTOR, SEED, TOKENS, CollectWish, EvalWish

if TYPE_CHECKING:
    from phasewise.tuner.predictor.evaluate import Calibration
    from phasewise.workflows.predict_len.judge import LogReport


HELP = """Predict how long answers will be.

$ phasewise predict-len train log.jsonl
$ phasewise predict-len predict model.gguf -p 'Write a poem.'"""

app = CommandApp(help=HELP)

LogsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="LOG", help="JSON lines of `collect` or of `serve --length-log`; .xz too"),
]


@app.command()
def collect(
    *,
    model: ModelArgument,
    prompts: list[Path] = argument(
        REQUIRED, "texts, one a line, or JSON lines with prompt, instruction or question; .xz too", "PROMPTS"
    ),
    output: Path = option(
        REQUIRED, "log to create or to continue; -: stdout", "-o", "--output", metavar="LOG"
    ),
    wish: CollectWish,
    as_json: JsonOption = False,
) -> None:
    """Have MODEL answer prompts, and append to a log how long the answers became.

    $ phasewise predict-len collect model.gguf prompts.txt -o log.jsonl
    $ phasewise predict-len collect model.gguf prompts.jsonl -o log --limit 200

    Each answer is logged as soon as it has ended. Interrupted, the same
    command continues with the prompts that have no answer yet. `serve
    --length-log` writes the same log of real requests.
    """
    from phasewise.workflows.predict_len.answer_prompts import collect_lengths

    owns_stdout(output, as_json)
    fields = collect_lengths(model, prompts, output, wish, note)
    if as_json:
        print_json(fields)
    elif not owns_stdout(output):
        say("\n".join(f"{name:<16}  {value}" for name, value in fields.items() if value is not None))


@app.command("train")
def train_command(
    logs: LogsArgument,
    output: Path | None = option(
        None, "safetensors file; -: stdout [default: where `serve` looks]", "-o", "--output", metavar="FILE"
    ),
    model: str | None = TOKENS(None),
    split: float = option(0.0, "share of the prompts kept out of training, for `eval`", min=0.0, max=0.9),
    seed: int = SEED(0),
    as_json: JsonOption = False,
) -> None:
    """Train a predictor of the lengths that logs hold, and keep it for `serve --predictor auto`.

    $ phasewise predict-len train log.jsonl
    $ phasewise predict-len train log.jsonl -o lengths.safetensors --split 0.2
    """
    from phasewise.tuner.predictor import default_file
    from phasewise.tuner.predictor.files import save_predictor
    from phasewise.tuner.predictor.log import held_out
    from phasewise.tuner.predictor.train import TrainOptions, train
    from phasewise.workflows.predict_len.inputs import read_logs
    from phasewise.workflows.predict_len.judge import Split, with_split

    owns_stdout(output, as_json)
    check_target(output)
    parsed_logs, name = read_logs(logs, model, note)
    kept, _ = held_out([example for log in parsed_logs for example in log.examples], split, seed)
    predictor = train(kept, name, TrainOptions(seed=seed))
    path = output or default_file(name)
    save_predictor(with_split(predictor, Split(split, seed)), path)
    if as_json:
        print_json({"predictor": str(path), "model": name, "trained_on": dict(predictor.trained_on)})
    else:
        if not owns_stdout(output):
            say(path)
        note(", ".join(f"{count} {what}" for what, count in predictor.trained_on.items()))


@app.command("eval")
def evaluate(logs: LogsArgument, wish: EvalWish, as_json: JsonOption = False) -> None:
    """Judge predictors by answers to prompts that they did not learn from.

    $ phasewise predict-len eval log.jsonl
    $ phasewise predict-len eval new.jsonl --predictor lengths.safetensors

    Three ways to choose the size of a request's KV block are compared, as
    each would be used, and once more at the same mean size. Ours predicts a
    room: a number of tokens that all answers but the share --overflow stay
    within; the block is the smallest bucket that holds it, and buckets are
    learnt from answers that ended. S3 has ten buckets of equal width and a
    classifier. The third gives every request the same size.

    Without --predictor, ours is trained here on the prompts that are not held
    out. With it, the file says which prompts it did not learn from.

    Columns: accuracy, the share of answers that fit their first block;
    overflow, the rest; exact, answers in the bucket that was predicted; block,
    mean tokens of a block; used, the share of it that is filled; at limit,
    the share of requests that get a block of max_tokens.

    The figures of ours are kept in the tuning database, without prompts and
    paths: `db show` lists them.
    """
    from phasewise.workflows.predict_len.judge import judge_predictions, keep_scores

    judged = judge_predictions(logs, wish, note)
    keep_scores(judged, wish, note)
    split = {"split": judged.split.share, "seed": judged.split.seed}
    asked = {"hold": 1 - wish.overflow, "folds": wish.folds}
    fields = {"model": judged.model_name, **split, **asked}
    parts = [part for report in judged.reports for part in ("", *report_text(report))]
    present(as_json, {**fields, "logs": [report.fields() for report in judged.reports]}, parts[1:])


@app.command()
def predict(
    model: ModelArgument,
    prompt: str = option(REQUIRED, "a user's message; - reads it from stdin", "-p", "--prompt"),
    max_tokens: int = option(512, "most tokens that the answer may have", min=1),
    temperature: float = option(0.0, "temperature that the answer would have", min=0.0),
    predictor: Path | None = PREDICTOR(None),
    as_json: JsonOption = False,
) -> None:
    """Predict how long MODEL's answer to a message will be.

    $ phasewise predict-len predict model.gguf -p 'Write a poem.'
    $ phasewise predict-len predict model.gguf -p - --json < question.txt
    """
    from phasewise.workflows.predict_len.judge import predict_length

    message = read_stdin() if prompt == "-" else prompt
    fields = predict_length(model, message, max_tokens, temperature, predictor, note)
    bounds = [f"{tokens} in {percent(float(share))}" for share, tokens in fields["at_most_tokens"].items()]
    told = {**fields, "at_most_tokens": f"{', '.join(bounds)} of such answers"}
    present(as_json, fields, [f"{name:<14}  {value}" for name, value in told.items()])


def report_text(report: LogReport) -> Iterator[str | RowTable]:
    """Text of one log's figures for people."""
    yield f"{on_one_line(report.name)}: {counted(report.n_answers, 'answer')}"
    for point, scores in report.scores.items():
        yield ""
        yield RowTable(
            [
                {
                    point: score.method,
                    "accuracy": percent(score.accuracy, 2),
                    "overflow": percent(score.overflow, 2),
                    "exact": "" if score.exact_bucket is None else percent(score.exact_bucket, 1),
                    "block": f"{score.block_tokens:.0f}",
                    "used": percent(score.utilisation, 1),
                    "at limit": percent(score.whole_limit, 1),
                }
                for score in scores
            ],
            (point,),
        )
        yield f"ours above S3: {report.points_gained(point):+.2f} points"
    yield ""
    yield from _calibration_text(report.calibration)


def _calibration_text(calibration: Calibration) -> Iterator[str | RowTable]:
    yield RowTable(
        [
            {
                "uncertainty, by deciles": f"{decile.uncertainty:.2f}",
                "held": percent(decile.held, 1),
                "room": f"{decile.room_tokens:.0f}",
                "mean error": f"{decile.mean_error_tokens:.0f}",
            }
            for decile in calibration.deciles
        ]
    )
    yield "answers within the forecast's 10 %, 20 %, .. 90 %:"
    yield f"  {', '.join(percent(share) for share in calibration.coverage)}"
    yield (
        f"mean error {calibration.mean_error_tokens:.0f} tokens; "
        f"of a constant {calibration.constant_error_tokens:.0f}"
    )
