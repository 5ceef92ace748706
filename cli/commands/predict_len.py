"""`phasewise predict-len`: how long answers will be: collect lengths, learn from them, judge it, ask it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli.options import (
    DbOption,
    FormatOption,
    JsonOption,
    ModelArgument,
    ThreadsOption,
    WeightFormat,
)
from phasewise.cli.present import EXIT_INTERRUPTED, note, note_plans, print_json, read_stdin, say

if TYPE_CHECKING:
    from phasewise.serving.open_engine import OpenEngine
    from phasewise.tuner.predictor.model import LengthPredictor
    from phasewise.workflows.predict_len.collect import AnswerLog, Settings
    from phasewise.workflows.predict_len.compare import Report

app = typer.Typer(
    no_args_is_help=True, help="Predict how long answers will be: collect lengths, train, evaluate, ask."
)

TELL_EVERY = 50
TIMED_CALLS = 200

LogsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="LOG..", help="JSON lines of `collect` or of `serve --length-log`; .xz too"),
]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="model whose tokenizer encodes the prompts of a log that has them as text",
    ),
]
PredictorOption = Annotated[
    Path | None,
    typer.Option(
        "--predictor", metavar="FILE", help="predictor file [default: the one trained for the model]"
    ),
]
SeedOption = Annotated[
    int, typer.Option(min=0, help="seed that draws the held-out prompts and the first weights")
]


@app.command()
def collect(
    model: ModelArgument,
    prompts: Annotated[
        list[Path],
        typer.Argument(
            metavar="PROMPTS..",
            help="texts, one a line, or JSON lines with prompt, instruction or question; .xz too",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="LOG", help="log to create or to continue")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="generate at most N tokens per answer")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="use only the first N prompts")] = None,
    sequences: Annotated[int, typer.Option(min=1, max=512, help="answers computed at the same time")] = 32,
    weight_format: FormatOption = WeightFormat.native,
    threads: ThreadsOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let MODEL answer prompts, as a chat's first messages, and log how long its answers become.

    Every answer is logged when it ends. Interrupted or killed, the same
    command goes on where it was: what the log holds is not computed again.
    """
    from phasewise.workflows.predict_len.collect import AnswerLog, Settings
    from phasewise.workflows.predict_len.inputs import message_prompt, read_prompts

    texts = read_prompts(prompts)[:limit]
    settings = Settings(max_tokens, temperature, sequences)
    with _engine(model, weight_format, threads, db, sequences) as opened:
        log = AnswerLog(output, opened.model.name, settings)
        try:
            every = list(dict.fromkeys(tuple(message_prompt(opened.text, text)) for text in texts))
            lengths, n_left = _answer_all(opened, log, every, settings)
        finally:
            log.close()
    fields = {
        "model": opened.model.name,
        "log": str(output),
        "prompts": len(every),
        "answered_before": sum(ids in log.done for ids in every),
        "answered_now": len(lengths),
        "too_long": n_left,
        "median_tokens": statistics.median(lengths) if lengths else None,
        "cut_share": sum(length >= max_tokens for length in lengths) / len(lengths) if lengths else None,
    }
    if as_json:
        print_json(fields)
    else:
        say("\n".join(f"{name:<16}  {value}" for name, value in fields.items() if value is not None))


@contextmanager
def _engine(
    ref: str, weight_format: WeightFormat, threads: int | None, db: str | None, sequences: int
) -> Iterator[OpenEngine]:
    from phasewise.serving.open_engine import EngineSize, open_engine
    from phasewise.serving.rank_teams import keeping_affinity
    from phasewise.workflows.open_model import open_model

    found = open_model(ref, weight_format, threads, db, note)
    note_plans(found.plans)
    size = EngineSize.for_many(found.model, sequences, None, None)
    with keeping_affinity(), open_engine(found.model, found.plans, size, schedules=found.schedules) as opened:
        yield opened


def _answer_all(
    opened: OpenEngine, log: AnswerLog, every: list[tuple[int, ...]], settings: Settings
) -> tuple[list[int], int]:
    """Lengths of the answers computed now, and how many prompts leave no room for one."""
    from phasewise.workflows.predict_len.collect import answers

    room = opened.size.context_length - settings.max_tokens
    fitting = [ids for ids in every if 0 < len(ids) <= room and ids not in log.done]
    n_left = sum(not 0 < len(ids) <= room for ids in every)
    if log.had_broken_line:
        note("the log's last line was not whole and is dropped")
    lengths: list[int] = []
    try:
        for ended in answers(opened.engine, fitting, settings):
            if ended.error is not None:
                raise ended.error
            log.write(ended)
            lengths.append(ended.output_tokens)
            if len(lengths) % TELL_EVERY == 0:
                note(f"{len(lengths)} of {len(fitting)} answers")
    except KeyboardInterrupt:
        note(f"{len(lengths)} answers are logged; the same command goes on from there")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    return lengths, n_left


