"""The ops behind the last layer: logits of rows that want them, and rows that a head reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from phasewise.serving.errors import ModelError
from phasewise.serving.models.heads.draft_head import add_fed_rows, add_normed_rows
from phasewise.serving.models.heads.kinds import MTP
from phasewise.serving.models.linears import Linears, Rows
from phasewise.serving.models.norms import add_final_norm
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.parts.rows import ActivationArena
from phasewise.serving.models.parts.streams import add_merge


def add_logits(linears: Linears, model: PackedModel, arena: ActivationArena, *, is_read: bool) -> None:
    """The ops from the stream behind the last layer to logits.

    is_read: a head reads all rows behind the last norm, which that layer has computed then. A head gives
    those of its own rows that want logits.
    """
    config = model.config
    stream, tail = arena.hidden, arena.tail
    if is_read:
        add_normed_rows(linears, model, arena, stream, "every")
    elif config.drafts == MTP:
        add_normed_rows(linears, model, arena, tail, "logits")
    elif config.drafts:
        add_fed_rows(linears, model, arena, tail, "logits")
    if config.streams is not None:
        add_merge(model.site(linears), config.streams, config.hidden, arena)
    head = model.weight("embed" if config.tied_embeddings else "lm_head")
    if head.n != config.n_logits:
        raise ModelError(f"{model.name} gives {head.n} logits for a vocabulary of {config.n_logits}")
    logits = arena.logits
    rows: Rows = "logits"
    if config.layer_norms:
        normed = arena.normed
        add_final_norm(linears.program, model, tail, normed, config.logit_scale)
        tail = normed
        reads: dict[str, Any] = {"source": "rows"}
    else:
        norm = model.vectors["final_norm"] * np.float32(config.logit_scale)
        reads = {"source": "norm", "norm": norm, "eps": config.stream_eps}
        if is_read:
            tail, rows = stream, "gathered"
    linears.add([(head, 0)], reads, tail, logits, rows=rows)
    if config.logit_cap is not None:
        linears.program.adjust(config.n_logits, *logits, *logits, cap=config.logit_cap, rows="logits")
