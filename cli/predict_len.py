"""`phasewise predict-len` between its options and the tuner: prompts, logs and predictors on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.cli.present import note
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.files import default_file
from phasewise.tuner.predictor.log import Log, lines_of, read_log

if TYPE_CHECKING:
    from phasewise.serving.open_engine import ModelText
    from phasewise.tuner.predictor.train import Epoch

PROMPT_FIELDS = ("prompt", "instruction", "question")


class Tokens:
    """A model's tokens, loaded when they are first asked for."""

    def __init__(self, ref: str) -> None:
        self._ref = ref

    @cached_property
    def _loaded(self) -> tuple[str, ModelText]:
        from phasewise.serving.loaders import load_model
        from phasewise.serving.open_engine import ModelText

        model = load_model(self._ref, "native", report=note)
        return model.name, ModelText(model)

    @property
    def model_name(self) -> str:
        return self._loaded[0]

    def prompt(self, message: str) -> list[int]:
        """The prompt that the model is given for a user's message."""
        return message_prompt(self._loaded[1], message)


def message_prompt(text: ModelText, message: str) -> list[int]:
    """By the chat template, or as plain text for a model without one."""
    return text.encode(message, True) if text.render_chat is None else text.chat_prompt(message)


def read_prompts(paths: Sequence[Path]) -> list[str]:
    """Every line of text files; of JSON lines the field `prompt`, `instruction` or `question`. Each once."""
    found: dict[str, None] = {}
    for path in paths:
        for at, line in lines_of(path):
            found.setdefault(_prompt_of(line, f"{path}, line {at}"))
    if not found:
        raise PredictorError("there is no prompt in these files")
    return list(found)


def _prompt_of(line: str, where: str) -> str:
    if not line.lstrip().startswith("{"):
        return line.rstrip("\r\n")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise PredictorError(f"{where}: not JSON, though it begins like it") from None
    for name in PROMPT_FIELDS:
        if isinstance(row.get(name), str):
            return str(row[name])
    raise PredictorError(f"{where}: none of the fields {', '.join(PROMPT_FIELDS)} is a text")


def read_logs(paths: Sequence[Path], tokens: Tokens | None) -> tuple[list[Log], str]:
    """The logs, and whose answers they hold: what their lines say, else the model that was given."""
    logs = [read_log(path, tokens.prompt if tokens else None) for path in paths]
    names = sorted(frozenset().union(*(log.model_names for log in logs)))
    if len(names) > 1:
        raise PredictorError(
            f"these logs hold answers of several models ({', '.join(names[:4])}): take one's"
        )
    if names:
        return logs, names[0]
    if tokens is None:
        raise PredictorError("these logs do not say whose answers they hold: name it with --model")
    return logs, tokens.model_name


def predictor_file(given: Path | None, model_name: str) -> Path:
    """What was given, else where the model's own predictor is kept."""
    return default_file(model_name) if given is None else given


def tell_epoch(epoch: Epoch) -> None:
    """One line of progress, each network's."""
    note(
        f"network {epoch.member + 1}, epoch {epoch.number}: "
        f"loss {epoch.loss:.3f}, unseen {epoch.unseen_loss:.3f}"
    )
