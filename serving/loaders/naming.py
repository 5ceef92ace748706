"""The one way from a file's tensors to ours, of decoders, encoders, draft heads and adapters, in either
format: a file's reader gives names and tensors; a `Naming` says what they are called here, and cuts them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Cut, CutFor, Names, Shapes, our_tensors, picked
from phasewise.serving.loaders.layout import shapes_of_all
from phasewise.serving.loaders.source import SourceTensor
from phasewise.serving.models.packed_model import ModelConfig

NUMBER = r"(0|[1-9]\d{0,3})"
"""The pattern of the number of a layer or an expert."""
_KEYS_AND_VALUES = ("k", "v", "k_norm")
_TURNED = re.compile(r"layers\.\d+\.([qk])(_bias)?")
_EXPERT = re.compile(rf"\.experts\.{NUMBER}\.", re.ASCII)


@dataclass(frozen=True)
class Naming:
    """The names of one file's tensors. `what`: the file, in errors. `layer`: the pattern of names in layers,
    whose groups are the layer's number and the name there. `n_more`: layers behind the model's own, which are
    left out. `interleaved`: True if RoPE rotates neighbours, whose rows are put apart. `bare`: takes away the
    beginning of a name that comes before the model's."""

    config: ModelConfig
    what: str
    layer: str
    in_layers: Names
    outside: Names
    has_bias: bool
    n_more: int = 0
    interleaved: bool = False
    bare: Callable[[str], str] = str

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes of the config's tensors by our names."""
        return shapes_of_all(self.config, self.has_bias)

    def place(self, name: str) -> tuple[str, str, str]:
        """Split a name into its layer's "layers.3." ("" outside layers), the name within the layer, and the
        expert's number, which "{e}" replaces."""
        name = self.bare(name)
        match = re.fullmatch(self.layer, name, re.ASCII)
        if match is None:
            return "", name, ""
        expert = _EXPERT.search(match[2])
        own = match[2] if expert is None else match[2].replace(expert[0], ".experts.{e}.")
        return f"layers.{match[1]}.", own, "" if expert is None else expert[1]

    def _names(self, stem: str) -> Names:
        return self.in_layers if stem else self.outside

    def named(self, name: str) -> str | Cut | None:
        """Our name of a tensor, or its cut; None: the family has no such tensor."""
        stem, own, expert = self.place(name)
        ours = self._names(stem).get(own)
        return stem + ours.replace("{e}", expert) if isinstance(ours, str) else ours

    def tensors(self, files: Iterable[tuple[str, SourceTensor]]) -> dict[str, SourceTensor]:
        """Every tensor by our names. Raises ModelError for one that is there twice or has no use."""
        tensors: dict[str, SourceTensor] = {}
        for theirs, tensor in files:
            for ours, own in self.ours(theirs, tensor, f"{self.what} has a tensor {theirs!r:.80} that"):
                if ours in tensors:
                    raise ModelError(f"{self.what} has the tensor for {ours} twice")
                tensors[ours] = own
        return tensors

    def ours(self, name: str, tensor: SourceTensor, what: str) -> Iterator[tuple[str, SourceTensor]]:
        """Our names and tensors of a file's tensor. `what`: the tensor, in errors."""
        stem, own, expert = self.place(name)
        n_layers = self.config.n_layers
        layer = int(stem.split(".")[1]) if stem else -1
        if n_layers <= layer < n_layers + self.n_more:
            return
        cut_for = CutFor(stem, self.shapes, what, self.config.turns)
        shares = 0 <= layer < n_layers and self.config.forms[layer].shares
        for ours, part in our_tensors(own, self._names(stem), tensor, cut_for, self.config.architecture):
            if shares and ours.removeprefix(stem) in _KEYS_AND_VALUES:
                continue  # of another layer, as some files hold them
            yield ours.replace("{e}", expert), self._half_split(ours, part) if self.interleaved else part

    def _half_split(self, ours: str, tensor: SourceTensor) -> SourceTensor:
        """Reorder rotated rows of queries and keys from pairs side by side, (2 i, 2 i + 1), to (i, i + half).
        Rows that are not rotated keep their places behind the others. `ours`: our name of the tensor; tensors
        other than queries and keys stay as they are."""
        config, match = self.config, _TURNED.fullmatch(ours)
        if match is None:
            return tensor
        head_dim = max(tensor.shape[0] // (config.n_heads if match[1] == "q" else config.n_kv_heads), 1)
        order, turned = np.arange(head_dim), min(config.rope.dim, head_dim) // 2 * 2
        half, i = np.divmod(np.arange(turned), max(turned // 2, 1))
        order[:turned] = 2 * i + half
        return picked(
            tensor, tensor.shape[0], lambda rows: rows // head_dim * head_dim + order[rows % head_dim]
        )
