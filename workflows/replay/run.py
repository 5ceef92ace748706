"""Check receipts: one prefill of prompt and answer together, and every token chosen again."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise._files import open_input
from phasewise._json import read_json
from phasewise._words import counted
from phasewise.serving.engine.receipts import (
    MOST_RECEIPT_BYTES,
    Receipt,
    ReceiptError,
    Replaying,
    ends_wrongly,
    read_receipt,
)
from phasewise.serving.errors import ServingError
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.opening.open_model import OpenModel, check_settings, open_model
from phasewise.workflows.opening.settings import NATIVE, Weights
from phasewise.workflows.options import ANYWHERE, ModelCores
from phasewise.workflows.replay.said_text import says_its_tokens, usage_counts_its_tokens
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.engine.fingerprint import Fingerprint
    from phasewise.serving.engine.open_engine import ModelText
    from phasewise.serving.grammar.guides import GuideCompiler
    from phasewise.serving.ranks.first_rank import Ranks
    from phasewise.serving.sampling.sampling import Sampler

Json = dict[str, Any]

_MOST_RECEIPTS = 100_000
_NO_RECEIPT = 'it has no receipt: a request gets one with "receipt": true'
_ROWS_AT_ONCE = 64
"""Rows of logits that are held at a time."""


@dataclass(frozen=True)
class ReceiptVerdict:
    """The outcome of one receipt's check.

    problems: why it is refused, in a line each; none: it is confirmed. first_token: the number, from 1, of
    the first token of the answer that the model would not have chosen, where there is one.
    """

    source: str
    request_id: str
    n_tokens: int
    problems: tuple[str, ...]
    first_token: int | None = None

    @property
    def is_confirmed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": list(self.problems), "is_confirmed": self.is_confirmed}


@dataclass(frozen=True)
class GivenReceipt:
    """A receipt of a file, or the error that makes it unreadable, and the answer's choice that holds it.

    has_true_usage: False where the answer states other counts of tokens than its receipts have.
    """

    source: str
    receipt: Receipt | ReceiptError
    choice: Json | None = None
    has_true_usage: bool = True


def read_receipts(path: Path) -> Iterator[GivenReceipt]:
    """Read the receipts of a file: one, a list of them, those of an answer, or of a batch's lines of answers.
    A file or a line that cannot be read is given as its error.
    """
    n_given = 0
    for source, document in _documents(path):
        entries = [document] if isinstance(document, ReceiptError) else _in_document(document)
        for entry in entries:
            n_given += 1
            if n_given > _MOST_RECEIPTS:
                yield GivenReceipt(source, ReceiptError(f"it is beyond the {_MOST_RECEIPTS} of one file"))
                return
            fields, choice, has_true_usage = entry if isinstance(entry, tuple) else (entry, None, True)
            yield GivenReceipt(source, _read(fields), choice, has_true_usage)
    if not n_given:
        yield GivenReceipt(str(path), ReceiptError(_NO_RECEIPT))


def _documents(path: Path) -> Iterator[tuple[str, Any]]:
    """The JSON values of a file, whole or one in each line, with their places; an error in place of one."""
    try:
        with open_input(path) as file:
            data = b"" if path.suffix == ".jsonl" else file.read(MOST_RECEIPT_BYTES + 1)
            value = _parsed(data)
            if path.suffix != ".jsonl" and (b"\n" not in data.strip() or not isinstance(value, ReceiptError)):
                yield str(path), value
                return
            lines = file if path.suffix == ".jsonl" else io.BytesIO(data)
            for number in itertools.count(1):
                raw = lines.readline(MOST_RECEIPT_BYTES + 1)
                if not raw:
                    return
                if raw.strip():
                    yield f"{path}:{number}", _parsed(raw)
                if len(raw) > MOST_RECEIPT_BYTES:
                    return
    except OSError as error:
        yield str(path), ReceiptError(f"it cannot be read: {error.strerror or error}")


def _parsed(data: bytes) -> Any:
    if len(data) > MOST_RECEIPT_BYTES:
        return ReceiptError(f"it is larger than {MOST_RECEIPT_BYTES >> 20} MiB")
    try:
        return read_json(data)
    except ValueError as error:
        return ReceiptError(f"it is not JSON, as receipts and answers are: {error}")


def _in_document(document: Any) -> Iterator[Any]:
    """Receipts in a JSON value; an answer's come with their choice, and True if its usage counts tokens."""
    if isinstance(document, list):
        yield from document
    elif isinstance(document, dict) and isinstance(document.get("data"), list):
        yield from document["data"]
    elif isinstance(document, dict) and isinstance(document.get("choices"), list):
        has_true_usage = usage_counts_its_tokens(document)
        yield from (
            (choice["receipt"], choice, has_true_usage)
            for choice in document["choices"]
            if isinstance(choice, dict) and "receipt" in choice
        )
    elif isinstance(document, dict) and "response" in document:
        answer = document["response"].get("body") if isinstance(document["response"], dict) else None
        if isinstance(answer, dict) and "choices" in answer:
            yield from _in_document(answer)
    else:
        yield document


