"""Receipts of answers: the request, the answer, and digests of the logits in between. No answer depends on
the rest of the batch, so that whoever has the model can check a receipt by one prefill of prompt and answer
together (`workflows.replay`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from phasewise._words import counted
from phasewise.serving.engine.fingerprint import Fingerprint, digest_of
from phasewise.serving.engine.live_request import LogitChain, n_digests
from phasewise.serving.engine.messages import Evidence, Submit
from phasewise.serving.errors import RequestError, ServingError
from phasewise.serving.grammar.guides import GuideRecipe
from phasewise.serving.sampling.sampling import Sampler, SamplingParams, sample_rows
from phasewise.serving.scheduling.request import (
    FinishReason as FinishReason,  # for HTTP, which never sees the scheduler
)

SCHEMA_VERSION: Literal[1] = 1
MOST_RECEIPT_BYTES = 64 << 20


class ReceiptError(ServingError):
    """The receipt cannot be read."""


@dataclass(frozen=True)
class AskedSettings:
    """All settings of one answer, none left to defaults."""

    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    shown: tuple[int, ...]
    """Control tokens whose texts count in the search for stop strings."""
    guide: GuideRecipe | None
    """Required form of the answer; None: free text."""
    ends: tuple[int, ...] = ()
    """End tokens beside the model's own."""

    @classmethod
    def of(cls, request: Submit) -> AskedSettings:
        guide = None if request.compiled is None else request.compiled.recipe
        shown, ends = tuple(sorted(request.shown)), tuple(sorted(request.ends))
        return cls(request.sampling, request.max_tokens, request.stop, request.ignore_eos, shown, guide, ends)

    def digest(self) -> str:
        return digest_of(_as_before(_settings.dump_python(self, mode="json")))


@dataclass(frozen=True)
class Receipt:
    """A server's record of one answer. `digest`: of all other fields."""

    schema_version: Literal[1]
    request_id: str
    model: str
    system_fingerprint: str
    fingerprint: Fingerprint
    prompt_token_ids: tuple[int, ...]
    prompt_digest: str
    settings: AskedSettings
    settings_digest: str
    token_ids: tuple[int, ...]
    """All tokens of the answer, its end token and text cut off at a stop string included."""
    finish_reason: FinishReason
    logit_digests: tuple[str, ...]
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON object of the receipt; `read_receipt` is the inverse."""
        fields: dict[str, Any] = _receipt.dump_python(self, mode="json")
        del fields["fingerprint"]["paths"]
        _as_before(fields["settings"])
        if not self.fingerprint.adapter:  # as receipts were before there were adapters
            del fields["fingerprint"]["adapter"]
        return fields

    def own_digest(self) -> str:
        """The digest that the other fields should have."""
        fields = self.to_json()
        return digest_of({name: fields[name] for name in fields if name != "digest"})

    def contradictions(self) -> list[str]:
        """One line for each inconsistency within the receipt, without asking the model."""
        wrong = []
        if self.system_fingerprint != self.fingerprint.short:
            wrong.append("the system fingerprint is not that of its components")
        if self.prompt_digest != digest_of(self.prompt_token_ids):
            wrong.append("the digest of the prompt is not that of its tokens")
        if self.settings_digest != self.settings.digest():
            wrong.append("the digest of the settings is not that of the settings")
        if len(self.logit_digests) != n_digests(len(self.token_ids)):
            wrong.append(
                f"{counted(len(self.token_ids), 'token')} with {counted(len(self.logit_digests), 'digest')}"
            )
        if self.digest != self.own_digest():
            wrong.append("the digest of the receipt is not that of its fields")
        return wrong


def _as_before(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove an empty `ends`, which receipts did not have at first."""
    if not settings["ends"]:
        del settings["ends"]
    return settings


_receipt = TypeAdapter(Receipt)
_settings = TypeAdapter(AskedSettings)