@app.command("train")
def train_command(
    logs: LogsArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="safetensors file [default: where `serve` looks]"
        ),
    ] = None,
    model: TokensOption = None,
    split: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="share of the prompts kept out of training, for `eval`")
    ] = 0.0,
    seed: SeedOption = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="report every epoch on stderr")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a predictor of the lengths that logs hold, and keep it for `serve --predictor auto`."""
    from phasewise.cli.render.predict_len_text import epoch_line
    from phasewise.tuner.predictor.facts import held_out
    from phasewise.tuner.predictor.files import save_predictor
    from phasewise.tuner.predictor.train import TrainOptions, train
    from phasewise.workflows.predict_len.compare import Split, with_split
    from phasewise.workflows.predict_len.inputs import Tokens, predictor_file, read_logs

    found, name = read_logs(logs, Tokens(model, note) if model else None)
    kept, _ = held_out([one for log in found for one in log.examples], split, seed)
    predictor = train(
        kept,
        name,
        TrainOptions(seed=seed),
        (lambda epoch: note(epoch_line(epoch))) if verbose else lambda _: None,
    )
    path = predictor_file(output, name)
    save_predictor(with_split(predictor, Split(split, seed)), path)
    if as_json:
        print_json({"predictor": str(path), "model": name, "trained_on": dict(predictor.trained_on)})
    else:
        say(path)
        note(", ".join(f"{count} {what}" for what, count in predictor.trained_on.items()))


@app.command("eval")
def evaluate(
    logs: LogsArgument,
    predictor: PredictorOption = None,
    model: TokensOption = None,
    split: Annotated[float, typer.Option(min=0.05, max=0.9, help="share of the prompts held out")] = 0.3,
    overflow: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="share of answers that may outgrow their block")
    ] = 0.005,
    drift: Annotated[
        bool, typer.Option("--drift", help="train on the first log only, then replay the other logs in order")
    ] = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Hold predictions and buckets against answers to prompts that were not learnt from.

    Ours (a room for each request, in buckets learnt from what ended), S3's ten
    fixed buckets with a classifier, and a constant; each as it would be used,
    and all at equal memory. Accuracy: the answer fits the block that it was
    given first. A --predictor is judged by the prompts that its file says it
    did not learn from; without one, ours is trained here as the others are.
    """
    from phasewise.cli.render.predict_len_text import report_text
    from phasewise.tuner.predictor.files import load_predictor
    from phasewise.workflows.predict_len.compare import (
        Split,
        report_drift,
        report_log,
        rivals_of,
        strangers,
    )
    from phasewise.workflows.predict_len.inputs import Tokens, read_logs

    found, name = read_logs(logs, Tokens(model, note) if model else None)
    ours = None if predictor is None else load_predictor(predictor)
    chosen = Split(split, seed) if ours is None else _split_of(ours, split, seed)
    halves = [chosen.of(log.examples) for log in found]
    learnt = halves[0][0] if drift else [one for kept, _ in halves for one in kept]
    rivals = rivals_of(learnt, name, 1 - overflow, seed, ours)
    reports: list[Report] = []
    if drift:
        if len(found) < 2:
            raise typer.BadParameter("--drift needs two logs or more")
        after = strangers(learnt, [one for log in found[1:] for one in log.examples])
        title = f"{', '.join(map(str, logs[1:]))} after {logs[0]}"
        reports.append(report_drift(title, halves[0][1], after, rivals))
    else:
        outs = [strangers(learnt, out) for _, out in halves]
        reports += [report_log(str(path), out, rivals) for path, out in zip(logs, outs, strict=True)]
    if as_json:
        fields = {"split": chosen.share, "seed": chosen.seed, "hold": 1 - overflow, "drift": drift}
        print_json({"model": name, **fields, "logs": [report.fields() for report in reports]})
    else:
        say("\n\n".join(map(report_text, reports)))


def _split_of(predictor: LengthPredictor, share: float, seed: int) -> Any:
    """The predictor's own, so that it is judged by what it has not seen."""
    from phasewise.workflows.predict_len.compare import Split

    own = predictor.trained_on.get("held_out_share", 0)
    if not own:
        note(
            "the predictor learnt from all of its prompts: where these are among them, the figures flatter it"
        )
        return Split(share, seed)
    return Split(float(own), int(predictor.trained_on.get("held_out_seed", 0)))


@app.command()
def predict(
    model: ModelArgument,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="a user's message; - reads it from stdin")],
    max_tokens: Annotated[int, typer.Option(min=1, help="most tokens that the answer may have")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    predictor: PredictorOption = None,
    timed: Annotated[
        bool, typer.Option("--time", help=f"also measure the median time of {TIMED_CALLS} predictions")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict how long MODEL's answer to a message will be."""
    from phasewise.tuner.predictor.facts import PromptFacts
    from phasewise.tuner.predictor.files import load_predictor
    from phasewise.workflows.predict_len.inputs import Tokens, predictor_file

    text = read_stdin() if prompt == "-" else prompt
    tokens = Tokens(model, note)
    known = load_predictor(predictor_file(predictor, tokens.model_name))
    facts = PromptFacts(tokens.prompt(text), temperature, max_tokens)
    forecasts = {hold: known.forecast(facts, known.price(hold)) for hold in (0.5, 0.9, 0.99)}
    one = forecasts[0.5]
    fields: dict[str, Any] = {
        "model": tokens.model_name,
        "prompt_tokens": len(facts.token_ids),
        "mean_tokens": round(one.mean_tokens, 1),
        "likely_tokens": one.likely_tokens,
        "uncertainty": round(one.uncertainty, 4),
        "room_tokens": {f"{hold:g}": forecast.room_tokens for hold, forecast in forecasts.items()},
    }
    if timed:
        fields["median_us"] = _median_us(known, facts)
    if as_json:
        print_json(fields)
    else:
        say("\n".join(f"{name:<14}  {value}" for name, value in fields.items()))


def _median_us(predictor: LengthPredictor, facts: Any) -> float:
    import time

    times = []
    for _ in range(TIMED_CALLS):
        started_ns = time.perf_counter_ns()
        predictor.forecast(facts, 0.001)
        times.append((time.perf_counter_ns() - started_ns) / 1000)
    return round(statistics.median(times), 1)