def _read(fields: Any) -> Receipt | ReceiptError:
    try:
        return fields if isinstance(fields, ReceiptError) else read_receipt(fields)
    except ReceiptError as error:
        return error


def replay_files(
    paths: Sequence[Path],
    model: str,
    weights: Weights = NATIVE,
    placement: ModelCores = ANYWHERE,
    *,
    report: Report = silent,
) -> list[ReceiptVerdict]:
    """Check all receipts of some files against `model`, each by itself, in their order.

    Raises the errors of `open_model`.
    """
    check_settings(model, weights, report=report)
    opened = open_model(model, weights, placement.threads, placement.db, report, placement.ranks)
    with Replayer(opened) as replayer:
        verdicts = (replayer.verdict(given) for path in paths for given in read_receipts(path))
        return [*KeptCores(report).between(verdicts)]


class Replayer:
    """A model, and ranks that stay open from one receipt to the next where the ranks fit both. pinned: as in
    `RankOptions`."""

    def __init__(self, opened: OpenModel, *, pinned: bool = True) -> None:
        self._found = opened
        self._pinned = pinned
        self._ends = frozenset(opened.model.config.eos_token_ids)
        self._known_guides: GuideCompiler | None = None
        self._ranks: Ranks | None = None
        self._ranks_for: tuple[str, int | None, int] = ("", None, 0)

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._known_guides is not None:
            self._known_guides.close()
        if "_text" in self.__dict__:
            self._text.close()
        self._close_ranks()

    @cached_property
    def _text(self) -> ModelText:
        """Loaded only for stop texts or a grammar: it takes as long as some hundred tokens."""
        from phasewise.serving.engine.open_engine import ModelText

        return ModelText(self._found.model)

    @property
    def _guides(self) -> GuideCompiler:
        if self._known_guides is None:
            self._known_guides = self._text.guide_compiler()
        return self._known_guides

    def verdict(self, given: GivenReceipt) -> ReceiptVerdict:
        """Find everything that is wrong with a receipt; one of another model is not computed."""
        receipt = given.receipt
        if isinstance(receipt, ReceiptError):
            return ReceiptVerdict(given.source, "", 0, (str(receipt),))
        problems, first = receipt.contradictions(), None
        refusal = self._cannot_check(receipt)
        if refusal is not None:
            problems.append(refusal)
        else:
            try:
                found_wrong, first = self._computed(given, receipt)
                problems += found_wrong
            except (ServingError, ValueError, ArithmeticError, LookupError, MemoryError) as error:
                # A model with damaged weights confirms nothing, nor do settings that no server takes.
                problems.append(f"it cannot be computed again: {str(error) or type(error).__name__}")
                self._close_ranks()
        return ReceiptVerdict(
            given.source, receipt.request_id, len(receipt.token_ids), tuple(problems), first
        )

    def _computed(self, given: GivenReceipt, receipt: Receipt) -> tuple[list[str], int | None]:
        """The differences that the model shows, and the number of the first token that it does not choose."""
        replaying, sampler = self._replayed(receipt)
        problems = _differences(receipt, replaying)
        text = self._text_of(receipt) if receipt.settings.stop else ""
        wrong = ends_wrongly(receipt, self._ends, text, is_cut_short=sampler.cut_short)
        if wrong is not None and replaying.first_token is None:
            problems.append(wrong)
        if given.choice is not None and not says_its_tokens(given.choice, receipt, self._text, self._ends):
            problems.append("the text of the answer is not that of its tokens")
        if not given.has_true_usage:
            problems.append("the usage of the answer is not the count of its tokens")
        return problems, None if replaying.first_token is None else replaying.first_token + 1

    def _cannot_check(self, receipt: Receipt) -> str | None:
        """The reason why the model here cannot check a receipt; None where it can."""
        config, theirs = self._found.model.config, receipt.fingerprint
        try:
            ours = self._fingerprint(theirs)
        except ValueError:
            return f"it names a format of keys and values that there is not: {theirs.kv_format!r:.40}"
        if differing := theirs.differences(ours):
            return "it was made with " + ", ".join(
                f"another {name} ({getattr(theirs, name)!s:.60}, here {getattr(ours, name)!s:.60})"
                for name in differing
            )
        ids = (*receipt.prompt_token_ids, *receipt.token_ids)
        if min(ids) < 0 or max(ids) >= config.vocab_size:
            return f"its token ids must be 0 to {config.vocab_size - 1}"
        if any(not 0 <= token_id < config.vocab_size for token_id in receipt.settings.sampling.logit_bias):
            return f"its logit_bias must be of token ids 0 to {config.vocab_size - 1}"
        if len(ids) > config.context_length:
            return f"it has {counted(len(ids), 'token')}, more than the context of {config.context_length}"
        if receipt.settings.sampling.seed is None and not receipt.settings.sampling.is_greedy:
            return "it has no seed, so its tokens cannot be chosen again"
        return None

    def _fingerprint(self, theirs: Fingerprint) -> Fingerprint:
        """The identity of the model here, with the receipt's KV format. ValueError for an unknown format."""
        from phasewise.serving.engine.fingerprint import fingerprint_of

        opened = self._found
        positions = theirs.context or opened.model.config.context_length
        ours = fingerprint_of(opened.model, theirs.kv_format, opened.schedules, positions)
        return ours.with_adapter(theirs.adapter) if self._adapter(theirs) else ours

    def _adapter(self, theirs: Fingerprint) -> int:
        """The number of the adapter that a receipt names; 0 where the model has no such adapter."""
        hashes = [adapter.content_hash for adapter in self._found.model.adapters]
        return hashes.index(theirs.adapter) + 1 if theirs.adapter in hashes else 0

    def _replayed(self, receipt: Receipt) -> tuple[Replaying, Sampler]:
        from phasewise.serving.batch import Batch, SequenceSlice
        from phasewise.serving.sampling.sampling import Sampler

        settings, prompt = receipt.settings, receipt.prompt_token_ids
        guide = None
        if settings.guide is not None:
            from phasewise.serving.grammar.late_guides import begun_guide

            compiled = self._guides.compile(settings.guide.grammar)
            guide = begun_guide(settings.guide, compiled, self._guides.tokens).fresh()
        sampling = replace(settings.sampling, top_logprobs=None)  # they are told beside tokens
        sampler = Sampler(sampling, prompt, self._found.model.config.vocab_size, guide)
        replaying = Replaying(receipt, sampler)
        ids = (*prompt, *receipt.token_ids[:-1])
        ranks, adapter = self._open_ranks(receipt, len(ids)), self._adapter(receipt.fingerprint)
        if len(prompt) > 1:
            ranks.forward(Batch("prefill", (SequenceSlice(prompt[:-1], 0, 0, False, adapter=adapter),)))
        for start in range(len(prompt) - 1, len(ids), _ROWS_AT_ONCE):
            piece = ids[start : start + _ROWS_AT_ONCE]
            piece_slice = SequenceSlice(piece, start, 0, True, adapter=adapter)
            replaying.feed(ranks.all_logits(Batch("prefill", (piece_slice,))))
        return replaying, sampler

    def _open_ranks(self, receipt: Receipt, n_tokens: int) -> Ranks:
        """Ranks with room for `n_tokens` tokens, in the receipt's format of keys and values."""
        from phasewise.serving.pools.arena import aligned
        from phasewise.serving.ranks.open_ranks import STEP_TOKENS, KvSettings, RankOptions, open_ranks

        wanted = receipt.fingerprint.kv_format, receipt.fingerprint.context
        if self._ranks is not None and self._ranks_for[:2] == wanted and self._ranks_for[2] >= n_tokens:
            return self._ranks
        self._close_ranks()
        opened, model = self._found, self._found.model
        if receipt.fingerprint.context is not None:
            config = replace(model.config, context_length=receipt.fingerprint.context)
            model = replace(model, config=config)
        n_slots = aligned(max(n_tokens, self._ranks_for[2]))
        options = RankOptions(
            KvSettings(n_slots, receipt.fingerprint.kv_format),
            STEP_TOKENS,
            1,
            schedules=opened.schedules or None,
            pinned=self._pinned,
        )
        self._ranks = open_ranks(model, opened.plans, options)
        self._ranks_for = (*wanted, n_slots)
        return self._ranks

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _text_of(self, receipt: Receipt) -> str:
        """The whole text of an answer, in which stop strings are looked for."""
        stream = self._text.open_stream(frozenset(receipt.settings.shown))
        return "".join(map(stream.push, receipt.token_ids)) + stream.flush()


def _differences(receipt: Receipt, replaying: Replaying) -> list[str]:
    """A line of text for each difference between a receipt and its replay."""
    from phasewise.serving.engine.live_request import CHECKPOINT_TOKENS

    said = []
    if replaying.first_token is not None:
        place = replaying.first_token
        said.append(
            f"token {place + 1} of {len(receipt.token_ids)} is {receipt.token_ids[place]}, and the model "
            f"chooses {replaying.chosen}"
        )
    if replaying.first_digest is not None:
        place = replaying.first_digest * CHECKPOINT_TOKENS
        said.append(f"the logits of token {place + 1} are others")
    return said
