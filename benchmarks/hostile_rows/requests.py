"""Rows 6, 7, 8 and 16: what a request may say, and what its answer tells or holds."""

from __future__ import annotations

import contextlib
import threading
import time

from row_runner import Missed

from hostile_rows.siege import Asked, Siege, attacking

KEYS = ("first-key", "second-key")
_TRIES = 3


def huge_integers(siege: Siege) -> str:
    """An integer of 4,300 digits is a 400, and nothing here is a 500."""
    digits = b"9" * 4300
    with siege.server() as server:
        client = siege.asked(server)
        for field in (b"max_tokens", b"n", b"top_k", b"best_of", b"logprobs"):
            body = b'{"model":"%s","prompt":"a","%s":%s}' % (client.model.encode(), field, digits)
            status, said = client.post("/v1/completions", body)
            if status != 400:
                raise Missed(f"{field.decode()} of 4300 digits: {status} {said}")
        if any('status="500"' in name for name in server.metrics()):
            raise Missed("/metrics counts a 500")
        return "five fields, each a 400"


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
    prompt = name + " ".join(f"word{(at * 7919 + attempt) % 1000}" for at in range(n_words))
    if prepare is not None:
        prepare.complete(prompt, 1)
    began = time.monotonic()
    status, said = ask.complete(prompt, 1)
    if status != 200:
        raise Missed(f"{status} {said}")
    return time.monotonic() - began


def many_choices(siege: Siege) -> str:
    """Requests with 128 choices and all log-probabilities: another key finds its place, memory is bounded."""
    keys = ("--api-key", KEYS[0], "--api-key", KEYS[1], "--max-sequences-per-key", "8")
    with siege.server(*keys) as server:
        modest = siege.asked(server, KEYS[1])
        line = siege.under_attack(
            server, _choices, siege.asked(server, KEYS[0]), well_behaved=modest.complete
        )
    with siege.server(*keys[:4]) as server:
        greedy, modest = (siege.asked(server, key) for key in KEYS)
        with attacking(_choices, greedy):
            time.sleep(1.0)
            status, said = modest.complete("a", 2)
    if status != 200:
        raise Missed(f"with the default share another key is answered {status}: {said}")
    return line


def _choices(asked: Asked) -> None:
    def client(n: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                asked.complete("a", 64, n=n, logprobs=20, ignore_eos=True)

    threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in (128, 128, 8, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
