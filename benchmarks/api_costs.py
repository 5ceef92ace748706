"""What parts of the API cost: the live view while clients stream, and a required call beside response_format.

    python benchmarks/api_costs.py --url http://127.0.0.1:8000 --model NAME [--rounds 6]

Both are compared in turns of changing order, and two loads without the view with each other, which shows what
the host itself does; medians are printed. Exit code 0 always: it judges nothing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

_CLIENTS = 8
_TOKENS = 768
"""Tokens of each answer. A load then takes seconds, and the view asks several times during it."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def rate(url: str, model: str) -> float:
    """Tokens a second of eight clients that stream."""
    body = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": _TOKENS,
        "temperature": 0,
        "stream": True,
    }

    def one(number: int) -> None:
        with httpx.Client(timeout=120) as client:
            asked = {**body, "prompt": f"{number}. Once upon a time", "ignore_eos": True}
            with client.stream("POST", f"{url}/v1/completions", json=asked) as answer:
                for _ in answer.iter_raw():
                    pass

    began = time.perf_counter()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(one, range(_CLIENTS)))
    return _CLIENTS * _TOKENS / (time.perf_counter() - began)


def live(url: str, ends: threading.Event) -> None:
    """As the page's live view asks. By http.answers.client: to make an httpx.Client takes tens of
    milliseconds
    of this process, which loads the server and is no browser."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    while True:
        connection.request("GET", "/live")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        if ends.wait(1.0):
            connection.close()
            return


def rate_with_view(url: str, model: str) -> float:
    ends = threading.Event()
    thread = threading.Thread(target=live, args=(url, ends))
    thread.start()
    try:
        return rate(url, model)
    finally:
        ends.set()
        thread.join()


def first_token_ms(url: str, body: dict[str, object]) -> float:
    """From sending to the first event; grammars are known, since the first round is not counted."""
    with httpx.Client(timeout=120) as client:
        began = time.perf_counter()
        with client.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as answer:
            for chunk in answer.iter_raw():
                if chunk:
                    return (time.perf_counter() - began) * 1e3
    raise RuntimeError("no event came")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    common = {"model": given.model, "max_tokens": 40, "temperature": 0}
    messages = [{"role": "user", "content": "Where does it rain? Name a city and a number of days."}]
    as_json = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    held = {**common, "messages": messages, "response_format": as_json}
    tool = {"type": "function", "function": {"name": "rain", "parameters": SCHEMA}}
    # Tools are text of the prompt: both requests send them, so that both prompts are equally long.
    called = {**common, "messages": messages, "tools": [tool], "tool_choice": "required"}
    shown = {**held, "tools": [tool]}
    rate(given.url, given.model)
    loads = [("without", rate), ("with", rate_with_view), ("again without", rate)]
    rates: dict[str, list[float]] = {name: [] for name, _ in loads}
    firsts: dict[str, list[float]] = {"response_format": [], "required": []}
    for number in range(given.rounds + 1):
        for name, measure in loads[number % 3 :] + loads[: number % 3]:
            rates[name].append(measure(given.url, given.model))
        bodies = [("response_format", shown), ("required", called)]
        for name, body in bodies if number % 2 else reversed(bodies):
            salted = {**body, "cache_salt": f"{name}{number}{time.time()}"}
            firsts[name].append(first_token_ms(given.url, salted))

    def ratios(name: str) -> list[float]:
        return sorted(round(a / b, 3) for a, b in zip(rates[name][1:], rates["without"][1:], strict=True))

    firsts_of = list(zip(firsts["required"][1:], firsts["response_format"][1:], strict=True))
    out = {
        "tokens_per_s_without_view": statistics.median(rates["without"][1:]),
        "tokens_per_s_with_view": statistics.median(rates["with"][1:]),
        "view_ratios_of_pairs": ratios("with"),
        "null_ratios_of_pairs": ratios("again without"),
        "first_event_ms_response_format": statistics.median(firsts["response_format"][1:]),
        "first_event_ms_required": statistics.median(firsts["required"][1:]),
        "first_event_ms_differences_of_pairs": sorted(round(a - b, 1) for a, b in firsts_of),
    }
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
