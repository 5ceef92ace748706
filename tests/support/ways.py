"""The same requests in every way of computing them: `python -m tests.support.ways [MODEL [ARITHMETIC]]`.

Prints a markdown table: in how many of them every token, text and log-probability is what it is when each
request is computed alone, equal in every bit. MODEL: a GGUF file or a directory; none: a tiny random model.
ARITHMETIC: as `--arithmetic` has it; ways that start processes of their own are left out then.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from phasewise.cython_kernels import isa
from phasewise.cython_kernels.schedules import has_tiles_arithmetic
from phasewise.serving.drafts.opening import DraftSource
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.errors import RankLost
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.prefix_store.store import PrefixSettings
from phasewise.serving.sampling.sampling import SampledToken, SamplingParams
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan
from phasewise.workflows.options import ARITHMETIC_CHOICES, PATHS, ArithmeticChoice, check_arithmetic
from tests.support.servers import gated_instance
from tests.support.servers.fake_engine import run_all
from tests.support.servers.pools import Told, plans_of, pools, tiny_model

N_REQUESTS = 24
ANSWER_TOKENS = 24
LONGEST_PROMPT = 1300
CONTEXT = 2048
ROOMY_SLOTS = N_REQUESTS * CONTEXT
TIGHT_SLOTS = 2 * CONTEXT
STEPS_TO_A_LOSS = 35
TOKENS_TO_A_LOSS = 8

Answers = dict[str, tuple[tuple[SampledToken, ...], str]]
"""By request: all tokens with their log-probabilities, and the whole text."""


@dataclass(frozen=True)
class Asked:
    """The model and its requests."""

    path: Path
    model: PackedModel
    requests: tuple[Submit, ...]
    arithmetic: ArithmeticChoice = "tuned"

    @property
    def schedules(self) -> dict[Phase, ScheduleTable]:
        """Nothing is tuned but the arithmetic."""
        table = ScheduleTable().asked(self.arithmetic, PATHS.get(self.arithmetic))
        return dict.fromkeys(PHASES, table)

    def size(self, slots: int = ROOMY_SLOTS, policy: str = "odma", **limits: Any) -> EngineSize:
        """Room for all requests, or for a few of them."""
        size = EngineSize.for_many(self.model, N_REQUESTS, None, 8 << 30)
        limits = {"context_length": CONTEXT, "max_batch_tokens": 512, "max_sequences": N_REQUESTS, **limits}
        kv = replace(size.kv, slots=slots)
        return replace(size, limits=replace(size.limits, **limits), kv=kv, kv_policy=policy)


class Way(NamedTuple):
    """A way of computing the requests."""

    name: str
    compute: Callable[[Asked], Answers]
    has_arithmetic: bool = True
    """False where it starts processes whose arithmetic is the default one."""


def drawn_requests(vocab_size: int, seed: int = 41) -> tuple[Submit, ...]:
    """Greedy and sampled by a seed, log-probabilities on, prompts of 7 to LONGEST_PROMPT tokens."""
    rng = random.Random(seed)
    requests = []
    for number in range(N_REQUESTS):
        n_tokens = round(7 * (LONGEST_PROMPT / 7) ** (number / (N_REQUESTS - 1)))
        ids = tuple(rng.randrange(min(vocab_size, 3), vocab_size) for _ in range(n_tokens))
        sampling = SamplingParams(temperature=0.9 * (number % 2), seed=number, top_p=0.95, top_logprobs=3)
        requests.append(Submit(f"r{number}", ids, ANSWER_TOKENS, sampling, ignore_eos=True))
    return tuple(rng.sample(requests, N_REQUESTS))


def answers_of(opened: OpenEngine, *groups: Sequence[Submit]) -> Answers:
    """Each group when the one before has ended."""
    answers: Answers = {}
    for group in groups:
        for name, outs in run_all(opened.engine, *group, max_steps=1 << 20).items():
            pieces = [piece for piece in outs if isinstance(piece, Answer)]
            assert len(pieces) == len(outs), outs
            tokens = tuple(token for piece in pieces for token in piece.tokens)
            answers[name] = tokens, "".join(piece.text for piece in pieces)
    return answers


def opened(asked: Asked, size: EngineSize, n_threads: int = 2, **settings: Any) -> OpenEngine:
    """On a rank of so many threads."""
    cores = RankCores(tuple(range(n_threads)))
    plans = {phase: ServicePlan(phase, (cores,)) for phase in PHASES}
    return open_engine(asked.model, plans, size, pinned=False, schedules=asked.schedules, **settings)


def alone(asked: Asked) -> Answers:
    """Each request when nothing else is computed, nor kept."""
    with opened(asked, asked.size(prefix_reuse=False)) as engine:
        return answers_of(engine, *([request] for request in asked.requests))


def again(asked: Asked) -> Answers:
    """Each once more, taking over what the first time left."""
    twice = [
        [replace(request, request_id=name)]
        for request in asked.requests
        for name in ("first", request.request_id)
    ]
    with opened(asked, asked.size()) as engine:
        answers = answers_of(engine, *twice)
        assert engine.engine.load().prefix_hits > 0
        return answers


def by_groups(n_together: int) -> Callable[[Asked], Answers]:
    def compute(asked: Asked) -> Answers:
        starts = range(0, N_REQUESTS, n_together)
        with opened(asked, asked.size()) as engine:
            return answers_of(engine, *(asked.requests[start : start + n_together] for start in starts))

    return compute


def together(n_threads: int = 2, **changed: Any) -> Callable[[Asked], Answers]:
    """All at once. changed: arguments of `Asked.size`."""

    def compute(asked: Asked) -> Answers:
        with opened(asked, asked.size(**changed), n_threads) as engine:
            return answers_of(engine, asked.requests)

    return compute


def drafted(asked: Asked) -> Answers:
    with opened(asked, asked.size(), drafts=DraftSource()) as engine:
        return answers_of(engine, asked.requests)


def from_disk(asked: Asked) -> Answers:
    """Each once more, on an engine that reads what another one kept."""
    size = asked.size()
    size = replace(size, kv=replace(size.kv, shared=True))
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        settings = PrefixSettings(folder)
        with opened(asked, size, prefixes=settings) as engine:
            answers_of(engine, *([request] for request in asked.requests))
        with opened(asked, size, prefixes=settings) as engine:
            answers = answers_of(engine, asked.requests)
            stored = engine.engine.load().stored
            assert stored is not None
            assert stored.hits > 0
        return answers


def two_ranks(asked: Asked) -> Answers:
    plans = {plan.phase: plan for plan in plans_of(2)}
    with open_engine(asked.model, plans, asked.size(), pinned=False, schedules=asked.schedules) as engine:
        return answers_of(engine, asked.requests)


def after_losses(asked: Asked) -> Answers:
    """All at once; keys and values are lost in the midst of answers, which go on."""
    pieces: dict[str, list[Answer]] = {request.request_id: [] for request in asked.requests}
    n_steps = 0
    with opened(asked, asked.size()) as whole:
        engine = whole.engine
        for request in asked.requests:
            engine.submit(request)
        while engine.has_work:
            for out in engine.step().outs:
                assert isinstance(out, Answer), out
                pieces[out.request_id].append(out)
            n_steps += 1
            if n_steps % STEPS_TO_A_LOSS == 0:
                assert not engine.recover(RankLost("rank 1 died")).outs
        assert engine.n_continued > 0
    return {
        name: (tuple(token for out in outs for token in out.tokens), "".join(out.text for out in outs))
        for name, outs in pieces.items()
    }


def pooled(kv_transfer: str) -> Callable[[Asked], Answers]:
    """Prompts on one instance, answers on another."""

    def compute(asked: Asked) -> Answers:
        settings = {"kv_transfer": kv_transfer, "split_above_tokens": 0}
        with pools(asked.path, size=asked.size(), **settings) as server:
            told = server.run(asked.requests)
            assert server.front.n_divided > 0
        return _together(told)

    return compute


def after_lost_instances(asked: Asked) -> Answers:
    """All at once over two instances, both of which are killed twice in the midst of answers: neither life
    computes so far that an answer could end."""
    with (
        tempfile.TemporaryDirectory(prefix="pw-") as folder,
        gated_instance.gate(Path(folder), TOKENS_TO_A_LOSS) as opened,
        pools(
            asked.path, ("mixed", "mixed"), asked.size(), module=gated_instance.MODULE, most_restarts=100
        ) as server,
    ):
        for request in asked.requests:
            server.front.send(request)
        killed: set[int] = set()
        for _ in range(2):
            server.wait_until(
                lambda: bool(gated_instance.held(Path(folder)) - killed and server.pieces), "none is held"
            )
            lives = {*server.front.pids.values()} - killed
            for pid in lives:
                os.kill(pid, signal.SIGKILL)
            killed.update(lives)
        opened.touch()
        server.wait_for(N_REQUESTS)
        assert not server.failures, server.failures
        assert server.front.recoveries().answers_continued > 0
    return _together(server.pieces)


def _together(told: dict[str, Told]) -> Answers:
    return {
        name: (
            tuple(token for _, tokens, _ in pieces for token in tokens),
            "".join(piece[0] for piece in pieces),
        )
        for name, pieces in told.items()
    }


def scored(asked: Asked) -> Answers:
    """Prompt and answer as one prompt whose log-probabilities are asked for."""
    generated = alone(asked)
    whole = []
    for request in asked.requests:
        ids = (*request.prompt_token_ids, *(token.token_id for token in generated[request.request_id][0]))
        whole.append(replace(request, prompt_token_ids=ids, max_tokens=0, prompt_logprobs=3))
    answers: Answers = {}
    with opened(asked, asked.size()) as engine:
        for name, (piece,) in run_all(engine.engine, *whole, max_steps=1 << 20).items():
            assert isinstance(piece, Answer)
            assert piece.prompt is not None
            tokens = piece.prompt[-ANSWER_TOKENS:]
            begins = [token.begin for token in generated[name][0]]
            said = tuple(
                SampledToken(token.token_id, token.logprob, token.top, begin)
                for token, begin in zip(tokens, begins, strict=True)
            )
            answers[name] = said, generated[name][1]
    return answers


def lower(name: str) -> Callable[[Asked], Answers]:
    """By another instruction set, which packs the weights anew."""

    def compute(asked: Asked) -> Answers:
        with isa.using(name):
            return alone(replace(asked, model=load_model(str(asked.path), "native")))

    return compute


WAYS = (
    Way("alone, another time", alone),
    Way("again, with prefixes kept", again),
    Way("8 together", by_groups(8)),
    Way("24 together", together()),
    Way("one thread", together(n_threads=1)),
    Way("prompts in chunks of 64", together(max_batch_tokens=64)),
    Way("without prefix reuse", together(prefix_reuse=False)),
    Way("drafts by lookup", drafted),
    Way("two ranks", two_ranks),
    Way("workers lost again and again", after_losses),
    Way("prompts from disk", from_disk),
    Way("prompt and token pools", pooled("shm"), has_arithmetic=False),
    Way("pools, KV over TCP", pooled("tcp"), has_arithmetic=False),
    Way("instances lost again and again", after_lost_instances, has_arithmetic=False),
    Way("paged KV under pressure", together(slots=TIGHT_SLOTS, policy="paged")),
    Way("scored in one prefill", scored),
)


def lower_ways(arithmetic: ArithmeticChoice) -> Iterator[Way]:
    """Instruction sets below the one in use that have the arithmetic, the nearest first."""
    names = isa.usable()
    for name in reversed(names[: names.index(isa.active())]):
        with isa.using(name):
            has_it = arithmetic != "tiles" or has_tiles_arithmetic()
        if has_it:
            yield Way(f"{name} for {isa.active()}", lower(name))


def rows(
    path: Path, ways: Sequence[Way], arithmetic: ArithmeticChoice = "tuned"
) -> Iterator[tuple[str, int, int]]:
    """Of each way its name, and how many requests are equal in every bit, and how many are not."""
    model = load_model(str(path), "native")
    asked = Asked(path, model, drawn_requests(model.config.vocab_size), arithmetic)
    wanted = alone(asked)
    assert len(wanted) == N_REQUESTS
    for way in ways:
        answers = way.compute(asked)
        n_equal = sum(answers.get(name) == answer for name, answer in wanted.items())
        yield way.name, n_equal, N_REQUESTS - n_equal


def _choice_of(word: str) -> ArithmeticChoice:
    for choice in ARITHMETIC_CHOICES:
        if choice == word:
            check_arithmetic(choice)
            return choice
    raise SystemExit(f"{word} is none of {', '.join(ARITHMETIC_CHOICES)}")


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else tiny_model(Path(folder))
        arithmetic = _choice_of(sys.argv[2] if len(sys.argv) > 2 else "tuned")
        ways = [way for way in WAYS if way.has_arithmetic or arithmetic == "tuned"]
        os.environ.setdefault("XDG_CACHE_HOME", folder)
        print("| way | equal | unequal |\n|---|---|---|")
        for name, n_equal, n_unequal in rows(path, (*ways, *lower_ways(arithmetic)), arithmetic):
            print(f"| {name} | {n_equal} | {n_unequal} |", flush=True)


if __name__ == "__main__":
    main()
