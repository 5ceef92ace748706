"""Heads that draft: one layer over the embedding of the next token and a row of the model that is served;
and the arena of a step, in which rows for a head have places too.

Of a sequence t the head's position i reads the embedding of t[i + 1] and the model's row i, and gives logits
of t[i + 2]. Its own row stands in for the model's next one, which is not computed yet.

`mtp`: x = E norm(embedding) + R norm(row), a layer, a last norm, and the model's own product; rows are those
behind the last norm. `eagle3` (Li et al. 2025): rows are the stream before three layers, x = F row or the
head's own row; queries, keys and values read norm(embedding) and norm(x), and the layer's halves are added
to x; a last norm, and a product of its own for tokens that it knows. Its own row is x behind the layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program
from phasewise.serving.errors import ModelError
from phasewise.serving.models.arena import lay_out
from phasewise.serving.models.layers import EAGLE3_NORMED, EAGLES, MTP, tapped_layers
from phasewise.serving.models.linears import Linears, Place, Rows
from phasewise.serving.models.packed_model import ModelConfig, PackedModel
from phasewise.serving.models.parts.attention import Attention
from phasewise.serving.models.parts.site import ActivationArena, ReadRows, Site

OFFSETS = "draft_offsets"
"""The vector of what is added to the numbers of a head's logits to get tokens."""

RowVectors = npt.NDArray[np.float32]


def head_config(config: ModelConfig) -> ModelConfig:
    """The config of a head for this model: a layer of the kind of those that attend, and of its mixture."""
    experts = config.experts
    if experts is not None:
        experts = replace(experts, dense_layers=(), dense_ffn=0)
    kinds = (config.kind_of(config.attention_layers[-1]),) if config.layer_kinds else ()
    return replace(config, n_layers=1, layer_kinds=kinds, state=None, experts=experts, drafts=MTP)


