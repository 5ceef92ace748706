"""Gain of drafts: the same answers with and without them, in turns, tokens checked to be the same.

    python benchmarks/drafts.py lookup [MODEL]        # text that repeats its input, and text that does not
    python benchmarks/drafts.py written [MODEL]       # the same, the answers being written beforehand
    python benchmarks/drafts.py model TARGET DRAFT    # a draft model made to agree 70 % of the time

`lookup` answers prompts over bundled text (workflows/evaluate/alice.txt): copies, edits and quotations, which
repeat it, and seeded stories, which repeat nothing. Ratio: decode tokens a second with drafts over those
without, the median of pairs. "null" is the same of two answers without drafts in the same turns: what the
host alone makes of 1.

`written` computes every step of MODEL, then names the next token of an answer that was written beforehand:
the copy, the edit and the summary that were asked for, and passages that have nothing to do with their
prompts. A model of random weights, or one that does not do as it is told, then has text of the kind meant.

`model` computes every step of DRAFT, then replaces what it says: the token that TARGET gives without drafts
in the stated share of cases, another one in the others. So random weights will do. The best that acceptance
and step times allow is that of the best fixed length k: (1 + a + .. + a^k) T(1) / (T(k + 1) + k D), with the
times that were observed in the same run.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated

import numpy as np
import numpy.typing as npt
from typer import Argument, Option

from benchmarks.harness import MODEL, Model, Rounds, Row, Yielded, commands, seconds_of
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.drafts.computed_drafts import GuestRank, ModelDrafter
from phasewise.serving.drafts.contract import MOST_DRAFTED, Drafter, StepCosts
from phasewise.serving.drafts.lookup import LookupDrafter
from phasewise.serving.drafts.opening import DraftSource
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.one_answer import OneAnswer
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions
from phasewise.serving.sampling.sampling import GREEDY, SamplingParams
from phasewise.workflows.evaluate.run import TEXT as SHIPPED_TEXT
from phasewise.workflows.opening.open_model import open_model

MOST_ROWS = 64
Tokens = Annotated[int, Option("-n", help="tokens of each answer")]
TEXT = SHIPPED_TEXT.read_text(encoding="utf-8")
STORY = SamplingParams(temperature=1.0, top_p=0.95, seed=1)


def prompt_of(opened: OpenEngine, message: str) -> list[int]:
    """A message as the model reads it: base models have no conversations."""
    text = opened.text
    return text.chat_prompt(message) if text.has_template else list(text.encode(message, True))


def excerpt(number: int, n_chars: int = 1100) -> str:
    """Whole sentences of the bundled text."""
    start = TEXT.index(". ", (2000 + 9000 * number) % (len(TEXT) - 4000)) + 2
    end = TEXT.index(". ", start + n_chars) + 1
    return " ".join(TEXT[start:end].split())


REPEATING = {
    "copy": "Repeat this text word for word:\n\n{}",
    "edit": "Repeat this text word for word, but write Anna wherever it says Alice:\n\n{}",
    "quote": "Summarise this text by quoting its most important sentences word for word:\n\n{}",
}
STORIES = {
    "story": "Write a long story about a lighthouse keeper who never speaks. Do not repeat yourself.",
    "letter": "Write a letter from a botanist to her brother about a journey through the Andes.",
    "essay": "Explain how bridges are built, from the first drawing to the last bolt.",
}


def written_answers() -> Iterator[tuple[str, bool, str, str]]:
    """Kind, whether the answer repeats its input, prompt and answer."""
    for number in range(2):
        text = excerpt(number)
        quoted = " Then it says: ".join(text.split(". ")[::2])
        yield "copy", True, REPEATING["copy"].format(text), text
        yield "edit", True, REPEATING["edit"].format(text), text.replace("Alice", "Anna")
        yield "summary", True, REPEATING["quote"].format(text), f"The text says: {quoted}"
    for number, (name, prompt) in enumerate(STORIES.items()):
        for turn in range(2):
            yield name, False, prompt, excerpt(3 + 2 * number + turn)


class Written:
    """Ranks whose logits name the next token of `answer`, prompt included; every step is computed."""

    def __init__(self, opened: OpenEngine) -> None:
        self.answer: list[int] = []
        self._vocab_size = opened.model.config.vocab_size
        self._forward = opened.engine.ranks.forward
        opened.engine.ranks.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        self._forward(batch)
        logits = np.zeros((batch.n_logits, self._vocab_size), np.float32)
        nexts = (
            piece.start + len(piece.token_ids) - piece.n_drafted + index
            for piece in batch.slices
            if piece.wants_logits
            for index in range(1 + piece.n_drafted)
        )
        for row, position in enumerate(nexts):
            logits[row, self.answer[min(position, len(self.answer) - 1)]] = 1
        return logits


class Pairs:
    """Answers of one engine, in turns without and with `drafter`."""

    def __init__(self, opened: OpenEngine, drafter: Drafter, n_tokens: int) -> None:
        self.opened, self.drafter, self.n_tokens = opened, drafter, n_tokens

    def answer(self, prompt_ids: list[int], sampling: SamplingParams, drafter: Drafter | None) -> OneAnswer:
        self.opened.engine.drafting.drafter = drafter
        asked = Submit("r", tuple(prompt_ids), self.n_tokens, sampling, ignore_eos=sampling is STORY)
        answer = OneAnswer(asked)
        for _ in answer.pieces(self.opened.engine):
            pass
        return answer

    def ratio(
        self, prompt_ids: list[int], sampling: SamplingParams, rounds: int
    ) -> tuple[float, float, OneAnswer]:
        """Medians of the ratio and of the null ratio, and the last answer with drafts."""
        ratios, nulls = [], []
        for turn in range(rounds):
            order = ["plain", "drafted", "null"] if turn % 2 else ["null", "drafted", "plain"]
            answers = {
                way: self.answer(prompt_ids, sampling, self.drafter if way == "drafted" else None)
                for way in order
            }
            if len({tuple(answer.token_ids) for answer in answers.values()}) > 1:
                sys.exit("drafts changed the tokens")
            plain, drafted, null = (answers[way].tpot_ms or 1 for way in ("plain", "drafted", "null"))
            ratios.append((plain + null) / 2 / drafted)
            nulls.append(null / plain)
        return statistics.median(ratios), statistics.median(nulls), answers["drafted"]


@contextlib.contextmanager
def opened_with_drafts(model: str) -> Iterator[OpenEngine]:
    loaded = open_model(model)
    size = EngineSize.for_many(loaded.model, 1, 1024, None)
    with open_engine(
        loaded.model, loaded.plans, size, schedules=loaded.schedules, drafts=DraftSource()
    ) as opened:
        yield opened


class Kinds:
    """Ratios of texts that repeat their input, and of those that do not."""

    def __init__(self) -> None:
        self._ratios: dict[bool, list[float]] = {True: [], False: []}

    def row(self, name: str, repeats: bool, ratio: float, null: float, last: OneAnswer) -> Row:
        self._ratios[repeats].append(ratio)
        accepted, rejected = last.drafts or (0, 0)
        row = {"prompt": name, "tokens": last.n_generated, "accepted": accepted, "rejected": rejected}
        return {**row, "ratio": f"{ratio:.2f}", "null": f"{null:.2f}"}

    def summaries(self) -> Iterator[str]:
        for repeats, ratios in self._ratios.items():
            kind = "repeats" if repeats else "does not"
            yield f"{kind}: median {statistics.median(ratios):.2f}, least {min(ratios):.2f}"


def written(model: Model = MODEL, n: Tokens = 192, rounds: Rounds = 3) -> Yielded:
    """The same as `lookup`, the answers being written beforehand."""
    kinds = Kinds()
    with opened_with_drafts(model) as opened:
        pairs, said = Pairs(opened, LookupDrafter(StepCosts(), MOST_ROWS), n), Written(opened)
        for name, repeats, prompt, answer in written_answers():
            prompt_ids = prompt_of(opened, prompt)
            said.answer = prompt_ids + opened.text.encode(answer, False)[:n]
            pairs.n_tokens = len(said.answer) - len(prompt_ids)
            yield kinds.row(name, repeats, *pairs.ratio(prompt_ids, GREEDY, rounds))
    yield from kinds.summaries()


def lookup(model: Model = MODEL, n: Tokens = 192, rounds: Rounds = 3) -> Yielded:
    """Text that repeats its input, and text that does not."""
    kinds = Kinds()
    with opened_with_drafts(model) as opened:
        pairs = Pairs(opened, LookupDrafter(StepCosts(), MOST_ROWS), n)
        for repeats, prompts, sampling in ((True, REPEATING, GREEDY), (False, STORIES, STORY)):
            for (name, prompt), number in itertools.product(prompts.items(), range(2)):
                own = replace(sampling, seed=number) if sampling.seed is not None else sampling
                prompt_ids = prompt_of(opened, prompt.format(excerpt(number)))
                yield kinds.row(name, repeats, *pairs.ratio(prompt_ids, own, rounds))
    yield from kinds.summaries()


class SaidRight:
    """A draft model's steps with their times; its logits name the token of `answer` as often as is asked."""

    def __init__(self, guest: GuestRank, vocab_size: int, agrees: float) -> None:
        self._guest, self._agrees = guest, agrees
        self._own_vocab_size = guest.vocab_size
        self.vocab_size = vocab_size
        self.answer: list[int] = []  # prompt and answer
        self._rng = np.random.default_rng(1)

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        slices = [
            piece._replace(token_ids=[token_id % self._own_vocab_size for token_id in piece.token_ids])
            for piece in batch.slices
        ]
        self._guest.forward(batch._replace(slices=tuple(slices)))
        logits = np.zeros((batch.n_logits, self.vocab_size), np.float32)
        wanting = [piece for piece in batch.slices if piece.wants_logits]
        for row, piece in enumerate(wanting):
            position = min(piece.start + len(piece.token_ids), len(self.answer) - 1)
            right = self._rng.random() < self._agrees
            logits[row, self.answer[position] if right else (self.answer[position] + 1) % self.vocab_size] = 1
        return logits

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        self._guest.copy_kv(source_slot, target_slot, n_slots)


