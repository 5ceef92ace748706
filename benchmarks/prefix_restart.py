"""Time to the first token of a prompt that a folder has, over that of computing it.

    python benchmarks/prefix_restart.py [MODEL] [--lengths 2000,8000] [--rounds 3] [--kv-format auto]

An engine computes a drawn prompt and keeps it (`serve --prefix-cache`); another one, opened anew over the
same folder, answers it. In turns: each round computes another prompt. Files are read from the page cache.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Annotated

from typer import Option

from benchmarks.harness import MODEL, Model, Row, Yielded, commands, numbers
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import open_engine
from phasewise.serving.prefix_store.opening import PrefixSettings
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.workflows.opening.open_model import OpenModel, open_model

ANSWER_TOKENS = 8


def answered(
    loaded: OpenModel, size: EngineSize, prompt: tuple[int, ...], folder: str
) -> tuple[float, list[int], int]:
    """Seconds to the first token, all tokens, and how many of the prompt were read."""
    with open_engine(
        loaded.model, loaded.plans, size, schedules=loaded.schedules, prefixes=PrefixSettings(folder)
    ) as opened:
        started_ns, first_ns, tokens, n_read = time.perf_counter_ns(), 0, [], 0
        opened.engine.submit(Submit("a", prompt, ANSWER_TOKENS, GREEDY, ignore_eos=True))
        while opened.engine.has_work:
            delivery = opened.engine.step()
            if delivery.stats is None:
                time.sleep(0.0005)
            for out in delivery.outs:
                assert isinstance(out, Answer), out
                first_ns = first_ns or out.at_ns
                tokens += [token.token_id for token in out.tokens]
                n_read = out.n_cached
    return (first_ns - started_ns) / 1e9, tokens, n_read


def one_round(loaded: OpenModel, size: EngineSize, length: int, seed: int) -> Row:
    prompt = tuple(random.Random(seed).choices(range(10, loaded.model.config.vocab_size), k=length))
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        computed_s, expected, _ = answered(loaded, size, prompt, folder)
        read_s, tokens, n_read = answered(loaded, size, prompt, folder)
    assert tokens == expected, "the answers differ"
    return {"computed, s": computed_s, "read, s": read_s, "tokens read": n_read, "ratio": read_s / computed_s}


def prefix_restart(
    model: Model = MODEL,
    lengths: Annotated[str, Option(help="tokens of the prompt")] = "2000,8000",
    rounds: Annotated[int, Option(min=1)] = 3,
    kv_format: Annotated[str, Option("--kv-format")] = "auto",
) -> Yielded:
    loaded = open_model(model)
    for length in numbers(lengths):
        context = length + ANSWER_TOKENS
        size = EngineSize.for_many(loaded.model, 1, context, None, kv_format, kv_shared=True)
        size = replace(size, kv=replace(size.kv, touched=True))
        rows = [one_round(loaded, size, length, seed) for seed in range(rounds)]
        yield {"prompt": length} | {name: statistics.median(row[name] for row in rows) for name in rows[0]}


app = commands(__doc__, prefix_restart)

if __name__ == "__main__":
    app()
