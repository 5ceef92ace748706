"""Token ids and rendered chats as other programs see them.

Runs in an interpreter that has llama-cpp-python or transformers: one JSON request on standard input, one JSON
answer on standard output.
"""

from __future__ import annotations

import json
import sys
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


QUESTIONS = {
    "llama_cpp_tokens": llama_cpp_tokens,
    "transformers_tokens": transformers_tokens,
    "transformers_chats": transformers_chats,
}

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    json.dump(QUESTIONS[asked["question"]](asked), sys.stdout)