def best_ratio(costs: Callable[[int], float], draft_ns: float, agrees: float, most: int) -> tuple[float, int]:
    """Gain of the best fixed length, and that length."""
    gains = [
        (sum(agrees**j for j in range(k + 1)) * costs(1) / (costs(k + 1) + k * draft_ns), k)
        for k in range(most + 1)
    ]
    return max(gains)


def model_drafts(
    target: Model,
    draft: Annotated[str, Argument(help="the draft model")],
    agrees: Annotated[float, Option(help="share of drafts that are right")] = 0.7,
    n: Tokens = 192,
    rounds: Rounds = 3,
) -> Yielded:
    """A draft model made to agree some of the time."""
    small = open_model(draft)
    with opened_with_drafts(target) as opened:
        ranks, vocab_size = opened.engine.ranks, opened.model.config.vocab_size
        assert isinstance(ranks, LocalRanks)
        size = EngineSize.for_many(opened.model, 1, 1024, None)
        guest = GuestRank(
            small.model, lambda: ranks.first_rank, RankOptions(KvSettings(size.kv.slots), 512, 1)
        )
        said, costs = SaidRight(guest, vocab_size, agrees), StepCosts()
        drafter = ModelDrafter(said, costs, MOST_ROWS, vocab_size)
        pairs = Pairs(opened, drafter, n)
        prompt_ids = [index % (vocab_size - 10) + 5 for index in range(64)]
        said.answer = prompt_ids + pairs.answer(prompt_ids, GREEDY, None).token_ids
        pairs.answer(prompt_ids, GREEDY, drafter)  # the first steps learn what rows cost
        times = {rows: _step_ns(ranks, rows, n) for rows in range(1, MOST_DRAFTED + 2)}
        batch = Batch("decode", (SequenceSlice([7], 64, 0, True),))
        draft_ns = 1e9 * statistics.median(seconds_of(lambda: guest.forward(batch)) for _ in range(21))
        ratio, _, last = pairs.ratio(prompt_ids, GREEDY, rounds)
    accepted, rejected = last.drafts or (0, 0)
    best, length = best_ratio(lambda n_rows: times[n_rows], draft_ns, agrees, MOST_DRAFTED)
    for n_rows in (1, 2, 3, 4, 6, 8, 16):
        yield {"rows": n_rows, "decode step, ms": times[n_rows] / 1e6}
    yield {
        "draft step, ms": draft_ns / 1e6,
        "accepted": accepted,
        "rejected": rejected,
        "allowed": f"{best:.2f} (length {length})",
        "measured": f"{ratio:.2f}",
        "measured over allowed": f"{ratio / best:.2f}",
    }


def _step_ns(ranks: LocalRanks, n_rows: int, n_context: int) -> float:
    """Median of steps of one sequence."""
    piece = SequenceSlice([7] * n_rows, n_context, 0, True, None, n_rows - 1)
    step = Batch("decode", (piece,))
    return 1e9 * statistics.median(seconds_of(lambda: ranks.forward(step)) for _ in range(9))


model_drafts.__name__ = "model"
app = commands(__doc__, lookup, written, model_drafts)

if __name__ == "__main__":
    app()
