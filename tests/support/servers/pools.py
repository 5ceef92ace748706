"""Pools of real instances over a tiny model, and the same requests on one engine in this process."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from phasewise.cluster.real.front import Front
from phasewise.cluster.real.local_instances import LocalInstances
from phasewise.cluster.real.supervisor import FrontSettings
from phasewise.cluster.routing import Role
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Delivery, Failure, Submit
from phasewise.serving.engine.open_engine import ModelText, OpenEngine, open_engine
from phasewise.serving.grammar.guides import Grammar, GuideCompiler, ThoughtMarks
from phasewise.serving.grammar.late_guides import ThoughtGuide
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.adapter_files import with_adapters
from phasewise.serving.prefix_store.store import PrefixSettings
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.sampling.sampling import GREEDY, SampledToken, SamplingParams
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from phasewise.workflows.opening.settings import NATIVE, Weights
from phasewise.workflows.serve.instance_process import MODULE, InstanceSpec
from tests.support.models.adapters import ATTENTION, drawn_pairs, write_peft
from tests.support.models.tiny_models import TinyShape, tiny_gguf, tiny_weights

PATIENCE_S = 60.0
"""Seconds that a test waits for an event that takes some tenths of a second on a quiet host."""

Told = list[tuple[str, tuple[SampledToken, ...], str | None]]
"""The pieces of an answer: text, tokens, finish reason."""


def tiny_model(folder: Path, context_length: int = 4096) -> Path:
    path = folder / "tiny.gguf"
    path.write_bytes(tiny_gguf(shape=TinyShape(context_length=context_length)).to_bytes())
    return path


def tiny_adapters(folder: Path) -> list[str]:
    """Two of `tiny_model`, of unlike ranks and weights, as `--lora` writes them: `a` and `b`."""
    weights = tiny_weights("llama", TinyShape(), 0)
    pairs = {"a": drawn_pairs(weights, "a", 4), "b": drawn_pairs(weights, "b", 7, ATTENTION)}
    return [f"{name}={write_peft(folder / name, own)}" for name, own in pairs.items()]


def size_of(
    path: Path,
    context_length: int = 2048,
    kv_slots: int = 4096,
    kv_format: str = "auto",
    kv_policy: str = "odma",
) -> EngineSize:
    """Room for some requests of a few hundred tokens, not for all of them at once."""
    model = load_model(str(path), "native")
    size = EngineSize.for_many(model, 8, None, 8 << 20)
    limits = replace(size.limits, context_length=context_length, max_batch_tokens=600)
    return replace(
        size, limits=limits, kv=replace(size.kv, slots=kv_slots, format=kv_format), kv_policy=kv_policy
    )


def is_there(pid: int) -> bool:
    """True if the process runs or is stopped; one that nobody has waited for yet is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def plans_of(n_ranks: int, first: int = 0) -> tuple[ServicePlan, ...]:
    """N ranks of a thread each, from core `first` on; not pinned, the cores are names alone."""
    ranks = tuple(RankCores((core,)) for core in range(first, first + n_ranks))
    return tuple(ServicePlan(phase, ranks) for phase in PHASES)


@dataclass
class PoolServer:
    """A front over running instances, and what it has delivered."""

    front: Front
    pieces: dict[str, Told] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    ended: queue.Queue[str] = field(default_factory=queue.Queue)
    stamps_ns: dict[str, list[int]] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """The pieces of each request, whole."""
    delivered_s: dict[str, list[float]] = field(default_factory=dict)
    """The times at which each piece reached whoever asked, of `time.monotonic`."""
    stopped: set[int] = field(default_factory=set)
    """Processes that hear no more: while a test waits, the front has heard nothing of them for very long."""

    def end(self, pid: int, number: signal.Signals) -> None:
        """Kill the process of an instance, or stop it; ProcessLookupError where it is gone."""
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            self.stopped.add(pid)

    def deliver(self, delivery: Delivery) -> None:
        for out in delivery.outs:
            if isinstance(out, Failure):
                self.failures[out.request_id] = out.error
                self.ended.put(out.request_id)
                continue
            self.take(out)

    def take(self, out: Answer) -> None:
        self.answers.setdefault(out.request_id, []).append(out)
        self.stamps_ns.setdefault(out.request_id, []).append(out.at_ns)
        self.delivered_s.setdefault(out.request_id, []).append(time.monotonic())
        self.pieces.setdefault(out.request_id, []).append((out.text, out.tokens, out.finish_reason))
        if out.finish_reason is not None:
            self.ended.put(out.request_id)

    def run(self, requests: Sequence[Submit]) -> dict[str, Told]:
        """Answers of all requests, sent at once. Raises the first failure."""
        for request in requests:
            self.front.send(request)
        self.wait_for(len(requests))
        for error in self.failures.values():
            raise error
        return {request.request_id: self.pieces[request.request_id] for request in requests}

    def wait_for(self, n_requests: int) -> None:
        for _ in range(n_requests):
            self.wait_until(lambda: not self.ended.empty(), "a request does not end")
            self.ended.get()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"{what}: {self.front.members()}"
            for member in self.front._members if self.stopped else ():
                if member.ready is not None and member.ready.pid in self.stopped:
                    member.heard_s = -math.inf
            time.sleep(0.01)

    def is_empty(self) -> bool:
        """True if every instance runs and none holds keys and values, or expects any."""
        members = self.front.members()
        return all(
            member["state"] == "running" and member["kv_slots_used"] == 0 and member["handing_over"] == 0
            for member in members
        )


