"""Token ids, rendered chats, converted files and logits as other programs make them.

Runs in an interpreter that has llama-cpp-python or transformers: one JSON request on standard input, one JSON
answer on standard output.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def llama_cpp_tokens(request: dict[str, Any]) -> list[list[int]]:
    """Ids of every text, special tokens recognised. `gguf`: path; `texts`; `add_special`."""
    from llama_cpp import Llama

    model = Llama(model_path=request["gguf"], vocab_only=True, verbose=False)
    add_special = bool(request["add_special"])
    return [model.tokenize(text.encode(), add_bos=add_special, special=True) for text in request["texts"]]


def transformers_tokens(request: dict[str, Any]) -> dict[str, Any]:
    """Ids of every text and what these decode to. `folder` holds tokenizer(_config).json."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    add_special = bool(request["add_special"])
    ids = [tokenizer(text, add_special_tokens=add_special)["input_ids"] for text in request["texts"]]
    return {"ids": ids, "texts": [tokenizer.decode(line, skip_special_tokens=True) for line in ids]}


def transformers_chats(request: dict[str, Any]) -> list[str]:
    """Every conversation of `chats` (keyword arguments of apply_chat_template) rendered by its `template`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    return [
        tokenizer.apply_chat_template(tokenize=False, chat_template=request["template"], **chat)
        for chat in request["chats"]
    ]


def transformers_classes(request: dict[str, Any]) -> dict[str, str | None]:
    """transformers' class for each of `model_types`; None where it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {kind: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) for kind in request["model_types"]}


def transformers_logits(request: dict[str, Any]) -> list[list[list[float]]]:
    """Of the model in `folder`: logits after each of `prompts` and each of its `n_tokens` greedy tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        request["folder"], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = []
    for prompt in request["prompts"]:
        ids, rows = list(prompt), []
        with torch.no_grad():
            for _ in range(request["n_tokens"]):
                row = model(torch.tensor([ids])).logits[0, -1]
                rows.append(row.tolist())
                ids.append(int(row.argmax()))
        answers.append(rows)
    return answers


def converted(request: dict[str, Any]) -> None:
    """The model in `folder` written to `gguf` by the converter of llama.cpp's `source`, with `options` more.

    `pre`: the name of the way of cutting, where the converter would not know the vocabulary; None: it does.
    `as_it_is`: transformers adds no default to config.json, as where a model's own code reads it.
    """
    sys.path[:0] = [request["source"], f"{request['source']}/gguf-py"]
    import convert_hf_to_gguf as converter
    from conversion.base import ModelBase, TextModel
    from conversion.deepseek import DeepseekV32Model
    from conversion.hunyuan import HunYuanMoEModel

    if request["pre"] is not None:
        TextModel.get_vocab_base_pre = lambda *_: request["pre"]
        # Whose own are of tiktoken's files, and of tokenizers of transformers 4.
        HunYuanMoEModel.set_vocab = DeepseekV32Model.set_vocab = TextModel._set_vocab_gpt2
    if request.get("as_it_is"):
        own = json.loads((Path(request["folder"]) / "config.json").read_text())
        ModelBase.load_hparams = staticmethod(lambda *_, **_more: dict(own))
    sys.argv[1:] = [request["folder"], "--outfile", request["gguf"], *request["options"]]
    with contextlib.redirect_stdout(sys.stderr):
        converter.main()


QUESTIONS = {
    "transformers_classes": transformers_classes,
    "transformers_logits": transformers_logits,
    "converted": converted,
    "llama_cpp_tokens": llama_cpp_tokens,
    "transformers_tokens": transformers_tokens,
    "transformers_chats": transformers_chats,
}

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    json.dump(QUESTIONS[asked["question"]](asked), sys.stdout)
