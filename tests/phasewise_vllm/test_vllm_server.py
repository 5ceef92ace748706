"""The plugin in vLLM, unmodified: its server answers as it does without, within the rounding of its numbers.

Each server is a process of `python -m vllm.entrypoints.openai.api_server` (what `vllm serve` runs): eager, or
with steps that PyTorch compiles. Needs vLLM for CPUs in this interpreter: `make test-vllm`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

from tests.support.models.quantised_models import CASES, write_quantised_hf  # noqa: E402
from tests.support.models.tiny_models import TinyShape, write_tiny_hf  # noqa: E402
from tests.support.servers.ports import reserved_port  # noqa: E402

SHAPE = TinyShape(n_layers=2, hidden=128, ffn=256, n_heads=2, n_kv_heads=2, head_dim=64, tied=False)
PROMPTS = [[3 + (7 * i * i + 5 * j) % 256 for i in range(6 + 9 * j)] for j in range(6)]
ANSWER = 12
BOUND = {"native": 0.125, "int8": 0.5}
"""Of the difference of two log-probabilities of one token: products are rounded to bf16, of eight bits
significant, in another order of sums; in eight bits also weights and activations are.
"""
PATIENCE_S = 300


@contextlib.contextmanager
def served(folder: Path, home: Path, how: str, *options: str) -> Iterator[tuple[str, Path]]:
    """A server's address, and the file of what it says; how: PHASEWISE_VLLM."""
    port = reserved_port()
    log = home / f"{how}.log"
    environment = os.environ | {
        "PHASEWISE_VLLM": how,
        "PHASEWISE_DB": str(home / "none.db"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:2])),
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    more = ["--dtype", "bfloat16", "--max-model-len", "128", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as said:
        process = subprocess.Popen(
            [*command, *more, *options], env=environment, stdout=said, stderr=said, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(process, url, log)
        yield url, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def answer(url: str, folder: Path, prompt: list[int]) -> Any:
    """Greedy: tokens with log-probabilities, those of the best five, and those of the prompt."""
    body = {
        "model": str(folder),
        "prompt": prompt,
        "max_tokens": ANSWER,
        "temperature": 0,
        "logprobs": 5,
        "prompt_logprobs": 1,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answered:
        return json.load(answered)["choices"][0]


def of_prompt(choice: Any, prompt: list[int]) -> list[float]:
    """The log-probabilities of all tokens of a prompt but the first."""
    later = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
    return [by_token[str(token)]["logprob"] for token, by_token in later]


def assert_alike(stock: Any, ours: Any, prompt: list[int], bound: float) -> int:
    """Tokens are equal until two are as likely as each other; how many were compared."""
    for theirs, own in zip(of_prompt(stock, prompt), of_prompt(ours, prompt), strict=True):
        assert abs(theirs - own) <= bound
    first, second = stock["logprobs"], ours["logprobs"]
    for index, (theirs, own) in enumerate(zip(first["tokens"], second["tokens"], strict=True)):
        assert own in first["top_logprobs"][index]
        assert abs(first["top_logprobs"][index][own] - second["token_logprobs"][index]) <= bound
        if theirs != own:
            assert first["top_logprobs"][index][theirs] - first["top_logprobs"][index][own] <= 2 * bound
            return index + 1
    return len(first["tokens"])


def compare(folder: Path, home: Path, how: str, *options: str) -> str:
    """The log of the server with the plugin, after its answers were found to be like those of one without."""
    answers = []
    for asked in ("off", how):
        with served(folder, home, asked, *options) as (url, log):
            answers.append([answer(url, folder, prompt) for prompt in PROMPTS])
    compared = [
        assert_alike(stock, ours, prompt, BOUND[how])
        for stock, ours, prompt in zip(*answers, PROMPTS, strict=True)
    ]
    assert not shapes_told((home / "off.log").read_text())
    assert sum(compared) >= len(PROMPTS) * ANSWER // 2, compared
    return log.read_text()


def shapes_told(said: str) -> set[tuple[str, ...]]:
    return set(re.findall(r"weights of (\d+) x (\d+) are multiplied by phasewise: (\S+),", said))


def test_a_model_in_eight_bits(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m", dtype="bfloat16", shape=SHAPE)

    said = compare(folder, tmp_path, "int8", "--enforce-eager")

    assert {kind for *_, kind in shapes_told(said)} == {"int8", "bf16"}


def test_a_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    write_quantised_hf(tmp_path / "m", CASES["w8a8"])

    said = compare(tmp_path / "m", tmp_path, "native", "--enforce-eager")

    assert {kind for *_, kind in shapes_told(said)} == {"int8c", "bf16"}


def test_a_server_whose_steps_are_compiled(tmp_path: Path) -> None:
    """As it is by default."""
    folder = write_tiny_hf(tmp_path / "m", dtype="bfloat16", shape=SHAPE)

    said = compare(folder, tmp_path, "native")

    assert "saved AOT compiled function" in said
    assert {kind for *_, kind in shapes_told(said)} == {"bf16"}


def test_a_wrong_value_ends_the_server_with_a_line(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m", dtype="bfloat16", shape=SHAPE)

    wanted = "PHASEWISE_VLLM is 'fast': native, int8 or off expected"
    with pytest.raises(AssertionError, match=wanted), served(folder, tmp_path, "fast"):
        pass
