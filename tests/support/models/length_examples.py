"""Answers of a made-up model: the first token of a prompt says how long they are, up to noise."""

from __future__ import annotations

import json
import random
from pathlib import Path

from phasewise.tuner.predictor.log import Example, PromptFacts

HEAD, TAIL = (1, 2, 3, 4), (5, 6)
"""The beginning and the end of every prompt, as by a chat template."""
KINDS = {100: 20, 200: 80, 300: 320}
"""Median length of the answer by the token that tells it."""


def made_up(
    n: int, seed: int = 0, limit: int = 512, kinds: dict[int, int] | None = None, spread: float = 0.2
) -> list[Example]:
    """`n` answers to different prompts; those that would be longer than `limit` are cut there."""
    rng = random.Random(seed)
    medians = KINDS if kinds is None else kinds
    examples = []
    for _ in range(n):
        kind = rng.choice(list(medians))
        words = [rng.randrange(1000, 9000) for _ in range(rng.randrange(3, 30))]
        facts = PromptFacts((*HEAD, kind, *words, *TAIL), rng.choice((0.0, 0.7)), limit)
        length = max(1, round(medians[kind] * rng.lognormvariate(0, spread)))
        examples.append(Example(facts, min(length, limit), length > limit))
    return examples


def write_log(path: Path, examples: list[Example], model_name: str = "tiny") -> Path:
    """`examples` as `predict-len collect` logs them."""
    lines = [
        {
            "schema_version": 1,
            "model": model_name,
            "prompt_token_ids": list(example.facts.token_ids),
            "temperature": example.facts.temperature,
            "max_tokens": example.facts.max_tokens,
            "output_tokens": example.output_tokens,
            "finish_reason": "length" if example.was_cut else "stop",
        }
        for example in examples
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
