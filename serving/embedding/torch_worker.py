"""The accelerator's backend: the same weights by torch and transformers, behind the extra `phasewise[cuda]`.

Only a worker process imports this module. Tokenization and pooling are shared with the CPU backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels.packing import numbers
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.encoder.pooling import pooled
from phasewise.serving.embedding.protocol import Floats
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.encoders import JINA_BERT, JINA_V3, THEIR_GTE
from phasewise.serving.loaders.fetching.resolve import cache_root, locate
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.models.encoding import Embedding

_ADAPTER = "adapter_config.json"
STEP_TOKENS = 1 << 16
"""The most tokens, padding included, that are computed at once: a bound of the memory of a large batch."""


class TorchEmbedder:
    """A Hugging Face directory on one torch device, in float32. ModelError where it cannot be loaded."""

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
        self._gives = _what_it_gives(path, device)
        by_head = self._gives.scores and self._gives.score_vector is None
        kind = transformers.AutoModelForSequenceClassification if by_head else transformers.AutoModel
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
        """Vectors of the inputs, float32 [inputs, width], padded to the longest, STEP_TOKENS at a time."""
        steps, step, longest = list[list[Tokens]](), list[Tokens](), 0
        for tokens in inputs:
            longest = max(longest, len(tokens.ids))
            if step and (len(step) + 1) * longest > STEP_TOKENS:
                steps.append(step)
                step, longest = [], len(tokens.ids)
            step.append(tokens)
        return np.concatenate([self._computed(each) for each in (*steps, step)])

    def _computed(self, inputs: Sequence[Tokens]) -> Floats:
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
        if self._gives.scores and self._gives.score_vector is None:
            return np.asarray(outputs.logits.float().cpu().numpy()[:, :1], np.float32)
        hidden = outputs.last_hidden_state.float().cpu().numpy()
        return np.stack(
            [self._pooled(rows[: len(tokens.ids)]) for rows, tokens in zip(hidden, inputs, strict=True)]
        )

    def _pooled(self, rows: Floats) -> Floats:
        gives = self._gives
        chosen = {"mean": rows, "first": rows[:1], "last": rows[-1:]}[gives.embedding.pooling]
        if gives.score_vector is None:
            for matrix in gives.dense:
                chosen = chosen @ matrix.T
            return pooled(chosen, gives.embedding)
        return np.array([chosen[0].astype(np.float64) @ gives.score_vector], np.float32)


def _refuse_strangers_code(path: Path) -> None:
    """Refuse links to other directories, and adapters, which transformers would follow to another model."""
    directory = ModelDirectory(path)
    directory.refuse_links_out()
    if directory.has(_ADAPTER):
        raise ModelError(f"{path / _ADAPTER} names another model: give a directory without an adapter")


@dataclass(frozen=True)
class _Gives:
    """The outputs of a model: vectors, or scores by the model's own head or by a vector for the last row."""

    embedding: Embedding
    scores: bool
    score_vector: npt.NDArray[np.float64] | None
    dense: tuple[Floats, ...]
    """Matrices of the products that make a vector of a row."""


def _what_it_gives(path: Path, device: str) -> _Gives:
    """The outputs of the model at `path`. ModelError: it is no embedding model, or transformers lacks it."""
    from phasewise.serving.loaders import open_source
    from phasewise.serving.loaders.fetching.resolve import Located

    with open_source(Located(path.name, path)) as source:
        if source.embedding is None:
            raise ModelError(f"{path} is no embedding model")
        model_type = (ModelDirectory(path).json("config.json") or {}).get("model_type")
        if source.config.architecture in (JINA_BERT.name, JINA_V3.name) or model_type == THEIR_GTE:
            raise ModelError(
                f"{device} cannot run {path}: transformers has {source.config.architecture} models only with"
                " code from beside their weights; --no-embed-accelerators leaves it to the CPU"
            )
        vector = source.tensors["score_out"].rows(0, 1) if source.config.last_row_scores else None
        wide = None if vector is None else np.asarray(vector, np.float64).reshape(-1)
        dense = [source.tensors[f"dense.{n}"] for n, _ in enumerate(source.config.dense, start=1)]
        matrices = tuple(numbers(matrix.rows(0, matrix.shape[0])) for matrix in dense)
        return _Gives(source.embedding, source.config.scores, wide, matrices)
