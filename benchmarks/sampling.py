"""Cost of choosing the tokens of a step: rows of a vocabulary by setting, and the masks of guided answers.

    python benchmarks/sampling.py [--rows 8] [--vocabulary 49152] [--model smollm2-135m-instruct]

Medians of microseconds for all rows together. With --model, answers held to a JSON schema are sampled from
noise with that model's tokens: what masks add to a row, and what the first grammar waits for.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import Yielded, commands, note
from phasewise.serving.grammar.guides import Grammar, Guide, GuideCompiler, TokenView
from phasewise.serving.sampling.sampling import Sampler, SamplingParams, sample_rows

SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 0.7, "top_k": 40},
    "top_k, top_p": {"temperature": 0.7, "top_k": 40, "top_p": 0.95},
    "min_p": {"temperature": 0.7, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "greedy, 5 logprobs": {"temperature": 0.0, "top_logprobs": 5},
    "flat, top_p": {"temperature": 5.0, "top_p": 0.99},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
}
_REPEATS = 100


def cost_us(logits: np.ndarray, params: dict[str, float], guide: Guide | None = None) -> float:
    """Median of one step for all rows; the generator of rows is not timed."""
    samplers = [
        Sampler(SamplingParams(seed=row, **params), range(100), logits.shape[1], guide and guide.fresh())  # type: ignore[arg-type]
        for row in range(len(logits))
    ]
    took = []
    for _ in range(_REPEATS):
        started = time.perf_counter_ns()
        sample_rows(logits, samplers)
        took.append(time.perf_counter_ns() - started)
    return statistics.median(took) / 1000


def compiler_of(name: str) -> tuple[GuideCompiler, int]:
    """The compiler of a model's grammars, and the size of its vocabulary."""
    from phasewise.serving.engine.open_engine import ModelText
    from phasewise.serving.loaders import load_model

    model = load_model(name, "native", report=note)
    tokenizer, config = ModelText(model).tokenizer, model.config
    ends = frozenset(config.eos_token_ids)
    view = TokenView(config.vocab_size, ends, tokenizer.special_ids, tokenizer.piece, tokenizer.encode)
    return GuideCompiler(view), config.vocab_size


def sampling(
    rows: int = 8, vocabulary: int = 49152, model: Annotated[str | None, Option()] = None
) -> Yielded:
    rng = np.random.default_rng(0)
    compiler, size = compiler_of(model) if model else (None, vocabulary)
    logits = (rng.standard_normal((rows, size)) * 3).astype(np.float32)
    for name, params in SETTINGS.items():
        yield {"setting": name, "us": cost_us(logits, params)}
    if compiler is None:
        return
    started = time.perf_counter()
    guide = compiler.compile(Grammar.of_schema(SCHEMA))
    yield f"the first grammar waits {time.perf_counter() - started:.2f} s"
    for name in ("greedy", "temperature"):
        yield {"setting": f"by schema, {name}", "us": cost_us(logits, SETTINGS[name], guide)}


app = commands(__doc__, sampling)

if __name__ == "__main__":
    app()
