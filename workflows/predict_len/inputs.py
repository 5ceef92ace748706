"""Inputs of `predict-len`: a model's tokens, prompts, logs of answers, and the path of a predictor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from phasewise._json import read_json
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.log import Log, lines_of, read_log
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.engine.open_engine import ModelText


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
        return self._loaded[1].tokenizer.encode(text, False)


def message_prompt(text: ModelText, message: str) -> list[int]:
    """The token ids of a user's message in the chat template, or as plain text without a template."""
    return text.chat_prompt(message) if text.has_template else text.tokenizer.encode(message, True)


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
    """Logs, and the model whose answers they hold."""

    logs: list[Log]
    model_name: str


def read_logs(paths: Sequence[Path], model: str | None, report: Report = silent) -> Answers:
    """Read logs; their prompts become tokens of `model`, else of the model that the logs' lines name."""
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
        return Answers(logs, names[0])
    if given is None:
        raise PredictorError("these logs do not say whose answers they hold: name it with --model")
    return Answers(logs, given.model_name)


def tokens_here(name: str, report: Report = silent) -> ModelTokens | None:
    """The tokens of a cached model, else None. A name from a log opens no file and fetches nothing."""
    from phasewise.serving.loaders.fetching.registry import KNOWN, is_here
    from phasewise.serving.loaders.fetching.resolve import cache_root
    from phasewise.serving.loaders.inspection import stored_models

    root = cache_root()
    is_here_now = name in KNOWN and is_here(KNOWN[name], root)
    is_fetched = "/" in name and any(
        stored.name == name and stored.is_whole for stored in stored_models(root)
    )
    return ModelTokens(name, report) if is_here_now or is_fetched else None
