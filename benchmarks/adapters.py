"""The price of adapters (LoRA): decode of a batch whose rows have one each, over that of the model alone.

    python benchmarks/adapters.py [MODEL] [--rank 16] [--targets q_proj,v_proj] [--adapters 8]

Adapters of drawn numbers are written as PEFT saves them, and loaded as `serve --lora` loads them. In turns:
the model without adapters, with one of its own in every row, and with them while no row has one.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import MODEL, Model, Rounds, Yielded, commands, in_turns, listed, ratios
from phasewise.serving.engine.throughput import Workload, measure
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.workflows.bench.model_speed import OpenRanks, open_ranks
from phasewise.workflows.opening.open_model import Weights, open_model
from tests.support.models.adapters import drawn_pairs, write_peft

STEPS = 16


def shapes_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """Arrays in the shapes of a Llama-like model's linear weights, by their names in safetensors."""
    rows = {
        "q_proj": config.q_rows,
        "k_proj": config.kv_rows,
        "v_proj": config.kv_rows,
        "o_proj": config.hidden,
    }
    ffn = {"gate_proj": config.ffn, "up_proj": config.ffn, "down_proj": config.hidden}
    return {
        f"model.layers.{layer}.{part}.{name}.weight": np.empty((n, columns), np.float32)
        for layer in range(config.n_layers)
        for part, named in (("self_attn", rows), ("mlp", ffn))
        for name, n in named.items()
        for columns in [{"o_proj": config.q_rows, "down_proj": config.ffn}.get(name, config.hidden)]
    }


def adapters(
    model: Model = MODEL,
    rank: Annotated[int, Option(help="of each adapter")] = 16,
    targets: Annotated[str, Option(help="modules that have one")] = "q_proj,v_proj",
    n_adapters: Annotated[int, Option("--adapters", help="sequences, with an adapter each")] = 8,
    dtype: Annotated[str, Option(help="of the adapters' numbers in their files")] = "bfloat16",
    rounds: Rounds = 12,
) -> Yielded:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        base = open_model(model, Weights())
        lora = []
        for number in range(n_adapters):
            pairs = drawn_pairs(shapes_of(base.model.config), f"{number}", rank, listed(targets))
            lora.append(f"a{number}={write_peft(Path(place) / str(number), pairs, dtype)}")
        adapted = open_model(model, Weights(lora=lora))
        workload = Workload(0, STEPS, n_adapters, 64)
        one_each = replace(workload, n_adapters=n_adapters)
        alone = stack.enter_context(open_ranks(base, [workload], "auto"))
        with_them = stack.enter_context(open_ranks(adapted, [workload], "auto"))
        n_tokens = base.model.config.vocab_size

        def seconds(opened: OpenRanks, test: Workload) -> float:
            return measure(opened.ranks, test, n_tokens, 512, 1).median_s

        times = in_turns(
            {
                "alone": lambda: seconds(alone, workload),
                "one each": lambda: seconds(with_them, one_each),
                "no row has one": lambda: seconds(with_them, workload),
            },
            rounds,
        )
    yield f"{n_adapters} adapters of rank {rank}, {targets}, {dtype}: decode over that of the model alone"
    for name in ("one each", "no row has one"):
        yield {"rows": name, "ratio": ratios(times["alone"], times[name])}


app = commands(__doc__, adapters)

if __name__ == "__main__":
    app()
