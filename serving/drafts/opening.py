"""Opens the drafter of an engine, and compares a draft model's vocabulary with the served model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from phasewise.serving.drafts.contract import MOST_DRAFTED, Drafter, StepCosts
from phasewise.serving.drafts.lookup import LookupDrafter
from phasewise.serving.errors import ModelError
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.first_rank import ALL_LOGITS_ROWS, FirstRank, RankOptions
from phasewise.serving.text.tokenizer import Tokenizer

LEAST_STEP_TOKENS = 1 + MOST_DRAFTED
"""Rows that every step of an engine with drafts has room for."""


@dataclass(frozen=True)
class DraftSource:
    """Settings of an engine's drafts.

    `model`: a small model of the same vocabulary, or a head of the served model; None: lookup in the
    sequence. `recorded_ns`: nanoseconds of decode steps by their number of rows, from the database.
    `n_tokens`: tokens of each draft; None: as many as pay, by observed rates and durations."""

    model: PackedModel | None = None
    recorded_ns: Mapping[int, float] = field(default_factory=dict)
    n_tokens: int | None = None

    @property
    def is_head(self) -> bool:
        """True if `model` is a head of the model that is served."""
        return self.model is not None and bool(self.model.config.drafts)


def open_drafter(
    source: DraftSource, model: PackedModel, first_rank: Callable[[], FirstRank], options: RankOptions
) -> Drafter:
    """Open the drafter of an engine whose ranks have these options. Errors: those of `open_ranks`."""
    costs = StepCosts(source.recorded_ns)
    most_rows = min(ALL_LOGITS_ROWS, max(options.max_batch_tokens, options.max_sequences))
    if source.model is None:
        return LookupDrafter(costs, most_rows, source.n_tokens)
    from phasewise.serving.drafts.computed_drafts import GuestHead, GuestRank, HeadDrafter, ModelDrafter

    own = replace(options, kv=replace(options.kv, rings=None), feeds=False)
    if source.is_head:
        head = GuestHead(source.model, first_rank, own)
        return HeadDrafter(
            head, lambda n: first_rank().take_fed_rows(n), costs, most_rows, n_tokens=source.n_tokens
        )
    guest = GuestRank(source.model, first_rank, own)
    return ModelDrafter(guest, costs, most_rows, model.config.vocab_size, n_tokens=source.n_tokens)


def check_vocabularies(draft: PackedModel, model: PackedModel) -> None:
    """Raise ModelError unless the tokens of both models have the same ids and texts. Logits may have more
    columns than there are tokens, so the models' `vocab_size` may differ."""
    draft_tokenizer, model_tokenizer = (
        Tokenizer(each.tokenizer_json, each.config) for each in (draft, model)
    )
    sizes = draft.config.vocab_size, model.config.vocab_size
    for token_id in range(max(sizes)):
        pieces = [
            tokenizer.piece(token_id) if token_id < size else b""
            for tokenizer, size in zip((draft_tokenizer, model_tokenizer), sizes, strict=True)
        ]
        if pieces[0] != pieces[1]:
            raise ModelError(
                f"{draft.name} cannot draft for {model.name}: their vocabularies differ, first at token "
                f"{token_id} ({_shown(pieces[0])} and {_shown(pieces[1])}); name a model of the same family"
            )


def _shown(piece: bytes) -> str:
    return ascii(piece.decode("utf-8", "replace"))[:40] if piece else "none"