@contextlib.contextmanager
def pools(
    path: Path,
    roles: Sequence[Role] = ("prompt", "token"),
    size: EngineSize | None = None,
    n_ranks: int = 1,
    most_restarts: int = 5,
    prefixes: PrefixSettings | None = None,
    weights: Weights = NATIVE,
    cores: Sequence[int] | None = None,
    db: str | None = None,
    module: str = MODULE,
    draft: str = "lookup",
    **settings: object,
) -> Iterator[PoolServer]:
    """Instances of the model at `path`, all ready. settings: of `FrontSettings`; without them no instance and
    no hand-over is given up because the machine is busy. db: the tuning database. module: what each runs.
    draft: what drafts three tokens of each answer in every step, as `--draft` has it.

    cores: the first of each instance, which is pinned to as many as it has ranks; None: none is pinned.
    """
    spec = InstanceSpec(
        str(path),
        weights,
        size or size_of(path),
        None,
        db,
        pinned=cores is not None,
        prefixes=prefixes,
        draft=draft,
        draft_tokens=3,
    )
    tells = [replace(spec, plans=plans_of(n_ranks, first)).tell for first in cores or [0] * len(roles)]
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        chosen = FrontSettings(
            f"ipc://{folder}/front",
            lambda index, life: f"ipc://{folder}/kv-{index}-{life}",
            **{"silent_s": PATIENCE_S, "hand_over_s": PATIENCE_S, **settings},  # type: ignore[arg-type]
        )
        launcher = LocalInstances(module, tells)
        server = PoolServer(front=None)  # type: ignore[arg-type]
        server.front = Front(
            roles,
            launcher,
            chosen,
            server.deliver,
            restarts=lambda: Restarts(most=most_restarts, longest_pause_s=0.1),
        )
        server.front.start()
        try:
            server.wait_until(lambda: server.front.state != "starting", "the instances start")
            assert server.front.lost is None, server.front.lost
            yield server
        finally:
            server.front.stop(PATIENCE_S)


def guides_of(path: Path) -> GuideCompiler:
    return ModelText(load_model(str(path), "native")).guide_compiler()


def open_alone(
    path: Path, size: EngineSize | None = None, n_ranks: int = 1, lora: Sequence[str] = ()
) -> OpenEngine:
    """One engine in this process that does both phases. lora: adapters, NAME=PATH each."""
    plans = {plan.phase: plan for plan in plans_of(n_ranks)}
    model = with_adapters(load_model(str(path), "native"), lora)
    return open_engine(model, plans, size or size_of(path), pinned=False)


def run_alone(opened: OpenEngine, requests: Sequence[Submit]) -> dict[str, Told]:
    """The same requests on one engine."""
    told: dict[str, Told] = {request.request_id: [] for request in requests}
    for request in requests:
        opened.engine.submit(request)
    while opened.engine.has_work:
        for out in opened.engine.step().outs:
            if isinstance(out, Failure):
                raise out.error
            told[out.request_id].append((out.text, out.tokens, out.finish_reason))
    return told


def texts(told: Mapping[str, Told]) -> dict[str, str]:
    """The answers' texts, however they were cut into pieces."""
    return {name: "".join(text for text, _, _ in pieces) for name, pieces in told.items()}


def prompt(n_tokens: int, salt: int = 0) -> tuple[int, ...]:
    """Token ids of a text that no other request has."""
    return tuple(3 + (salt * 31 + index * index + 7 * index) % 200 for index in range(n_tokens))


def mixed_requests(guides: GuideCompiler | None) -> list[Submit]:
    """One of every way to choose tokens, with prompts that end on and beside every edge."""
    samplings = [
        (GREEDY, 15),
        (SamplingParams(temperature=0.9, seed=11, top_k=40, top_p=0.95), 700),
        (SamplingParams(temperature=0.0, top_logprobs=3), 128),
        (SamplingParams(temperature=1.2, seed=3, frequency_penalty=0.7, presence_penalty=0.2), 257),
        (SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={70: 5.0}), 1300),
        (SamplingParams(temperature=0.7, seed=99, min_p=0.02, top_logprobs=0), 16),
    ]
    requests = [
        Submit(f"s{index}", prompt(n_prompt, index), 20, sampling, ignore_eos=True)
        for index, (sampling, n_prompt) in enumerate(samplings)
    ]
    if guides is not None:
        for index, grammar in enumerate(
            (Grammar.of_choices(["yes, indeed", "no"]), Grammar.of_pattern("[0-9]{3}-[a-f]{2,9}"))
        ):
            guide = guides.compile_proven(grammar, 1)
            sampling = SamplingParams(temperature=1.0, seed=index)
            requests.append(Submit(f"g{index}", prompt(300 + index, 50), 20, sampling, guide=guide))
        seven = guides.compile_proven(Grammar.of_choices(["seven"]), 1)
        thinking = ThoughtGuide(seven, ThoughtMarks(b"<", b">", True, None), guides.tokens)
        requests.append(Submit("t", prompt(90), 20, SamplingParams(temperature=1.0, seed=5), guide=thinking))
    return requests
