"""Check receipts: one prefill of prompt and answer together, and every token chosen again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise._files import read_input
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
from phasewise.serving.errors import StepFailed
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.opening.open_model import NATIVE, OpenModel, Weights, open_model
from phasewise.workflows.opening.refusals import check_settings
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.engine.fingerprint import Fingerprint
    from phasewise.serving.engine.open_engine import ModelText
    from phasewise.serving.engine.receipt_signing import Signer
    from phasewise.serving.grammar.guides import GuideCompiler
    from phasewise.serving.ranks.ranks_contract import Ranks
    from phasewise.serving.sampling.sampling import Sampler

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
        """Plain JSON values."""
        return {**asdict(self), "problems": list(self.problems), "is_confirmed": self.is_confirmed}


def read_receipts(path: Path) -> list[Receipt | ReceiptError]:
    """The receipts of a file: one, a list of them as `/v1/receipts/{id}` gives it, or those of an answer.

    One that cannot be read stands there as its error. WorkflowError for a file without any.
    """
    try:
        data = read_json(read_input(path, MOST_RECEIPT_BYTES))
    except OSError as error:
        raise WorkflowError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise WorkflowError(f"{path} is not JSON: give a receipt, or an answer that has some") from None
    entries = list(_in_data(data))
    if not entries:
        raise WorkflowError(f'{path} has no receipt: a request gets one with "receipt": true')
    return [_read(entry) for entry in entries]


def _in_data(data: Any) -> Iterator[Any]:
    if isinstance(data, list):
        yield from data
    elif isinstance(data, dict) and isinstance(data.get("data"), list):
        yield from data["data"]
    elif isinstance(data, dict) and isinstance(data.get("choices"), list):
        yield from (
            choice["receipt"]
            for choice in data["choices"]
            if isinstance(choice, dict) and "receipt" in choice
        )
    else:
        yield data


def _read(fields: Any) -> Receipt | ReceiptError:
    try:
        return read_receipt(fields)
    except ReceiptError as error:
        return error


def replay_files(
    paths: Sequence[Path],
    model: str,
    weights: Weights = NATIVE,
    *,
    threads: int | None = None,
    ranks: int | None = None,
    db: str | None = None,
    signer: Path | None = None,
    report: Report = silent,
) -> list[ReceiptVerdict]:
    """Check all receipts of some files against `model`, in their order.

    signer: a file with the key that must have signed each of them; None: signatures are not looked at.
    Raises WorkflowError for a file without receipts, ReceiptError for one without a key, and what
    `open_model` raises.
    """
    trusted_signer = None
    if signer is not None:
        from phasewise.workflows.receipt_keys import known_signer

        trusted_signer = known_signer(signer)
    read = [(str(path), receipt) for path in paths for receipt in read_receipts(path)]
    check_settings(model, weights, report=report)
    opened = open_model(model, weights, threads, db, report, ranks)
    with _Replayer(opened, signer=trusted_signer) as replayer:
        verdicts = (replayer.verdict(source, receipt) for source, receipt in read)
        return [*KeptCores(report).between(verdicts)]


def replay_receipts(
    opened: OpenModel, receipts: Iterable[Receipt], *, pinned: bool = True
) -> list[ReceiptVerdict]:
    """Check receipts against an opened model. pinned: as in `RankOptions`."""
    with _Replayer(opened, pinned=pinned) as replayer:
        return [replayer.verdict(receipt.request_id, receipt) for receipt in receipts]


class _Replayer:
    """A model, and ranks that stay open from one receipt to the next where they fit both."""

    def __init__(self, opened: OpenModel, *, pinned: bool = True, signer: Signer | None = None) -> None:
        self._found = opened
        self._pinned = pinned
        self._signer = signer
        self._ends = frozenset(opened.model.config.eos_token_ids)
        self._known_guides: GuideCompiler | None = None
        self._ranks: Ranks | None = None
        self._ranks_for: tuple[str, int | None, int] = ("", None, 0)

    def __enter__(self) -> _Replayer:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._known_guides is not None:
            self._known_guides.close()
        self._close_ranks()

    @cached_property
    def _text(self) -> ModelText:
        """Read where a receipt has stop texts or a grammar: it takes as long as some hundred tokens."""
        from phasewise.serving.engine.open_engine import ModelText

        return ModelText(self._found.model)

    @property
    def _guides(self) -> GuideCompiler:
        if self._known_guides is None:
            self._known_guides = self._text.guide_compiler()
        return self._known_guides

    def verdict(self, source: str, receipt: Receipt | ReceiptError) -> ReceiptVerdict:
        """Everything that is wrong with it. What is another model's is not computed."""
        if isinstance(receipt, ReceiptError):
            return ReceiptVerdict(source, "", 0, (str(receipt),))
        problems, first = receipt.contradictions(), None
        unsigned = None if self._signer is None else self._signer.refusal(receipt)
        problems += [] if unsigned is None else [unsigned]
        refusal = self._cannot_check(receipt)
        if refusal is not None:
            problems.append(refusal)
        else:
            try:
                replaying, sampler = self._replayed(receipt)
            except StepFailed as error:  # a model with damaged weights confirms nothing
                problems.append(str(error))
                return ReceiptVerdict(source, receipt.request_id, len(receipt.token_ids), tuple(problems))
            problems += _differences(receipt, replaying)
            if replaying.first_token is not None:
                first = replaying.first_token + 1
            text = self._text_of(receipt) if receipt.settings.stop else ""
            wrong = ends_wrongly(receipt, self._ends, text, is_cut_short=sampler.cut_short)
            problems += [wrong] if wrong is not None and first is None else []
        return ReceiptVerdict(source, receipt.request_id, len(receipt.token_ids), tuple(problems), first)

    def _cannot_check(self, receipt: Receipt) -> str | None:
        """Why the model here cannot tell; None: it can."""
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
        if len(ids) > config.context_length:
            return f"it has {counted(len(ids), 'token')}, more than the context of {config.context_length}"
        if receipt.settings.sampling.seed is None and not receipt.settings.sampling.is_greedy:
            return "it has no seed, so its tokens cannot be chosen again"
        return None

    def _fingerprint(self, theirs: Fingerprint) -> Fingerprint:
        """The identity of the model here, with the receipt's KV format. ValueError: there is no such."""
        from phasewise.serving.engine.fingerprint import fingerprint_of

        opened = self._found
        positions = theirs.context or opened.model.config.context_length
        ours = fingerprint_of(opened.model, theirs.kv_format, opened.schedules, positions)
        return ours.with_adapter(theirs.adapter) if self._adapter(theirs) else ours

    def _adapter(self, theirs: Fingerprint) -> int:
        """The number of the adapter that a receipt is of; 0: none of those here."""
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
        sampler = Sampler(settings.sampling, prompt, self._found.model.config.vocab_size, guide)
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
        """Ranks with room for so many tokens, in the receipt's format of keys and values."""
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
    """In a line each, where the model says something else."""
    from phasewise.serving.engine.logit_chain import CHECKPOINT_TOKENS

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
