"""From a source of drafts to what drafts for one engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch
from phasewise.serving.drafts.computed_drafts import HeadDrafter, ModelDrafter
from phasewise.serving.drafts.contract import MOST_DRAFTED, Drafter, StepCosts
from phasewise.serving.drafts.lookup import LookupDrafter
from phasewise.serving.errors import ModelError
from phasewise.serving.models.draft_head import FedRows, RowVectors
from phasewise.serving.models.forward import build_program, kv_bytes_per_slot, resolve_kv_format
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.headroom import check_memory
from phasewise.serving.ranks.first_rank import ALL_LOGITS_ROWS, FirstRank, room_for, slices_at_once
from phasewise.serving.ranks.rank_teams import touch_memory
from phasewise.serving.ranks.ranks_contract import RankOptions
from phasewise.serving.ranks.shared_weights import weights_near
from phasewise.serving.text.tokenizer import Tokenizer


class GuestRank:
    """`model` on the teams of `host`, which may become another rank when ranks are started anew.

    Other ranks' cores rest meanwhile: a model that is worth drafting with is small. Errors: `open_ranks`.
    """

    def __init__(self, model: PackedModel, host: Callable[[], FirstRank], options: RankOptions) -> None:
        kv_format = resolve_kv_format(model, options.kv.format)
        self.vocab_size = model.config.vocab_size
        self.kv_bytes = options.kv.slots * kv_bytes_per_slot(model, kv_format)
        self._host = host
        at_first = host()
        self._capacity = room_for(options, at_first.teams.most_threads, kv_format)
        nodes = at_first.nodes
        self._program = build_program(weights_near(model, nodes, self.kv_bytes), self._capacity, check_memory)
        if nodes:
            self._program.spread(nodes)
        if options.kv.touched:
            touch_memory(self._program, at_first.teams.by_table)
        self._guest, self._guest_of = self._open(at_first), at_first

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """As Ranks.forward. Adapters are those of the model that is served: this one has none."""
        slices = tuple(piece._replace(adapter=0) for piece in batch.slices)
        return self._rank.forward(batch._replace(slices=slices))

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """As Ranks.copy_kv. This model's layers keep no rings: nothing is to be done for those."""
        if source_slot >= self._capacity.kv_slots:
            return
        self._rank.copy_kv(source_slot, target_slot, n_slots)

    @property
    def _rank(self) -> FirstRank:
        host = self._host()
        if host is not self._guest_of:
            self._guest, self._guest_of = self._open(host), host
        return self._guest

    def _open(self, host: FirstRank) -> FirstRank:
        return FirstRank(self._program, host.teams, self._capacity, host)


class GuestHead(GuestRank):
    """A head that drafts for the model of `host`, on its teams."""

    def __init__(self, model: PackedModel, host: Callable[[], FirstRank], options: RankOptions) -> None:
        super().__init__(model, host, options)
        room = self._capacity
        self._fed = FedRows.of(self._program, model.config, room.step_tokens, room.logit_rows)

    def forward_rows(self, batch: Batch, rows: RowVectors) -> tuple[npt.NDArray[np.float32], RowVectors]:
        """Logits as Ranks.forward and the head's own row for each; of a prefill batch both are empty.

        rows: the model's, of every token.
        """
        if batch.phase == "decode":
            self._fed.write(rows)
            logits = self.forward(batch)
            return logits, self._fed.read(len(logits))
        first = 0
        for step in slices_at_once(batch.slices, self._capacity.step_tokens):
            n_tokens = sum(len(piece.token_ids) for piece in step)
            self._fed.write(rows[first : first + n_tokens])
            self.forward(Batch("prefill", tuple(step)))
            first += n_tokens
        return np.empty((0, self.vocab_size), np.float32), rows[:0]


LEAST_STEP_TOKENS = 1 + MOST_DRAFTED
"""Rows that the steps of an engine with drafts have room for."""


@dataclass(frozen=True)
class DraftSource:
    """The source of drafts. `model`: a small model of the same vocabulary, or a head of the model that is
    served; None: lookup in the sequence.

    recorded_ns: what decode steps took by their number of rows, as far as the database knows. n_tokens: of
    each draft; None: as many as pay, by what is observed.
    """

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
    """The drafter of an engine whose ranks have these options. Errors: `open_ranks`."""
    costs = StepCosts(source.recorded_ns)
    most_rows = min(ALL_LOGITS_ROWS, max(options.max_batch_tokens, options.max_sequences))
    if source.model is None:
        return LookupDrafter(costs, most_rows, source.n_tokens)
    if source.is_head:
        return _head_drafter(source, source.model, first_rank, options, costs)
    guest = GuestRank(source.model, first_rank, replace(options, kv=replace(options.kv, rings=None)))
    return ModelDrafter(guest, costs, most_rows, model.config.vocab_size, n_tokens=source.n_tokens)


def _head_drafter(
    source: DraftSource,
    head: PackedModel,
    first_rank: Callable[[], FirstRank],
    options: RankOptions,
    costs: StepCosts,
) -> HeadDrafter:
    own = replace(options, kv=replace(options.kv, rings=None), feeds=False)
    guest = GuestHead(head, first_rank, own)
    most_rows = min(ALL_LOGITS_ROWS, max(options.max_batch_tokens, options.max_sequences))

    def take_rows(n_tokens: int) -> RowVectors | None:
        return first_rank().take_fed_rows(n_tokens)

    return HeadDrafter(guest, take_rows, costs, most_rows, n_tokens=source.n_tokens)


def check_vocabularies(draft: PackedModel, model: PackedModel) -> None:
    """ModelError, one line, unless both models' tokens have the same ids and texts.

    Logits may have more columns than there are tokens: their numbers may differ.
    """
    draft_tokenizer, model_tokenizer = (
        Tokenizer.from_json(each.tokenizer_json, each.config) for each in (draft, model)
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
