"""Schemas of others, each asked of a confined process once: its seconds and bytes are measured from outside.

    python -m tests.soak.drawn_schemas --drawn 1000     # of hypothesis-jsonschema, with hypothesis 6.150
    python -m tests.soak.drawn_schemas --suite PATH     # a checkout of JSON-Schema-Test-Suite
    python -m tests.soak.drawn_schemas --templates 1000 # templates with filters

Each is given the server's own bounds, in the process that the server itself would use. Templates are asked
of a server over HTTP, whose engine computes nothing. Their seconds are those until an answer comes, their
bytes the growth of the largest child, as the kernel counts it. Exit code 1: one of them took more than the
bounds allow, or was answered by anything but a result or one line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from phasewise.serving.errors import ContextLengthExceeded, ModelError, RequestError
from phasewise.serving.grammar.guides import BOUNDS, Grammar, TokenView
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.sandbox.confined import Bounds, CancelToken, ConfinedError, ConfinedProcess, Overrun
from phasewise.serving.text.chat import Conversation, Conversations
from phasewise.serving.text.chat_template import ChatTemplateError
from tests.soak.health_probe import watching_health
from tests.soak.hostile_rows.siege import process_tree
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.servers.fake_server import fake_server

EXTRA_S = 1.0
"""Beyond the bound: for a process that takes its place, and a machine with others at work."""
EXTRA_BYTES = 32 << 20
"""Beyond the bound, which counts address space from the job's beginning: for the stack and what is loaded."""
TEMPLATE_BOUNDS = Bounds(seconds=2.0, memory_bytes=256 << 20)
_POLL_S = 0.002
_CONTEXT = 20_000
"""Tokens, of one character each."""
_NEEDS = "it needs pip install hypothesis-jsonschema hypothesis==6.150.0, in an environment of their own"
_SAY_NOTHING = frozenset(
    {"$id", "$schema", "$ref", "$comment", "definitions", "default", "title", "description"}
)
_INNERMOST: Sequence[Any] = (
    True,
    {"type": "string", "maxLength": 99},
    {"type": "integer", "minimum": -5, "maximum": 10**9},
    {"pattern": "(a|b)*c{1,9}"},
    {"enum": [1, "two", None]},
    {"type": "array", "items": {"type": "number"}, "maxItems": 50},
)


