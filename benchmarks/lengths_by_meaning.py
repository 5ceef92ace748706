"""Results of `predict-len eval --folds` on the answers of many models, in one table.

    python benchmarks/lengths_by_meaning.py --prompts PROMPTS.jsonl ANSWERS.jsonl[.xz] [--folds 5] [--seed 0]

PROMPTS has lines with prompt_id and instruction, ANSWERS lines with prompt_id, model and output, as
AlpacaEval's results do. Lengths are counted in the tokens of the default language model. A row for each
model: the mean error of the predictor by the default encoder as a share of a constant's, the largest
deviation of a stated tenth from the share of answers within it, and the accuracy of its blocks above that of
S3's buckets with as much memory.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from benchmarks.harness import MODEL, Yielded, commands
from phasewise.tuner.predictor.facts import Example, PromptFacts
from phasewise.tuner.predictor.log import lines_of
from phasewise.workflows.predict_len.inputs import ModelTokens
from phasewise.workflows.predict_len.judge import judge_by_folds
from phasewise.workflows.predict_len.prompt_vectors import find_encoder
from phasewise.workflows.predict_len.settings import EvalWish


def lengths_by_meaning(
    answers: Annotated[list[Path], Argument()],
    prompts: Annotated[Path, Option()],
    folds: int = 5,
    seed: int = 0,
    encoder: str = "all-minilm-l6-v2",
) -> Yielded:
    tokens, reader = ModelTokens(MODEL), find_encoder(encoder)
    assert reader is not None
    texts = {
        row["prompt_id"]: row["instruction"] for row in (json.loads(line) for _, line in lines_of(prompts))
    }
    facts = {name: reader.read(PromptFacts(tokens.prompt(text), text=text)) for name, text in texts.items()}
    wish = EvalWish(folds=folds, seed=seed)
    shares, deviations, gains = [], [], []
    for name, examples in _examples(answers, facts, tokens).items():
        (report,) = judge_by_folds({name: examples}, name, wish, reader.ref)
        calibration = report.calibration
        assert calibration is not None
        shares.append(calibration.mean_error_tokens / calibration.constant_error_tokens)
        deviations.append(
            100 * max(abs(share - index / 10) for index, share in enumerate(calibration.coverage, 1))
        )
        gains.append(report.points_gained("memory of S3"))
        yield {
            "model": name,
            "answers": report.n_answers,
            "error": calibration.mean_error_tokens,
            "constant": calibration.constant_error_tokens,
            "share": f"{shares[-1]:.3f}",
            "coverage off, points": f"{deviations[-1]:.1f}",
            "above S3": f"{gains[-1]:+.2f}",
        }
    yield (
        f"share: mean {statistics.fmean(shares):.3f}, largest {max(shares):.3f}; coverage off by at most"
        f" {max(deviations):.1f} points; above S3 at its memory: least {min(gains):+.2f} points"
    )


def _examples(
    paths: list[Path], facts: dict[int, PromptFacts], tokens: ModelTokens
) -> dict[str, list[Example]]:
    """The answers of each model."""
    by_model: dict[str, list[Example]] = defaultdict(list)
    for path in paths:
        for _, line in lines_of(path):
            row = json.loads(line)
            n_tokens = len(tokens.encode(row["output"])) + 1  # the end of the answer
            by_model[row["model"]].append(Example(facts[row["prompt_id"]], n_tokens, False))
    return by_model


app = commands(__doc__, lengths_by_meaning)

if __name__ == "__main__":
    app()
