"""Settings of embedding models and of rerankers: sentence-transformers' files in a Hugging Face directory,
and decoders that score a pair of texts by the row of its last token (Qwen3-Reranker and its kind), of GGUF
files too.

`modules.json` lists the modules, `1_Pooling/config.json` gives the pooling, `2_Dense` a matrix that vectors
are multiplied by, `sentence_bert_config.json` the longest input, `config_sentence_transformers.json` the
prompts; an encoder's directory without these files gives means of length 1.

A reranker's score is the logit of "yes" less that of "no", one product with a vector. A pair becomes one text
by the model's own template, which is rendered once here and filled in for each pair."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from phasewise._words import counted
from phasewise.cython_kernels.packing import numbers
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.hf_config import field
from phasewise.serving.loaders.formats.model_directory import ModelDirectory, open_all, tensor_of
from phasewise.serving.loaders.source import F32, Rows, SourceTensor
from phasewise.serving.models.encoding import PAIR_PLACES, Embedding
from phasewise.serving.models.packed_model import ModelConfig

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
KINDS = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
"""Kinds of modules, in the order in which they can run."""
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
    """The embedding that a directory describes; None for a decoder that is not called an embedding model."""
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
    """The most tokens of an input: what the directory says, at most `context_length`."""
    own = directory.json("sentence_bert_config.json") or {}
    stated = field(own, "max_seq_length", int)
    if stated is None:
        stated = (directory.json("tokenizer_config.json") or {}).get("model_max_length")
    return min(stated, context_length) if type(stated) is int and stated > 0 else context_length


class StatedPrompts(NamedTuple):
    """Prompts by name. `default`: the name of the prompt of a text whose request names none."""

    prompts: tuple[tuple[str, str], ...]
    default: str | None


def stated_prompts(directory: ModelDirectory) -> StatedPrompts:
    """Read the prompts of a directory. Raises ModelError for a prompt that is no short text."""
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
    """Read each module's (kind, folder); None without a list. Raises ModelError for an unsupported kind."""
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
    order = [KINDS.index(kind) for kind, _ in modules]
    if order != sorted(order):
        raise ModelError(f"{where} has modules in another order than {', '.join(KINDS)}")
    return modules


def dense_of(directory: ModelDirectory, stack: ExitStack) -> dict[str, SourceTensor]:
    """The matrices of a directory's Dense modules, by our names; `stack` closes their files. Raises
    ModelError for one with a bias or an activation, whose products of rows have no mean."""
    folders = [path for kind, path in modules_of(directory) or () if kind == "Dense"]
    matrices = {}
    for number, folder in enumerate(folders, start=1):
        own, name = directory.json(f"{folder}/config.json") or {}, f"{folder}/model.safetensors"
        activation = str(own.get("activation_function", "Tanh")).rpartition(".")[2]
        ((file, entries),) = open_all(directory, [name], stack)
        if activation != "Identity" or list(entries) != ["linear.weight"]:
            raise ModelError(
                f"{directory.path / folder} has the activation {activation:.60} and"
                f" {counted(len(entries), 'tensor')}: Identity and linear.weight alone can run"
            )
        matrices[f"dense.{number}"] = tensor_of(file, *entries.popitem())
    return matrices


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


INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
YES, NO = "yes", "no"
CLASSIFIER = "ForSequenceClassification"
_README_BYTES = 1 << 20


@dataclass(frozen=True)
class Reranker:
    """A decoder's way to score a pair of texts: a template, and rows `yes` and `no` of the output head. The
    score is the difference of the rows' logits. None for `yes`: the file has its own weight for the score;
    for `no`: the score is one logit."""

    yes: int | None
    no: int | None
    template: str
    instruction: str


def reranker_of(
    directory: ModelDirectory, fields: Mapping[str, Any], chat_template: str | None, name: str
) -> Reranker | None:
    """The reranker in a decoder's directory, found by sentence-transformers' modules, by a classifier's head,
    or by the name of Qwen's own directories; None where there is none. Raises ModelError."""
    modules, is_qwen = modules_of(directory), field(fields, "model_type", str) == "qwen3"
    where = next((path for kind, path in modules or () if kind == "LogitScore"), None)
    if where is not None:
        own = directory.json(f"{where}/config.json" if where else "config.json") or {}
        yes, no = field(own, "true_token_id", int), field(own, "false_token_id", int)
        if yes is None:
            raise ModelError(f"{directory.path / where} names no true_token_id")
        return _templated(directory, is_qwen, chat_template, yes, no)
    if is_classifier(fields):
        return _templated(directory, is_qwen, chat_template, None, None)
    if modules is None and is_qwen and _is_called_reranker(directory, fields, name):
        return _templated(directory, is_qwen, chat_template, *_answers(directory))
    return None


def is_classifier(fields: Mapping[str, Any]) -> bool:
    """True if the model gives a pair of texts one score. Raises ModelError for several scores."""
    named = field(fields, "architectures", list) or []
    if not any(isinstance(name, str) and name.endswith(CLASSIFIER) for name in named):
        return False
    labels = field(fields, "id2label", dict)
    count = field(fields, "num_labels", int, 2) if labels is None else len(labels)
    if count != 1:
        raise ModelError(f"config.json describes a classifier of {count} classes: one output can run")
    return True


def _is_called_reranker(directory: ModelDirectory, fields: Mapping[str, Any], name: str) -> bool:
    hints = [name, directory.path.name, str(fields.get("_name_or_path", ""))]
    if any("qwen3-reranker" in hint.lower() for hint in hints):
        return True
    return directory.has("README.md") and "# qwen3-reranker" in _readme(directory).lower()


