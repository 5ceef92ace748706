"""An encoder's vectors of prompts, for predictors of lengths: int8, one thread, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.tuner.errors import PredictorError
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from phasewise.serving.embedding.encoder.embedder import Embedder
    from phasewise.serving.embedding.encoder.input_tokens import EncoderText
    from phasewise.tuner.predictor.log import Example, PromptFacts

AUTO, NONE = "auto", "none"
DEFAULT_ENCODER = "all-minilm-l6-v2"
WEIGHT_FORMAT = "int8"

TextOf = Callable[[Sequence[int]], str]
"""The text of a prompt's token ids."""


class PromptEncoder:
    """An embedding model that is loaded at its first use. For any threads, one at a time."""

    def __init__(self, ref: str, report: Report = silent, text_of: TextOf | None = None) -> None:
        self.ref = ref
        self._report = report
        self._text_of = text_of
        self._lock = Lock()

    @cached_property
    def _loaded(self) -> tuple[EncoderText, Embedder]:
        from phasewise.serving.embedding.encoder.embedder import Embedder
        from phasewise.serving.embedding.encoder.input_tokens import EncoderText
        from phasewise.serving.errors import ModelError
        from phasewise.serving.loaders import load_model

        model = load_model(self.ref, WEIGHT_FORMAT, report=self._report)
        if model.config.scores:
            raise ModelError(
                f"{model.name} scores pairs of texts: an encoder that makes vectors can read prompts"
            )
        return EncoderText(model), Embedder(model, (0,), pinned=False)

    def vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """float32 [texts, width]; long texts by their beginnings. ModelError, RanksError, StepFailed."""
        from phasewise.serving.embedding.encoder.pooling import check_numbers

        with self._lock:
            text, embedder = self._loaded
            vectors = embedder.embed(text.tokens(texts, truncate=True))
        check_numbers(vectors)
        return vectors

    def read(self, facts: PromptFacts) -> PromptFacts:
        """The facts with their vector. PredictorError where nothing tells the text."""
        text = facts.text
        if text is None and self._text_of is not None:
            text = self._text_of(facts.token_ids)
        if text is None:
            raise PredictorError(
                "a log has token ids without texts: name the model whose tokens they are with --model"
            )
        return facts._replace(vector=self.vectors([text])[0])

    def read_all(self, examples: Sequence[Example]) -> list[Example]:
        """The same for every example; each text once."""
        facts_by_key: dict[str, PromptFacts] = {}
        with_vectors = []
        for example in examples:
            key = (
                example.facts.text if example.facts.text is not None else repr(tuple(example.facts.token_ids))
            )
            if key not in facts_by_key:
                facts_by_key[key] = self.read(example.facts)
            with_vectors.append(
                replace(example, facts=example.facts._replace(vector=facts_by_key[key].vector))
            )
        return with_vectors


def find_encoder(wanted: str, report: Report = silent, text_of: TextOf | None = None) -> PromptEncoder | None:
    """`none`: no encoder; `auto`: the default one where it is in the cache; else the one named."""
    from phasewise.serving.loaders.fetching.registry import KNOWN, is_here
    from phasewise.serving.loaders.fetching.resolve import cache_root

    if wanted == NONE:
        return None
    if wanted == AUTO:
        if not is_here(KNOWN[DEFAULT_ENCODER], cache_root()):
            return None
        return PromptEncoder(DEFAULT_ENCODER, report, text_of)
    return PromptEncoder(wanted, report, text_of)


def find_encoder_to_learn(
    wanted: str, examples: Sequence[Example], n_learnt: int, text_of: TextOf | None, report: Report = silent
) -> PromptEncoder | None:
    """The encoder for a predictor that learns from `n_learnt` of the examples.

    `auto` is none where it could not learn: too few answers, or token ids whose text nobody knows.
    """
    encoder = find_encoder(wanted, report, text_of)
    if wanted != AUTO or encoder is None:
        return encoder
    from phasewise.tuner.predictor.encoded import FEWEST_EXAMPLES

    alone = "prompts are read as tokens alone"
    if n_learnt < FEWEST_EXAMPLES:
        least = f"{FEWEST_EXAMPLES} are needed for {encoder.ref}"
        report(f"{counted(n_learnt, 'answer')} to learn from, and {least}: {alone}")
        return None
    if text_of is None and any(example.facts.text is None for example in examples):
        report(f"the log has token ids, and their model is not in the cache: {alone}; --model names it")
        return None
    return encoder
