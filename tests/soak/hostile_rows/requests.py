"""Rows 5, 7 and 16: what a request may say, and what its answer tells or holds."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.soak.hostile_rows.siege import HEALTH_S, Asked, Siege, all_at_once, all_memory_mib, attacking
from tests.soak.row_runner import Missed
from tests.soak.served_process import TINY

KEYS = ("first-key", "second-key")
_TRIES = 3
FULL_CONTEXT_S = 900.0


def prompts_told_by_time(siege: Siege) -> str:
    """Another key's prompt takes as long as a new one; the client's own prompt is quick."""
    with siege.server("--api-key", KEYS[0], "--api-key", KEYS[1]) as server:
        first, second = (siege.asked(server, key) for key in KEYS)
        n_words = 200 if siege.quick else 1000
        fresh_s, own_s, others_s = (
            min(_took_s(prepare, ask, n_words, attempt) for attempt in range(_TRIES))
            for prepare, ask in ((None, second), (second, second), (first, second))
        )
    seen = f"unknown {fresh_s * 1e3:.0f} ms, another's {others_s * 1e3:.0f}, one's own {own_s * 1e3:.0f}"
    if others_s < (fresh_s + own_s) / 2:
        raise Missed(f"another's prompt is answered sooner than an unknown one: {seen}")
    return seen


def _took_s(prepare: Asked | None, ask: Asked, n_words: int, attempt: int) -> float:
    """Seconds until `ask` has one token of a prompt that `prepare` has sent before; None: no client has."""
    name = f"{attempt} {prepare and prepare.key} "
    prompt = name + " ".join(f"word{(index * 7919 + attempt) % 1000}" for index in range(n_words))
    if prepare is not None:
        prepare.complete(prompt, 1)
    began = time.monotonic()
    status, said = ask.complete(prompt, 1)
    if status != 200:
        raise Missed(f"{status} {said}")
    return time.monotonic() - began


def many_choices(siege: Siege) -> str:
    """Requests with 128 choices and all log-probabilities: another key finds its place, memory is bounded."""
    keys = ("--api-key", KEYS[0], "--api-key", KEYS[1])
    with siege.server(*keys, environment={"PHASEWISE_MAX_SEQUENCES_PER_KEY": "8"}) as server:
        modest = siege.asked(server, KEYS[1])
        line = siege.under_attack(
            server, _choices, siege.asked(server, KEYS[0]), well_behaved=modest.complete
        )
    with siege.server(*keys) as server:
        greedy, modest = (siege.asked(server, key) for key in KEYS)
        with attacking(_choices, greedy):
            time.sleep(1.0)
            status, said = modest.complete("a", 2)
    if status != 200:
        raise Missed(f"with the default share another key is answered {status}: {said}")
    return line


def long_conversations(siege: Siege) -> str:
    """Bodies of megabytes for /v1/responses and /tokenize: they are worked on beside the event loop."""
    with siege.server("--api-key", KEYS[0], "--api-key", KEYS[1]) as server:
        modest = siege.asked(server, KEYS[1])
        for path, body in {"/v1/responses": {"input": "a"}, "/tokenize": {"prompt": "a"}}.items():
            modest.post(path, {"model": modest.model, **body})  # starts the processes that such bodies need
        return siege.under_attack(server, _long, siege.asked(server, KEYS[0]), well_behaved=modest.complete)


def batches_of_inputs(siege: Siege) -> str:
    """2,048 inputs in each request for vectors: another key's input waits for the batches in computation."""
    model = _embedding_model(siege)
    with siege.server("--api-key", KEYS[0], "--api-key", KEYS[1], model=model) as server:
        greedy, modest = (siege.asked(server, key) for key in KEYS)
        idle = [_embedded_s(modest) for _ in range(20)]
        health_s: list[float] = []
        with attacking(_batches, greedy):
            time.sleep(1.0)
            beside = []
            end_s = time.monotonic() + siege.seconds
            while time.monotonic() < end_s:
                beside.append(_embedded_s(modest))
                began = time.monotonic()
                greedy.get("/health")
                health_s.append(time.monotonic() - began)
        line = (
            f"median {statistics.median(beside) * 1e3:.0f} ms (idle {statistics.median(idle) * 1e3:.0f}), "
            f"most {max(beside) * 1e3:.0f} ms, /health {max(health_s) * 1e3:.0f} ms"
        )
    if max(health_s) > HEALTH_S:
        raise Missed(f"/health took more than {HEALTH_S * 1e3:g} ms: {line}")
    return line


def _embedding_model(siege: Siege) -> str:
    if siege.model != TINY:
        return "all-minilm-l6-v2"
    from tests.support.models.encoder_models import write_encoder

    return str(write_encoder(siege.folder / "encoder", "bert"))


def _embedded_s(asked: Asked) -> float:
    """Seconds until one short input has its vector."""
    began = time.monotonic()
    status, said = asked.post("/v1/embeddings", {"model": asked.model, "input": "a"})
    if status != 200:
        raise Missed(f"another key's input is answered {status}: {said}")
    return time.monotonic() - began


def _batches(asked: Asked) -> None:
    def client() -> None:
        while True:
            with contextlib.suppress(OSError):
                asked.post("/v1/embeddings", {"model": asked.model, "input": ["a"] * 2048}, 600.0)
                time.sleep(0.1)

    all_at_once([client] * 4)


def _long(asked: Asked) -> None:
    items = [{"role": "user", "content": "x" * 300}] * 9999
    calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 9999
    bodies: dict[str, object] = {
        "/v1/responses": {"model": asked.model, "input": items},
        "/v1/responses?calls": {"model": asked.model, "input": calls},
        "/tokenize": {"model": asked.model, "prompt": "a b" * 100_000, "return_token_strs": True},
    }

    def client(path: str, body: object) -> None:
        content = json.dumps(body).encode()
        while True:
            with contextlib.suppress(OSError):
                asked.post(path, content)

    all_at_once([partial(client, path, body) for path, body in bodies.items()])


def _choices(asked: Asked) -> None:
    def client(n: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                asked.complete("a", 64, n=n, logprobs=20, ignore_eos=True)

    all_at_once([partial(client, n) for n in (128, 128, 8, 8)])


def full_contexts(siege: Siege) -> str:
    """64 clients of one key fill the model's context at once: each is answered or told to come back, another
    key's requests go on, and memory comes back."""
    with siege.server("--api-key", KEYS[0], "--api-key", KEYS[1]) as server:
        theirs, ours = (siege.asked(server, key) for key in KEYS)
        _, listed = theirs.get("/v1/models")
        context = int(listed["data"][0]["max_model_len"])
        prompt = [5 + index % 50 for index in range(context - 16)]
        ours.complete()
        before_mib = all_memory_mib(server.pid)
        filling = {"model": theirs.model, "max_tokens": 15, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(64) as clients:
            asked = [
                clients.submit(
                    theirs.post,
                    "/v1/completions",
                    {**filling, "prompt": [7 + index, *prompt]},
                    FULL_CONTEXT_S,
                )
                for index in range(64)
            ]
            beside = Counter(ours.complete()[0] for _ in range(3))
            statuses = Counter(future.result()[0] for future in asked)
        time.sleep(2.0)
        after_mib = all_memory_mib(server.pid)
    if not set(statuses) <= {200, 429} or set(beside) != {200}:
        raise Missed(f"answered {dict(statuses)}, the other key {dict(beside)}")
    memory = f"{before_mib:.0f} -> {after_mib:.0f} MiB"
    return f"{context} tokens: {dict(statuses)}, the other key {dict(beside)}, {memory}"
