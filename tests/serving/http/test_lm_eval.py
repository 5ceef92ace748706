"""`lm-eval --model local-completions` against a server of ours, unchanged: its numbers are our engine's own.

lm_eval is no dependency of the tests: PHASEWISE_LM_EVAL names the command where another environment has it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import ModelText
from phasewise.serving.loaders import load_model
from phasewise.serving.sampling.sampling import GREEDY
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf, write_tiny_hf
from tests.support.servers.fake_engine import run_all
from tests.support.servers.pools import open_alone, size_of
from tests.support.servers.served_command import own_places, serving

VARIABLE = "PHASEWISE_LM_EVAL"
COMMAND = os.environ.get(VARIABLE) or shutil.which("lm_eval")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason=f"lm_eval is not installed and {VARIABLE} names no command"),
]

QUESTIONS = [
    {"question": f"Question {number}: what follows {word}?\nAnswer:", "choices": choices, "answer": answer}
    for number, (word, choices, answer) in enumerate(
        [
            ("one", ["two", "a fish", "seven seas", "Z"], 0),
            ("the night", ["noon", "the morning", "nothing", "é"], 1),
            ("A", ["B", "C"], 0),
            ("the last word", ["an end", "a beginning", "the last word but one"], 0),
            ("spring", ["summer", "winter", "autumn", "a long text with many more words in it"], 0),
        ]
    )
]
TASK = """task: phasewise_tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, shape=TinyShape(context_length=1024))
    return path


def test_its_log_likelihoods_are_those_of_the_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = own_places(tmp_path / "home")
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    with serving(model, environment, "--port", 0) as server:
        samples = judged(tmp_path, environment, QUESTIONS, *of_server(server.url, "tiny"))
        assert server.end(signal.SIGTERM) == 0

    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        question = sample["doc"]
        wanted = [log_likelihood(model, question["question"], f" {choice}") for choice in question["choices"]]
        assert [(float(value), flag == "True") for ((value, flag),) in sample["resps"]] == wanted
        likeliest = max(range(len(wanted)), key=lambda index: wanted[index][0])
        assert sample["acc"] == float(likeliest == question["answer"])


def test_accuracies_are_those_of_transformers_on_200_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch in lm-eval's process and by our server, of the same numbers in f32."""
    assert COMMAND is not None
    python = Path(COMMAND).resolve().parent / "python"
    if subprocess.run(
        [python, "-c", "import torch, transformers"], check=False, capture_output=True
    ).returncode:
        pytest.skip(f"{python} has no torch and transformers")
    environment = own_places(tmp_path / "home")
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    directory = write_tiny_hf(tmp_path / "tiny", shape=TinyShape(context_length=1024))
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(fast))
    drawn = drawn_questions(200)

    theirs = judged(
        tmp_path, environment, drawn, "hf", f"pretrained={directory},dtype=float32,max_length=1024"
    )
    with serving(directory, environment, "--port", 0, "--format", "f32") as server:
        served = judged(tmp_path, environment, drawn, *of_server(server.url, "tiny"))
        assert server.end(signal.SIGTERM) == 0

    for metric in ("acc", "acc_norm"):
        of_theirs, of_ours = ([sample[metric] for sample in samples] for samples in (theirs, served))
        assert of_ours == of_theirs, metric
        assert 0 < sum(of_ours) < len(drawn)


def drawn_questions(count: int) -> list[dict[str, Any]]:
    """Of random words, with choices of several lengths."""
    rng = random.Random(7)
    words = ["one", "night", "the", "spring", "é", "Z", "last", "word", "of", "seven", "A", "42"]

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(least, most)))

    return [
        {
            "question": f"Question: {text(3, 12)}?\nAnswer:",
            "choices": choices,
            "answer": rng.randrange(len(choices)),
        }
        for choices in ([text(1, 5) for _ in range(rng.randint(2, 4))] for _ in range(count))
    ]


def of_server(url: str, name: str) -> tuple[str, str]:
    """The arguments of lm-eval that a user gives."""
    settings = f"model={name},base_url={url}/v1/completions,num_concurrent=2,max_length=1024"
    return "local-completions", settings


def judged(
    folder: Path, environment: dict[str, str], questions: list[dict[str, Any]], kind: str, settings: str
) -> list[dict[str, Any]]:
    """The records that lm-eval writes, one for each question."""
    data, tasks, out = folder / "questions.jsonl", folder / "tasks", folder / f"out-{kind}"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
    tasks.mkdir(exist_ok=True)
    (tasks / "tiny.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    assert COMMAND is not None
    arguments = [
        *(COMMAND, "--model", kind, "--tasks", "phasewise_tiny", "--model_args", settings),
        *("--include_path", str(tasks), "--output_path", str(out), "--log_samples"),
    ]
    offline = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
    }
    done = subprocess.run(
        arguments, env={**environment, **offline}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = out.rglob("samples_*.jsonl")
    return [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]


def log_likelihood(model: Path, context: str, continuation: str) -> tuple[float, bool]:
    """Of a continuation, and whether it is the likeliest, by the engine alone; cut as lm-eval cuts."""
    tokenizer = ModelText(load_model(str(model), "native")).tokenizer
    context_ids = tokenizer.encode(context, False)
    ids = tuple(tokenizer.encode(context + continuation, False))
    with open_alone(model, size_of(model, context_length=1024)) as opened:
        (piece,) = run_all(opened.engine, Submit("a", ids, 0, GREEDY, prompt_logprobs=1))["a"]
    assert isinstance(piece, Answer)
    assert piece.prompt is not None
    scored = piece.prompt[len(context_ids) :]
    return sum(token.logprob or 0.0 for token in scored), all(token.rank == 1 for token in scored)
