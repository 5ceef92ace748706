"""The accelerator's backend: the same weights by torch and transformers, behind the extra `phasewise[cuda]`.

Only a worker's process imports this. Tokens and pooling are ours, so that both kinds of device differ in
nothing but where the layers are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.encoder.pooling import pooled
from phasewise.serving.embedding.protocol import Floats
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.fetching.resolve import cache_root, locate
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.models.encoding import Embedding

_ADAPTER = "adapter_config.json"


class TorchEmbedder:
    """A Hugging Face directory on one device of torch, in float32. ModelError where it cannot be."""

    def __init__(self, ref: str, device: str) -> None:
        try:
            torch: Any = import_module("torch")
            transformers: Any = import_module("transformers")
        except ImportError as error:
            raise ModelError(
                f"{device} needs torch and transformers: install phasewise with its extra, phasewise[cuda]"
            ) from error
        path = locate(ref, cache_root(), lambda _line: None).path
        if not path.is_dir():
            raise ModelError(f"{path} is no Hugging Face directory, which {device} needs")
        _refuse_strangers_code(path)
        self._torch = torch
        self._device = device if device.startswith("cuda") else "cpu"
        self._embedding, self._scores = _what_it_gives(path)
        kind = transformers.AutoModelForSequenceClassification if self._scores else transformers.AutoModel
        model: Any = kind.from_pretrained(
            str(path),
            torch_dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        self._model = model.to(self._device).eval()
        self._pad = int(self._model.config.pad_token_id or 0)
        self._takes_segments = "token_type_ids" in signature(self._model.forward).parameters

    def embed(self, inputs: Sequence[Tokens]) -> Floats:
        """float32 [inputs, width]; inputs are padded at their end to the longest."""
        torch = self._torch
        longest = max(len(tokens.ids) for tokens in inputs)
        ids = torch.full((len(inputs), longest), self._pad, dtype=torch.long)
        mask = torch.zeros((len(inputs), longest), dtype=torch.long)
        segments = torch.zeros((len(inputs), longest), dtype=torch.long)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens.ids)] = torch.tensor(tokens.ids)
            mask[row, : len(tokens.ids)] = 1
            if tokens.second is not None:
                segments[row, tokens.second : len(tokens.ids)] = 1
        fields = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
        if self._takes_segments:
            fields["token_type_ids"] = segments.to(self._device)
        with torch.inference_mode():
            outputs = self._model(**fields)
        if self._scores:
            return np.asarray(outputs.logits.float().cpu().numpy()[:, :1], np.float32)
        hidden = outputs.last_hidden_state.float().cpu().numpy()
        return np.stack(
            [self._pooled(rows[: len(tokens.ids)]) for rows, tokens in zip(hidden, inputs, strict=True)]
        )

    def _pooled(self, rows: Floats) -> Floats:
        chosen = {"mean": rows, "first": rows[:1], "last": rows[-1:]}[self._embedding.pooling]
        return pooled(chosen, self._embedding)


def _refuse_strangers_code(path: Path) -> None:
    """transformers opens what it likes in a directory, and follows an adapter to another one."""
    directory = ModelDirectory(path)
    directory.refuse_links_out()
    if directory.has(_ADAPTER):
        raise ModelError(f"{path / _ADAPTER} names another model: give a directory without an adapter")


def _what_it_gives(path: Path) -> tuple[Embedding, bool]:
    """The pooling of its rows to vectors, and whether it gives scores instead."""
    from phasewise.serving.loaders import open_source
    from phasewise.serving.loaders.fetching.resolve import Located

    with open_source(Located(path.name, path)) as source:
        if source.embedding is None:
            raise ModelError(f"{path} is no embedding model")
        encoder = source.config.encoder
        return source.embedding, encoder is not None and encoder.scores
