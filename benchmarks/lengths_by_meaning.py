"""What `predict-len eval --folds` says of the answers of many models, in one table.

    python benchmarks/lengths_by_meaning.py --prompts PROMPTS.jsonl ANSWERS.jsonl[.xz] [--folds 5] [--seed 0]

PROMPTS has lines with prompt_id and instruction, ANSWERS lines with prompt_id, model and output, as
AlpacaEval's results do. Lengths are counted in the tokens of the default language model. A row for each
model: the mean error of the predictor by the default encoder as a share of a constant's, the largest
deviation of a stated tenth from the share of answers within it, and the accuracy of its blocks above that of
S3's buckets with as much memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phasewise.tuner.predictor.facts import Example, PromptFacts
from phasewise.tuner.predictor.log import lines_of
from phasewise.workflows.predict_len.inputs import ModelTokens
from phasewise.workflows.predict_len.judge import judge_by_folds
from phasewise.workflows.predict_len.prompt_vectors import find_encoder
from phasewise.workflows.predict_len.settings import EvalWish

LANGUAGE_MODEL = "smollm2-135m-instruct"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", nargs="+", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encoder", default="all-minilm-l6-v2")
    options = parser.parse_args()
    prompts = [json.loads(line) for _, line in lines_of(options.prompts)]
    tokens = ModelTokens(LANGUAGE_MODEL)
    encoder = find_encoder(options.encoder)
    assert encoder is not None
    facts = {
        row["prompt_id"]: encoder.read(
            PromptFacts(tokens.prompt(row["instruction"]), text=row["instruction"])
        )
        for row in prompts
    }
    wish = EvalWish(folds=options.folds, seed=options.seed)
    print(f"{'model':30}", "answers", " error", "constant", " share", "coverage", "above S3")
    shares, deviations, gains = [], [], []
    for name, examples in _examples(options.answers, facts, tokens).items():
        (report,) = judge_by_folds({name: examples}, name, wish, encoder.ref)
        found = report.calibration
        assert found is not None
        shares.append(found.mean_error_tokens / found.constant_error_tokens)
        deviations.append(max(abs(one - at / 10) for at, one in enumerate(found.coverage, 1)))
        gains.append(report.points_gained("memory of S3"))
        print(
            f"{name:30} {report.n_answers:7} {found.mean_error_tokens:6.1f}"
            f" {found.constant_error_tokens:8.1f} {shares[-1]:6.3f} {100 * deviations[-1]:7.1f}p"
            f" {gains[-1]:+7.2f}p",
            flush=True,
        )
    print(
        f"share: mean {statistics.fmean(shares):.3f}, largest {max(shares):.3f}; coverage off by at most"
        f" {100 * max(deviations):.1f} points; above S3 at its memory: least {min(gains):+.2f} points"
    )


def _examples(
    paths: list[Path], facts: dict[int, PromptFacts], tokens: ModelTokens
) -> dict[str, list[Example]]:
    """The answers of each model."""
    found: dict[str, list[Example]] = defaultdict(list)
    for path in paths:
        for _, line in lines_of(path):
            row = json.loads(line)
            n_tokens = len(tokens.encode(row["output"])) + 1  # the end of the answer
            found[row["model"]].append(Example(facts[row["prompt_id"]], n_tokens, False))
    return found


if __name__ == "__main__":
    main()
