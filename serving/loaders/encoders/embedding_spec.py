"""The embedding settings of a Hugging Face directory: the files of sentence-transformers.

`modules.json` lists what follows what, `1_Pooling/config.json` says how rows become one,
`sentence_bert_config.json` how long an input may be, `config_sentence_transformers.json` what stands before
texts. A directory of an encoder without them gives means of length 1.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.hf_config import field
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.models.encoding import Embedding

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
KINDS = ("Transformer", "Pooling", "Normalize", "LogitScore")
_MOST_PROMPTS, _MOST_PROMPT_CHARS = 256, 1 << 14
_MOST_MODULES = 16
_POOLINGS = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"cls": "first", "mean": "mean", "lasttoken": "last"}  # of newer files
_OTHER_POOLINGS = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)


def embedding_of(directory: ModelDirectory, context_length: int, *, encoder: bool) -> Embedding | None:
    """The embedding that the directory describes; None for a decoder that it does not call an embedding
    model.
    """
    modules = modules_of(directory)
    if modules is None and not encoder:
        return None
    own = directory.json("sentence_bert_config.json") or {}
    most, lower = most_tokens(directory, context_length), field(own, "do_lower_case", bool, False)
    prompts = stated_prompts(directory)
    if modules is None:
        return Embedding("mean", True, most, lower, *prompts)
    if any(kind == "LogitScore" for kind, _ in modules):
        raise ModelError(f"{directory.path / MODULES} asks for LogitScore, which goes with a decoder")
    pooling_at = next((path for kind, path in modules if kind == "Pooling"), "")
    pooling = _pooling(directory, f"{PurePosixPath(pooling_at) / 'config.json'}", encoder=encoder)
    return Embedding(pooling, any(kind == "Normalize" for kind, _ in modules), most, lower, *prompts)


def most_tokens(directory: ModelDirectory, context_length: int) -> int:
    """The longest input: what the directory says, as far as the model has positions."""
    own = directory.json("sentence_bert_config.json") or {}
    stated = field(own, "max_seq_length", int)
    if stated is None:
        stated = (directory.json("tokenizer_config.json") or {}).get("model_max_length")
    return min(stated, context_length) if type(stated) is int and stated > 0 else context_length


class StatedPrompts(NamedTuple):
    """`default`: the name of the prompt of texts for which none is asked."""

    prompts: tuple[tuple[str, str], ...]
    default: str | None


def stated_prompts(directory: ModelDirectory) -> StatedPrompts:
    """The prompts of the directory, none where it names none. ModelError for what is no text."""
    fields, where = directory.json(SETTINGS) or {}, directory.path / SETTINGS
    prompts = field(fields, "prompts", dict) or {}
    default = field(fields, "default_prompt_name", str)
    if len(prompts) > _MOST_PROMPTS:
        raise ModelError(
            f"{where} has {counted(len(prompts), 'prompt')}: at most {_MOST_PROMPTS} can be named"
        )
    for name, text in prompts.items():
        if text is not None and (not isinstance(text, str) or len(text) > _MOST_PROMPT_CHARS):
            raise ModelError(f"{where} has the prompt {name!r:.40} as {text!r:.40}: a short text expected")
    given = tuple((name, text) for name, text in prompts.items() if text is not None)
    if default is not None and default not in prompts:
        raise ModelError(f"{where} has default_prompt_name = {default!r:.60}, and no prompt of that name")
    return StatedPrompts(given, default if default in dict(given) else None)


def modules_of(directory: ModelDirectory) -> list[tuple[str, str]] | None:
    """(kind, folder) of each, None without a list; ModelError for a kind that cannot run."""
    listed = directory.json_list(MODULES, _MOST_MODULES)
    if listed is None:
        return None
    modules, where = [], directory.path / MODULES
    for entry in listed:
        kind = str(entry.get("type", "")).rpartition(".")[2] if isinstance(entry, dict) else ""
        path = entry.get("path", "") if isinstance(entry, dict) else ""
        if kind not in KINDS:
            raise ModelError(f"{where} asks for {kind!r:.60}; {', '.join(KINDS)} can run")
        if not isinstance(path, str) or path.startswith("/") or ".." in path:
            raise ModelError(f"{where} names the folder {path!r:.60}")
        modules.append((kind, path))
    return modules


def _pooling(directory: ModelDirectory, name: str, *, encoder: bool) -> str:
    fields, path = directory.json(name), directory.path / name
    if fields is None:
        return "mean" if encoder else "last"
    if fields.get("include_prompt", True) is not True:
        raise ModelError(f"{path} leaves the tokens of prompts out of what is pooled, which cannot run")
    named = fields.get("pooling_mode")
    if isinstance(named, str):
        if named not in _NAMES:
            raise ModelError(f"{path} asks for pooling {named!r:.60}; {', '.join(_NAMES)} can run")
        return _NAMES[named]
    wanted = [ours for theirs, ours in _POOLINGS.items() if fields.get(theirs)]
    others = [theirs for theirs in _OTHER_POOLINGS if fields.get(theirs)]
    if others or len(wanted) != 1:
        raise ModelError(
            f"{path} asks for {', '.join([*others, *wanted]) or 'no'} pooling:"
            f" one of {', '.join(_POOLINGS)} can run"
        )
    return wanted[0]