def head_weights(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Weights of a head beside those that every layer has, as (outputs, inputs)."""
    hidden = config.hidden
    if config.drafts == MTP:
        return dict.fromkeys(("head_embed", "head_rows"), (hidden, hidden))
    return {
        "head_rows": (hidden, 3 * hidden),
        "lm_head": (config.n_logits, hidden),
    }


def head_vectors(config: ModelConfig) -> dict[str, int]:
    """The same of vectors."""
    if config.drafts == MTP:
        return dict.fromkeys(("head_embed_norm", "head_rows_norm"), config.hidden)
    return {"head_rows_norm": config.hidden, OFFSETS: config.n_logits}


def drafted_tokens(model: PackedModel) -> npt.NDArray[np.int64] | None:
    """The token of each of a head's logits; None where they are those of all tokens. ModelError unless they
    are different tokens of the vocabulary.
    """
    if OFFSETS not in model.vectors:
        return None
    offsets = model.vectors[OFFSETS].astype(np.int64)
    token_ids = np.arange(len(offsets)) + offsets
    if not np.array_equal(np.unique(token_ids), np.sort(token_ids)):
        raise ModelError(f"{model.name} drafts a token by two of its logits")
    if token_ids.min() < 0 or token_ids.max() >= model.config.vocab_size:
        raise ModelError(f"{model.name} drafts tokens outside the vocabulary of {model.config.vocab_size}")
    return token_ids


def with_own_head(head: PackedModel, model: PackedModel) -> PackedModel:
    """The head with embeddings of the model that it drafts for, and with its last product where the head has
    none of its own.
    """
    shared = {name: weight for name, weight in model.weights.items() if name in ("embed", "lm_head")}
    tied = model.config.tied_embeddings and "lm_head" not in head.weights
    config = replace(head.config, tied_embeddings=tied)
    return replace(head, config=config, weights={**shared, **head.weights})


def check_feeds(config: ModelConfig, kind: str) -> None:
    """ModelError for a model whose rows are no plain stream, or that has too few layers for a head's kind."""
    if config.layer_norms or config.streams is not None or config.encoder is not None:
        raise ModelError("a head that drafts reads the rows of a model with plain norms and one stream")
    if kind in EAGLES and (min(tapped_layers(config.n_layers)) < 0 or config.n_layers < 3):
        raise ModelError(f"heads of EAGLE-3 read three layers of a model, and this one has {config.n_layers}")


def taps_of(config: ModelConfig, kind: str) -> dict[int, list[int]]:
    """By layer, the parts of a head's row that are the stream before it."""
    taps: dict[int, list[int]] = {}
    for part, layer in enumerate(tapped_layers(config.n_layers) if kind in EAGLES else ()):
        taps.setdefault(layer, []).append(part)
    return taps


def add_head_input(linears: Linears, model: PackedModel, arena: ActivationArena) -> None:
    """The stream of a head, from embeddings of its tokens and the rows that it is given."""
    embedded, stream = arena.embedded, arena.hidden
    taken, config, program = arena.taken, model.config, linears.program
    program.embed(model.weight("embed"), *embedded, config.embed_scale)
    if config.drafts == MTP:
        for source, part in ((embedded, "head_embed"), (taken, "head_rows")):
            reading = ReadRows(source, model.vectors[f"{part}_norm"], config.stream_eps)
            weight = [(model.weight(part), 0)]
            linears.add(weight, reading.options(), source, stream, add=source == taken)
        return
    linears.add([(model.weight("head_rows"), 0)], {"source": "rows"}, taken, stream)
    program.adjust(config.hidden, *arena.own_rows, *stream, add=True)
    if config.drafts == EAGLE3_NORMED:
        norm, eps = model.vectors["head_rows_norm"], config.stream_eps
        program.adjust(config.hidden, *stream, *stream, norm=norm, eps=eps)


def add_embedding_to_attention(
    site: Site, model: PackedModel, attention: Attention, arena: ActivationArena
) -> ReadRows:
    """Queries, keys and values of embeddings, to which those of the stream are added; how these read it."""
    embeddings = ReadRows(arena.embedded, site.vector("attn_norm"), model.config.stream_eps)
    site.add(attention.embedded, embeddings, arena.mixing.products)
    norm = None if model.config.drafts == EAGLE3_NORMED else model.vectors["head_rows_norm"]
    return ReadRows(arena.hidden, norm, model.config.stream_eps)


def add_fed_rows(
    linears: Linears, model: PackedModel, arena: ActivationArena, source: Place, rows: Rows, part: int = 0
) -> None:
    """Rows that a head reads, as they are, behind as many others as `part` says."""
    config = model.config
    target = arena.fed[0] + part * config.hidden, arena.fed[1]
    linears.program.adjust(config.hidden, *source, *target, rows=rows)


def add_normed_rows(
    linears: Linears, model: PackedModel, arena: ActivationArena, source: Place, rows: Rows
) -> None:
    """Rows that a head reads, behind the last norm."""
    norm, eps = model.vectors["final_norm"], model.config.stream_eps
    target = arena.fed
    linears.program.adjust(model.config.hidden, *source, *target, norm=norm, rows=rows, eps=eps)


@dataclass(frozen=True, slots=True)
class FedRows:
    """Rows of a program between its runs: those that a head reads, and those that one is given."""

    program: Program
    arena: ActivationArena
    width: int
    """Numbers of a row that is read."""
    hidden: int
    has_own_rows: bool
    """True for a head to which rows of its own are given apart."""

    @classmethod
    def of(cls, program: Program, config: ModelConfig, step_tokens: int, logit_rows: int) -> FedRows:
        """Those of a head, whose program has this room."""
        arena = lay_out(config, step_tokens, logit_rows)
        return cls(program, arena, config.hidden, config.hidden, config.drafts in EAGLES)

    @classmethod
    def for_head(
        cls, program: Program, config: ModelConfig, step_tokens: int, logit_rows: int, kind: str
    ) -> FedRows | None:
        """Those of a model for a head of this kind; None where there is none."""
        if not kind:
            return None
        width = 3 * config.hidden if kind in EAGLES else config.hidden
        return cls(program, lay_out(config, step_tokens, logit_rows), width, config.hidden, False)

    def read(self, n_rows: int) -> RowVectors:
        """The first rows, as the last run left them: [n_rows, width]."""
        rows = np.empty((n_rows, self.width), np.float32)
        self.program.read_rows(*self.arena.fed, rows)
        return rows

    def write(self, rows: RowVectors) -> None:
        """The rows that the next run of a head reads: the model's, or its own."""
        given = np.ascontiguousarray(rows, np.float32)
        if self.has_own_rows:
            is_own, wide = rows.shape[1] == self.hidden, np.zeros((len(rows), 3 * self.hidden), np.float32)
            own = given if is_own else np.zeros((len(rows), self.hidden), np.float32)
            self.program.write_rows(*self.arena.own_rows, own)
            given = wide if is_own else given
        self.program.write_rows(*self.arena.taken, given)