@dataclass
class Seen:
    """The outcomes, seconds and bytes of a run, and the jobs that missed a bound."""

    bounds: Bounds
    base_bytes: int = 0
    """Memory of a confined process before its first job."""
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    growth_bytes: list[int] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    """Ascending: what /health took meanwhile, where a server was asked."""

    def note(self, text: str, outcome: str, said: str, seconds: float, n_bytes: int) -> None:
        self.outcomes[outcome] += 1
        self.seconds.append(seconds)
        self.growth_bytes.append(n_bytes)
        if seconds > self.bounds.seconds + EXTRA_S:
            self.missed.append(f"{seconds:.1f} s: {text}")
        if n_bytes > self.bounds.memory_bytes + EXTRA_BYTES:
            self.missed.append(f"{n_bytes >> 20} MiB: {text}")
        if "\n" in said:
            self.missed.append(f"an answer of several lines: {text}")

    def report(self, what: str) -> bool:
        """Print it; whether every bound held."""
        if not self.seconds:
            print(f"FAIL {what}: none was found")
            return False
        seconds, n_bytes = sorted(self.seconds), sorted(self.growth_bytes)
        middle, late = len(seconds) // 2, len(seconds) * 99 // 100
        print(
            f"{'FAIL' if self.missed else 'ok  '} {what}: {len(seconds)}, "
            + ", ".join(f"{n} {outcome}" for outcome, n in self.outcomes.most_common())
            + f"; seconds median {seconds[middle]:.4f}, 99 % {seconds[late]:.3f}, most {seconds[-1]:.3f}; "
            f"MiB median {n_bytes[middle] / 2**20:.1f}, 99 % {n_bytes[late] / 2**20:.1f}, "
            f"most {n_bytes[-1] / 2**20:.1f} "
            f"(bounds {self.bounds.seconds:g} s, {self.bounds.memory_bytes >> 20} MiB)"
        )
        if self.health_s:
            late = self.health_s[len(self.health_s) * 99 // 100]
            print(
                f"     /health meanwhile: {len(self.health_s)} times, 99 % {late * 1e3:.0f} ms, "
                f"most {self.health_s[-1] * 1e3:.0f} ms"
            )
        for schema_text in self.missed[:10]:
            print(f"     {schema_text[:300]}")
        return not self.missed


class Meter:
    """The most memory that one of this process's children has had, beyond `base_bytes`, while a job runs.

    The kernel keeps each process's peak; it is read every 2 ms, since a process that meets a bound ends.
    """

    def __init__(self, base_bytes: int) -> None:
        self._over = threading.Event()
        self._base_bytes = base_bytes
        self._most = 0

    def __enter__(self) -> Meter:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._most = max(self._most, _largest_child_bytes())

    @property
    def growth_bytes(self) -> int:
        return max(0, self._most - self._base_bytes)

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            self._most = max(self._most, _largest_child_bytes())


def _largest_child_bytes() -> int:
    most_bytes = 0
    for pid in process_tree(_own_pid())[1:]:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            most_bytes = max(most_bytes, int(status.split("VmHWM:")[1].split()[0]) * 1024)
        except (OSError, IndexError):  # it has just ended
            continue
    return most_bytes


def _own_pid() -> int:
    return int(Path("/proc/self").resolve().name)


def of_hypothesis(n: int, seed: int) -> Iterator[Any]:
    """Up to `n` different schemas that hypothesis-jsonschema draws from the meta-schema of draft 7."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis.errors import NonInteractiveExampleWarning
    from hypothesis_jsonschema import from_schema
    from jsonschema.validators import Draft7Validator

    warnings.simplefilter("ignore", NonInteractiveExampleWarning)
    drawn: dict[str, Any] = {}

    @seeded(seed)
    @settings(
        max_examples=2 * n,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schema=from_schema(_unrolled(Draft7Validator.META_SCHEMA)))
    def draw(schema: Any) -> None:
        drawn[json.dumps(schema)] = schema

    draw()
    yield from list(drawn.values())[:n]


def _unrolled(meta: Any, n_levels: int = 1) -> Any:
    """The meta-schema with schemas in schemas `n_levels` deep: hypothesis-jsonschema knows no recursion."""
    inner = _unrolled(meta, n_levels - 1) if n_levels else {"enum": list(_INNERMOST)}
    definitions = meta["definitions"]

    def written_out(part: Any) -> Any:
        if isinstance(part, list):
            return [written_out(child) for child in part]
        if not isinstance(part, dict):
            return part
        reference = part.get("$ref")
        if reference == "#":
            return inner
        if isinstance(reference, str):
            return written_out(definitions[reference.rpartition("/")[2]])
        return {name: written_out(child) for name, child in part.items() if name != "default"}

    properties = {
        name: written_out(child) for name, child in meta["properties"].items() if name not in _SAY_NOTHING
    }
    return {"type": "object", "properties": properties, "additionalProperties": False, "minProperties": 1}


def of_suite(checkout: Path) -> Iterator[Any]:
    """Every schema of the suite's drafts, each once."""
    met = set()
    for path in sorted((checkout / "tests").rglob("*.json")):
        try:
            groups = json.loads(path.read_text())
        except ValueError:
            continue
        for group in groups if isinstance(groups, list) else ():
            text = json.dumps(group["schema"])
            if text not in met:
                met.add(text)
                yield group["schema"]


def try_schemas(schemas: Iterator[Any], seconds: float) -> Seen:
    """Ask for each, as the server would, until all are tried or `seconds` are over."""
    tokens = TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode)
    process = ConfinedProcess("grammar", tokens.as_told(), BOUNDS)
    process.start()
    seen, end_s = Seen(BOUNDS, _largest_child_bytes()), time.monotonic() + seconds
    try:
        for schema in schemas:
            text = json.dumps(schema)
            _try(seen, text, lambda: process.ask(json.dumps(Grammar.of_schema(schema)).encode()))  # noqa: B023 (called at once)
            if time.monotonic() > end_s:
                break
    finally:
        process.close()
    return seen