def _readme(directory: ModelDirectory) -> str:
    """The README; "" where it is no text of a page's length."""
    try:
        return directory.text("README.md", _README_BYTES)
    except ModelError:
        return ""


def _answers(directory: ModelDirectory) -> tuple[int, int]:
    from phasewise.serving.loaders.source import MAX_TOKENIZER_BYTES, parse_json_object

    tokenizer = parse_json_object(directory.text("tokenizer.json", MAX_TOKENIZER_BYTES), "tokenizer.json")
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = vocabulary if isinstance(vocabulary, dict) else {}
    yes, no = ids.get(YES), ids.get(NO)
    if not isinstance(yes, int) or not isinstance(no, int):
        raise ModelError(
            f"{directory.path} is called a reranker, and its vocabulary has no {YES!r} and {NO!r}"
        )
    return yes, no


def _templated(
    directory: ModelDirectory, is_qwen: bool, chat_template: str | None, yes: int | None, no: int | None
) -> Reranker:
    """Make a reranker with the chat template's text of a pair, else with that of Qwen's models."""
    stated = stated_prompts(directory)
    theirs = None if chat_template is None else pair_template(chat_template)
    if theirs is None and not is_qwen:
        raise ModelError(
            f"{directory.path} scores pairs of texts, and its chat template does not show the contents of"
            " the roles query and document"
        )
    template, own = (QWEN3_TEMPLATE, INSTRUCTION) if theirs is None else theirs
    default = None if stated.default is None else dict(stated.prompts).get(stated.default)
    return Reranker(yes, no, template, own if default is None else default)


def pair_template(chat_template: str) -> tuple[str, str] | None:
    """The text of a pair with PAIR_PLACES in it, and the chat template's own instruction. None where the
    template does not show both texts of a pair. Raises ModelError where it cannot be read."""
    from phasewise.serving.text.chat_template import ChatTemplateError, Conversation, Conversations

    instruction, query, document = PAIR_PLACES
    pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    conversations = Conversations(chat_template, {}, ())
    try:
        conversations.start(with_form=False)
        bare = conversations.write(Conversation(pair)).text
        whole = conversations.write(Conversation([{"role": "system", "content": instruction}, *pair])).text
    except ChatTemplateError:
        return None
    finally:
        conversations.close()
    if any(text.count(place) != 1 for text in (bare, whole) for place in (query, document)):
        return None
    if whole.count(instruction) != 1:
        return bare, ""
    before, _, behind = whole.partition(instruction)
    if len(before) + len(behind) > len(bare) or not (bare.startswith(before) and bare.endswith(behind)):
        return bare, ""
    return whole, bare[len(before) : len(bare) - len(behind)]


def with_score(
    reranker: Reranker, config: ModelConfig, tensors: dict[str, SourceTensor], path: Path
) -> tuple[ModelConfig, dict[str, SourceTensor]]:
    """Replace the output head of a decoder's config and tensors by the score's vector."""
    tensors = dict(tensors)
    head = tensors.pop("lm_head", None)
    if reranker.yes is not None:
        head, of = (tensors["embed"], "embed") if head is None else (head, "lm_head")
        tensors["score_out"] = score_vector(head, reranker.yes, reranker.no, f"{path}: the tensor for {of}")
    return replace(config, last_row_scores=True, tied_embeddings=True), tensors


def scoring_embedding(reranker: Reranker, max_tokens: int) -> Embedding:
    return Embedding(
        "last", False, max_tokens, pair_template=reranker.template, instruction=reranker.instruction
    )


def gguf_score(head: SourceTensor | None, what: str) -> SourceTensor:
    """The vector of a file's own head, whose rows are yes and no, or yes alone. Raises ModelError."""
    if head is None:
        raise ModelError(f"{what} is a reranker by its pooling type, and lacks the tensor cls.output.weight")
    if len(head.shape) == 1:
        return head  # GGUF files leave out dimensions of one
    if head.shape[0] not in (1, 2):
        raise ModelError(f"{what} gives a pair {head.shape[0]} scores: one, or yes and no, can run")
    return score_vector(head, 0, None if head.shape[0] == 1 else 1, f"{what}: the tensor cls.output.weight")


def gguf_template(stated: str | None, architecture: str, what: str) -> tuple[str, str]:
    """The text of a pair with PAIR_PLACES in it, and its instruction. Raises ModelError where it is
    missing."""
    if stated is not None:
        if any(stated.count(place) != 1 for place in PAIR_PLACES[1:]):
            raise ModelError(f"{what} has a rerank template without {{query}} or {{document}}")
        return stated.replace(INSTRUCTION, PAIR_PLACES[0], 1), INSTRUCTION
    if architecture != "qwen3":
        raise ModelError(f"{what} is a reranker by its pooling type, and has no rerank template")
    return QWEN3_TEMPLATE, INSTRUCTION


def score_vector(head: SourceTensor, yes: int, no: int | None, what: str) -> SourceTensor:
    """Row `yes` of a matrix, less row `no`, as a float32 vector. Raises ModelError for missing rows."""
    if len(head.shape) != 2:
        raise ModelError(f"{what} is {head.shape}: a matrix expected")
    for row in (yes, no or 0):
        if not 0 <= row < head.shape[0]:
            raise ModelError(f"{what} has {head.shape[0]} rows, and the score is of row {row}")
    read, width = head.rows, head.shape[1]

    def of_row(row: int) -> np.ndarray:
        return np.asarray(numbers(read(row, row + 1)), np.float32).reshape(1, -1)

    def rows(_start: int, _stop: int) -> Rows:
        return of_row(yes) if no is None else of_row(yes) - of_row(no)

    return SourceTensor("F32", (width,), 4 * width, F32, rows)
