"""Cost of parts of the API: the live view while clients stream, and a required call beside response_format.

    python benchmarks/api_costs.py --url http://127.0.0.1:8000 --model NAME [--rounds 6]

Both are compared in turns of changing order, and two loads without the view with each other, which shows what
the host itself does.
"""

from __future__ import annotations

import http.client
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Annotated

import httpx
from typer import Option

from benchmarks.harness import Rounds, Spread, Yielded, commands, in_turns, ratios

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

    def ask(number: int) -> None:
        with httpx.Client(timeout=120) as client:
            asked = {**body, "prompt": f"{number}. Once upon a time", "ignore_eos": True}
            with client.stream("POST", f"{url}/v1/completions", json=asked) as answer:
                for _ in answer.iter_raw():
                    pass

    began = time.perf_counter()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(ask, range(_CLIENTS)))
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


def api_costs(url: Annotated[str, Option()], model: Annotated[str, Option()], rounds: Rounds = 6) -> Yielded:
    common = {"model": model, "max_tokens": 40, "temperature": 0}
    messages = [{"role": "user", "content": "Where does it rain? Name a city and a number of days."}]
    as_json = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    tool = {"type": "function", "function": {"name": "rain", "parameters": SCHEMA}}
    # Tools are text of the prompt: both requests send them, so that both prompts are equally long.
    called = {**common, "messages": messages, "tools": [tool], "tool_choice": "required"}
    shown = {**common, "messages": messages, "tools": [tool], "response_format": as_json}
    loads = {"without": rate, "with": rate_with_view, "again without": rate}
    rates = in_turns({name: partial(measure, url, model) for name, measure in loads.items()}, rounds)
    for name, taken in rates.items():
        yield {"view": name, "tokens/s": Spread.of(taken), "over without": ratios(taken, rates["without"])}
    salts = count()

    def first(body: dict[str, object]) -> float:
        return first_token_ms(url, {**body, "cache_salt": f"{next(salts)} {time.time()}"})

    bodies = {"response_format": shown, "required": called}
    firsts = in_turns({name: partial(first, body) for name, body in bodies.items()}, rounds)
    for name, taken in firsts.items():
        yield {"request": name, "first event, ms": Spread.of(taken)}
    later = [a - b for a, b in zip(firsts["required"], firsts["response_format"], strict=True)]
    yield f"a required call's first event comes {Spread.of(later)} ms later, in pairs"


app = commands(__doc__, api_costs)

if __name__ == "__main__":
    app()