def try_templates(n: int, seed: int, seconds: float, bound_s: float) -> Seen:
    """Templates of filters, methods and loops over large values, each as that of a server's model.

    A conversation is sent over HTTP for each; a process beside asks /health all the time.
    """
    bounds = Bounds(bound_s, TEMPLATE_BOUNDS.memory_bytes)
    seen, end_s, rng = Seen(bounds), time.monotonic() + seconds, random.Random(seed)
    template: list[Conversations] = []

    def encode_chat(chat: Conversation, cancel: CancelToken) -> list[int]:
        text = template[0].write(chat, cancel).text
        if len(text) > _CONTEXT:
            raise ContextLengthExceeded("the context cannot hold that", "messages")
        return encode(text)

    def ask() -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60.0)
        if answer.status_code not in (200, 400):
            seen.missed.append(f"status {answer.status_code}: {source}")
        elif answer.status_code == 400:
            said = answer.json()["error"]["message"]
            raise Overrun(said) if "was stopped" in said else RequestError(said)

    def model(served: ServedModel) -> ServedModel:
        return replace(served, encode_chat=encode_chat)

    with (
        fake_server(model=model, context=_CONTEXT + 100) as server,
        watching_health(server.url) as seen.health_s,
    ):
        for _ in range(n):
            source = _template(rng)
            conversations = Conversations(source, {}, [], bounds)
            try:
                conversations.start()
            except (ChatTemplateError, ModelError):
                seen.outcomes["no template"] += 1
                conversations.close()
                continue
            template[:] = [conversations]
            seen.base_bytes = _largest_child_bytes()
            try:
                _try(seen, source, ask)
            finally:
                conversations.close()
            if time.monotonic() > end_s:
                break
    return seen


def _template(rng: random.Random) -> str:
    from tests.serving.sandbox.test_drawn_bombs import FILTERS, METHODS, VALUES

    value = rng.choice(VALUES)
    for _ in range(rng.randrange(7)):
        value = f"({value}) | {rng.choice(FILTERS)}"
    body = f"{{{{ ({value}){rng.choice(METHODS)} }}}}"
    for _ in range(rng.randrange(3)):
        body = f"{{% for i in range({rng.randrange(1, 100_000)}) %}}{body}{{% endfor %}}"
    return body


def _try(seen: Seen, text: str, ask: Callable[[], object]) -> None:
    outcome, said = "answered", ""
    with Meter(seen.base_bytes) as meter:
        began = time.monotonic()
        try:
            ask()
        except Overrun as error:
            outcome, said = "met a bound", str(error)
        except (RequestError, ConfinedError, ChatTemplateError, ModelError) as error:
            outcome, said = "refused", str(error)
        took_s = time.monotonic() - began
    seen.note(text, outcome, said, took_s, meter.growth_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="schemas of hypothesis-jsonschema")
    parser.add_argument("--suite", type=Path, metavar="PATH", help="a checkout of JSON-Schema-Test-Suite")
    parser.add_argument("--templates", type=int, default=0, metavar="N", help="templates with filters")
    parser.add_argument(
        "--template-seconds",
        type=float,
        default=TEMPLATE_BOUNDS.seconds,
        metavar="S",
        help="bound of one template; default: the server's",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop each part after this time")
    asked = parser.parse_args(arguments)
    held = True
    if asked.drawn:
        try:
            schemas = of_hypothesis(asked.drawn, asked.seed)
            held &= try_schemas(schemas, asked.seconds).report("schemas of hypothesis-jsonschema")
        except (ImportError, AttributeError) as error:
            print(f"skip schemas of hypothesis-jsonschema: {error}; {_NEEDS}")
    if asked.suite is not None and not (asked.suite / "tests").is_dir():
        print(f"skip schemas of the JSON Schema Test Suite: {asked.suite} is no checkout of it")
    elif asked.suite is not None:
        held &= try_schemas(of_suite(asked.suite), asked.seconds).report(
            "schemas of the JSON Schema Test Suite"
        )
    if asked.templates:
        held &= try_templates(asked.templates, asked.seed, asked.seconds, asked.template_seconds).report(
            "templates"
        )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
