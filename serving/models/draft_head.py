"""Heads that draft: one layer over the embedding of the next token and a row of the model that is served,
behind its last norm; and rows for a head between two runs of a program.

Of a sequence t the head's position i reads the embedding of t[i + 1] and the model's row i, and gives logits
of t[i + 2] by the model's own product: x = E norm(embedding) + R norm(row), a layer, a last norm. Its own row
stands in for the model's next one, which is not computed yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program
from phasewise.serving.errors import ModelError
from phasewise.serving.models.arena import lay_out
from phasewise.serving.models.linears import Linears, Place, Rows
from phasewise.serving.models.packed_model import LayerForm, ModelConfig, PackedModel
from phasewise.serving.models.parts.site import ActivationArena, ReadRows

PARTS = ("head_embed", "head_rows")
"""Names of a head's weights beside its layer's, each with a norm of its input."""

RowVectors = npt.NDArray[np.float32]


def head_config(config: ModelConfig) -> ModelConfig:
    """The config of a draft head of this model: one layer like the last that attends, with its experts. Its
    tokens see all positions."""
    form, latent, head_dim = config.forms[config.attention_layers[-1]], config.latent, config.head_dim
    alone = LayerForm(form.attention, config.experts or config.ffn)
    if latent is not None:
        latent, head_dim = replace(latent, indexer=None), latent.vector
    return replace(config, forms=(alone,), drafts="mtp", latent=latent, head_dim=head_dim)


def with_own_head(head: PackedModel, model: PackedModel) -> PackedModel:
    """The head with the embeddings and the output product of the model that it drafts for."""
    shared = {name: weight for name, weight in model.weights.items() if name in ("embed", "lm_head")}
    config = replace(head.config, tied_embeddings=model.config.tied_embeddings)
    return replace(head, config=config, weights={**shared, **head.weights})


def check_feeds(config: ModelConfig) -> None:
    """Raise ModelError for a model with LayerNorms, several streams or an encoder: no head reads its rows."""
    if config.layer_norms or config.streams is not None or config.encoder is not None:
        raise ModelError("a head that drafts reads the rows of a model with plain norms and one stream")


def add_head_input(linears: Linears, model: PackedModel, arena: ActivationArena) -> None:
    """Add a head's input, E norm(embedding) + R norm(row), of its tokens' embeddings and the given rows."""
    linears.program.embed(model.weight("embed"), *arena.embedded, model.config.embed_scale)
    for part, source in zip(PARTS, (arena.embedded, arena.taken), strict=True):
        reading = ReadRows(source, model.vectors[f"{part}_norm"], model.config.stream_eps)
        weight, is_second = [(model.weight(part), 0)], source == arena.taken
        linears.add(weight, reading.options(), source, arena.hidden, add=is_second)


def add_normed_rows(
    linears: Linears, model: PackedModel, arena: ActivationArena, source: Place, rows: Rows
) -> None:
    """Add the final norm of `source` into the arena's `fed` rows, for a draft head."""
    norm, eps = model.vectors["final_norm"], model.config.stream_eps
    linears.program.adjust(model.config.hidden, *source, *arena.fed, norm=norm, rows=rows, eps=eps)


@dataclass(frozen=True, slots=True)
class FedRows:
    """The rows that a program, of a model or of a head, gives to the next run of a head."""

    program: Program
    arena: ActivationArena
    hidden: int

    @classmethod
    def of(cls, program: Program, config: ModelConfig, step_tokens: int, logit_rows: int) -> FedRows:
        """The rows of a program with room for `step_tokens` and `logit_rows`."""
        return cls(program, lay_out(config, step_tokens, logit_rows), config.hidden)

    def read(self, n_rows: int) -> RowVectors:
        """Read the first rows that the last run left for a head, float32 [n_rows, hidden]."""
        rows = np.empty((n_rows, self.hidden), np.float32)
        self.program.read_rows(*self.arena.fed, rows)
        return rows

    def write(self, rows: RowVectors) -> None:
        """Write the rows that the next run of a head reads: the served model's, or the head's own."""
        self.program.write_rows(*self.arena.taken, np.ascontiguousarray(rows, np.float32))