def receipt_of(
    request: Submit, evidence: Evidence, reason: FinishReason, fingerprint: Fingerprint, model: str
) -> Receipt:
    """The receipt of an answer that has ended. `model`: the server's name of the model."""
    settings = AskedSettings.of(request)
    receipt = Receipt(
        SCHEMA_VERSION,
        request.request_id,
        model,
        fingerprint.short,
        fingerprint,
        request.prompt_token_ids,
        digest_of(request.prompt_token_ids),
        settings,
        settings.digest(),
        evidence.token_ids,
        reason,
        evidence.logit_digests,
    )
    return replace(receipt, digest=receipt.own_digest())


def read_receipt(fields: Any) -> Receipt:
    """Parse a receipt. ReceiptError, in one line: `fields` is not one."""
    if isinstance(fields, dict) and fields.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise ReceiptError(
            f"the receipt has schema_version {fields['schema_version']!s:.20}; this phasewise reads "
            f"{SCHEMA_VERSION}"
        )
    if isinstance(fields, dict):  # earlier servers signed some
        fields = {name: value for name, value in fields.items() if name != "signature"}
    try:
        receipt = _receipt.validate_python(fields)
    except RequestError as error:
        raise ReceiptError(f"not a receipt: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ReceiptError(f"not a receipt: {place[:80]}: {first['msg'][:120]}") from None
    if receipt.to_json() != fields:
        raise ReceiptError("not a receipt: it has fields that no receipt has")
    if not receipt.prompt_token_ids or not receipt.token_ids:
        raise ReceiptError("not a receipt: its prompt or its answer has no tokens")
    return receipt


class Replaying:
    """Check of one receipt against the model's logits, row by row."""

    def __init__(self, receipt: Receipt, sampler: Sampler) -> None:
        self._receipt = receipt
        self._sampler = sampler
        self._chain = LogitChain()
        self._n_rows = 0
        self.first_token: int | None = None
        """Index in the answer of the first token that the model would not have chosen; None: none so far."""
        self.chosen: int | None = None
        """The token that the model chooses at `first_token`."""
        self.first_digest: int | None = None
        """Index of the first digest of logits that differs; None: none so far."""

    def feed(self, logits: npt.NDArray[np.float32]) -> None:
        """Compare the rows of the next tokens, float32 [n, vocab], with the receipt."""
        begin = self._n_rows
        self._n_rows += len(logits)
        for row in logits:
            self._chain.add(row)
        if self.first_digest is None:
            pairs = zip(self._chain.digests(self._n_rows), self._receipt.logit_digests, strict=False)
            self.first_digest = next(
                (index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None
            )
        if self.first_token is None:
            recorded = self._receipt.token_ids[begin : self._n_rows]
            for place, (theirs, ours) in enumerate(zip(recorded, self._chosen(logits), strict=True), begin):
                if ours != theirs:
                    self.first_token, self.chosen = place, ours
                    break

    def _chosen(self, logits: npt.NDArray[np.float32]) -> Iterator[int]:
        """The tokens that the sampler chooses, sampled lazily."""
        if self._sampler.needs_largest_alone:
            return (token.token_id for token in sample_rows(logits, [self._sampler] * len(logits)))
        return (self._sampler.sample(row).token_id for row in logits)


def ends_wrongly(
    receipt: Receipt, end_token_ids: frozenset[int], text: str, *, is_cut_short: bool
) -> str | None:
    """The reason why the answer cannot have ended as the receipt says; None: it can. `text`: text of the
    whole answer, read only if there are stop strings."""
    settings, ids = receipt.settings, receipt.token_ids
    ends = frozenset() if settings.ignore_eos else end_token_ids.union(settings.ends)
    early = next((place for place, token_id in enumerate(ids[:-1]) if token_id in ends), None)
    if early is not None:
        return f"the answer goes on after its end token, token {early + 1}"
    if settings.max_tokens is not None and len(ids) > settings.max_tokens:
        return (
            f"the answer has {counted(len(ids), 'token')}, and at most {settings.max_tokens} were asked for"
        )
    has_ended = ids[-1] in ends or any(stop in text for stop in settings.stop)
    if is_cut_short:
        has_ended = False
    is_full = settings.max_tokens is None or len(ids) == settings.max_tokens or is_cut_short
    if receipt.finish_reason == "stop" and not has_ended:
        return "the answer stops without an end token or a stop text"
    if receipt.finish_reason == "length" and (has_ended or not is_full):
        return "the answer did not end for its length"
    return None
