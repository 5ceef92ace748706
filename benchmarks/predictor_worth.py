"""Worth of predicting lengths in the engine: tokens/s and preemptions of a full pool, with and without.

    phasewise predict-len collect smollm2-135m-instruct PROMPTS.jsonl -o alpaca.jsonl
    python benchmarks/predictor_worth.py answered PROMPTS.jsonl ANSWERS.jsonl.xz --of NAME -o other.jsonl
    python benchmarks/predictor_worth.py worth alpaca.jsonl nq.jsonl other.jsonl

Each log is a trace. A predictor learns from half of its prompts, the other half is served.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from benchmarks.harness import MODEL, Rounds, Row, Spread, Yielded, commands, listed, note, ratios
from benchmarks.serve_pools import PoolRun, run_policy
from phasewise.tuner.errors import PredictorError, TraceError
from phasewise.tuner.predictor.files import save_predictor
from phasewise.tuner.predictor.log import lines_of
from phasewise.tuner.predictor.train import train
from phasewise.workflows.bench.kv.replay import Replay, ReplayInputs, replay_of
from phasewise.workflows.bench.kv.settings import TraceSelection
from phasewise.workflows.opening.open_model import OpenModel, Weights, open_model
from phasewise.workflows.predict_len.compare import Split, with_split
from phasewise.workflows.predict_len.inputs import ModelTokens, read_logs

NONE, PREDICTED, EXACT = "none", "predictor", "exact"
CONTESTANTS = f"static:{NONE},fixed:{PREDICTED},odma:{NONE},odma:{PREDICTED},odma:{EXACT}"
WITHOUT, WITH, PERFECT = f"odma:{NONE}", f"odma:{PREDICTED}", f"odma:{EXACT}"
LITTLE = 0.02
"""A gain below which the predictor is not worth its lines in `serve`."""


def worth(
    logs: Annotated[list[Path], Argument(help="of answers' lengths, each a trace")],
    model: Annotated[str, Option(help="the engine's")] = MODEL,
    weights: Annotated[str, Option("--format", help="of the weights")] = "native",
    max_tokens: Annotated[str, Option(help="a number, final:SHARE or live:SHARE")] = "final:0.55",
    contestants: Annotated[str, Option(help="POLICY:ESTIMATE, with commas")] = CONTESTANTS,
    slots: int = 4096,
    requests: Annotated[int, Option(help="most of each trace")] = 240,
    warm: Annotated[int, Option(help="requests that end before time counts")] = 60,
    max_sequences: int = 64,
    seed: Annotated[int, Option(help="of the halves")] = 0,
    rounds: Rounds = 3,
    threads: Annotated[int | None, Option()] = None,
) -> Yielded:
    """Tokens/s, preemptions and what is computed again, by policy and estimate, in turns; then the verdict.

    All requests wait from the beginning, and an answer ends where it ended in the log
    (benchmarks/serve_pools.py). `fixed` has S3's ten buckets of equal width; `predictor` is trained here on
    the half of the prompts that is not served, `exact` knows every length. The static block holds the longest
    prompt and --max-tokens, which by final:0.55 is so large that answers fill 55 % of it.
    """
    opened = open_model(model, Weights(weights), threads)
    names = listed(contestants)
    gains: dict[str, list[float]] = {WITH: [], PERFECT: []}
    for log in logs:
        replay = trace_of(log, model, max_tokens, slots, requests, max_sequences, seed)
        runs = runs_of(opened, replay, names, warm, rounds)
        yield from rows_of(log.stem, runs)
        for name in gains.keys() & runs.keys():
            if WITHOUT in runs:
                gains[name].append(ratios(_speeds(runs[name]), _speeds(runs[WITHOUT])).median - 1)
    yield from verdict(gains)


def trace_of(
    log: Path, model: str, max_tokens: str, slots: int, requests: int, max_sequences: int, seed: int
) -> Replay:
    """The half of a log that the predictor has not learnt from, with the three estimates of each answer."""
    split = Split(0.5, seed)
    try:
        parsed, name = read_logs([log], model, note)
        kept, _ = split.of([example for one_log in parsed for example in one_log.examples])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "predictor.safetensors"
            save_predictor(with_split(train(kept, name), split), path)
            selection = TraceSelection(count=1 << 20, model=model, seed=seed)
            wanted = ReplayInputs([str(log)], selection, max_tokens, [NONE, str(path), EXACT], None)
            replay, story = replay_of(wanted, slots, max_sequences, {})
    except (PredictorError, TraceError) as error:
        raise SystemExit(f"{log}: {error}") from None
    note(f"{log.stem}: {len(kept)} answers learnt from; {story}")
    none, predicted, exact = (estimates[:requests] for estimates in replay.estimates.values())
    estimates = {NONE: none, PREDICTED: predicted, EXACT: exact}
    return replace(replay, trace=replay.trace[:requests], estimates=estimates)


def runs_of(
    opened: OpenModel, replay: Replay, names: Sequence[str], n_warm: int, rounds: int
) -> dict[str, list[PoolRun]]:
    """The runs of each contestant, round by round, in alternating order."""
    runs: dict[str, list[PoolRun]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            policy, _, estimate = name.partition(":")
            own = replace(replay, estimates={estimate: replay.estimates[estimate]})
            runs[name].append(run_policy(opened, own, policy, number, min(n_warm, len(own.trace) // 2)))
            note(json.dumps({"estimate": estimate, **asdict(runs[name][-1])}))
    return runs


def rows_of(trace: str, runs: Mapping[str, Sequence[PoolRun]]) -> Iterator[Row]:
    for name, own in runs.items():
        policy, _, estimate = name.partition(":")
        yield {
            "trace": trace,
            "policy": policy,
            "estimate": estimate,
            "tokens/s": Spread.of(_speeds(own)),
            "over odma without": ratios(_speeds(own), _speeds(runs[WITHOUT])) if WITHOUT in runs else None,
            "at once": own[0].running,
            "preemptions": own[0].preemptions,
            "computed again": own[0].prefill_tokens - own[0].prompt_tokens,
            "failed": own[0].failed,
        }


def verdict(gains: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """The gain over odma without estimates, on each trace, and what follows from it."""
    for name, values in gains.items():
        if values:
            shown = ", ".join(f"{100 * gain:+.1f} %" for gain in values)
            yield f"{name} over {WITHOUT}, by trace: {shown}"
    if gains[WITH]:
        is_little = max(gains[WITH]) < LITTLE
        yield (
            f"the predictor gains {'less than' if is_little else 'at least'} {100 * LITTLE:.0f} % on "
            f"{'every trace' if is_little else 'a trace'}"
        )


def _speeds(runs: Sequence[PoolRun]) -> list[float]:
    """Tokens/s while requests wait; of the whole run where they did not wait for long enough."""
    return [run.tokens_per_s or run.whole_tokens_per_s for run in runs]


def answered(
    prompts: Annotated[Path, Argument(help="lines with prompt_id and instruction")],
    answers: Annotated[Path, Argument(help="lines with prompt_id, model and output")],
    of: Annotated[str, Option(help="the model whose answers are taken")],
    output: Annotated[Path, Option("-o", "--output", help="the log to write")],
    model: Annotated[str, Option(help="in whose tokens lengths are counted")] = MODEL,
) -> Yielded:
    """A log of the lengths of answers whose texts are known, as AlpacaEval's results have them."""
    tokens = ModelTokens(model)
    texts = {
        row["prompt_id"]: row["instruction"] for row in (json.loads(line) for _, line in lines_of(prompts))
    }
    n_answers = 0
    with output.open("w", encoding="utf-8") as file:
        for _, line in lines_of(answers):
            row = json.loads(line)
            if row["model"] == of:
                n_tokens = len(tokens.encode(row["output"])) + 1  # the end of the answer
                fields = {
                    "schema_version": 1,
                    "prompt": texts[row["prompt_id"]],
                    "output_tokens": n_tokens,
                    "finish_reason": "stop",
                }
                file.write(json.dumps(fields) + "\n")
                n_answers += 1
    yield f"{output}: {n_answers} answers of {of}"


app = commands(__doc__, worth, answered)

if __name__ == "__main__":
    app()
