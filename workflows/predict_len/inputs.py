"""Inputs of `predict-len`: a model's tokens, prompts, logs of answers, and the path of a predictor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from phasewise._json import read_json
from phasewise._words import counted
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.files import default_file
from phasewise.tuner.predictor.log import Log, lines_of, read_log
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from phasewise.serving.embedding.encoder.embedder import Embedder
    from phasewise.serving.embedding.encoder.input_tokens import EncoderText
    from phasewise.serving.engine.open_engine import ModelText
    from phasewise.tuner.predictor.log import Example, PromptFacts


PROMPT_FIELDS = ("prompt", "instruction", "question")


class ModelTokens:
    """The tokenizer of a model, which is loaded at its first use."""

    def __init__(self, ref: str, report: Report = silent) -> None:
        self._ref = ref
        self._report = report

    @cached_property
    def _loaded(self) -> tuple[str, ModelText]:
        from phasewise.serving.engine.open_engine import ModelText
        from phasewise.serving.loaders import load_model

        model = load_model(self._ref, "native", report=self._report)
        return model.name, ModelText(model)

    @property
    def model_name(self) -> str:
        return self._loaded[0]

    def prompt(self, message: str) -> list[int]:
        """The token ids of a prompt with one user's message."""
        return message_prompt(self._loaded[1], message)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without marks around it."""
        return self._loaded[1].encode(text, False)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt's tokens, marks of the template left out."""
        return self._loaded[1].tokenizer.decode(token_ids, from_start=True)


def message_prompt(text: ModelText, message: str) -> list[int]:
    """The token ids of a user's message in the chat template, or as plain text without a template."""
    return text.chat_prompt(message) if text.has_template else text.encode(message, True)


def read_prompts(paths: Sequence[Path]) -> list[str]:
    """Every prompt once: the lines of text files; of JSON lines `prompt`, `instruction` or `question`."""
    prompts: dict[str, None] = {}
    for path in paths:
        for number, line in lines_of(path):
            prompts.setdefault(_prompt_of(line, f"{path}, line {number}"))
    if not prompts:
        raise PredictorError("there is no prompt in these files")
    return list(prompts)


def _prompt_of(line: str, where: str) -> str:
    if not line.lstrip().startswith("{"):
        return line.rstrip("\r\n")
    try:
        row = read_json(line)
    except ValueError:
        raise PredictorError(f"{where}: not JSON, though it begins like it") from None
    for name in PROMPT_FIELDS:
        if isinstance(row.get(name), str):
            return str(row[name])
    raise PredictorError(f"{where}: none of the fields {', '.join(PROMPT_FIELDS)} is a text")


class Answers(NamedTuple):
    """Logs, the model whose answers they hold, and its tokens where they were asked for or are here."""

    logs: list[Log]
    model_name: str
    tokens: ModelTokens | None


def read_logs(paths: Sequence[Path], model: str | None, report: Report = silent) -> Answers:
    """The logs, whose prompts become tokens of `model`, else of the model that their lines name."""
    given = None if model is None else ModelTokens(model, report)
    tokens_by_name: dict[str | None, ModelTokens | None] = {}

    def encode(text: str, named: str | None) -> list[int]:
        if given is None and named not in tokens_by_name:
            tokens_by_name[named] = None if named is None else tokens_here(named, report)
        tokens = given or tokens_by_name[named]
        if tokens is None:
            whose = "it names no model" if named is None else f"its model {named:.80} is not in the cache"
            raise PredictorError(f"it has the prompt's text, and {whose}: give one with --model")
        return tokens.prompt(text)

    logs = [read_log(path, encode) for path in paths]
    names = sorted(frozenset().union(*(log.model_names for log in logs)))
    if len(names) > 1:
        raise PredictorError(
            f"these logs hold answers of several models ({', '.join(names[:4])}): take one's"
        )
    if names:
        return Answers(logs, names[0], given or tokens_by_name.get(names[0]) or tokens_here(names[0], report))
    if given is None:
        raise PredictorError("these logs do not say whose answers they hold: name it with --model")
    return Answers(logs, given.model_name, given)


def tokens_here(name: str, report: Report = silent) -> ModelTokens | None:
    """The tokens of a model that is in the cache. A log's name opens no file and fetches nothing."""
    from phasewise.serving.loaders.fetching.registry import KNOWN, is_here
    from phasewise.serving.loaders.fetching.resolve import cache_root
    from phasewise.serving.loaders.inspection import stored_models

    root = cache_root()
    is_here_now = name in KNOWN and is_here(KNOWN[name], root)
    is_fetched = "/" in name and any(
        stored.name == name and stored.is_whole for stored in stored_models(root)
    )
    return ModelTokens(name, report) if is_here_now or is_fetched else None


def predictor_file(given: Path | None, model_name: str) -> Path:
    """The given file, or the default place of the model's predictor."""
    return default_file(model_name) if given is None else given


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
