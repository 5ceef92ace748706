"""The tokenizer job of the confined process: it reads one, and cuts texts by it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phasewise.serving.sandbox.confined import JobRefused


def prepare(told: bytes) -> Callable[[bytes], bytes]:
    """The job: a request of `ConfinedTokenizer` in, its answer out, both JSON."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a library do not outlive a fork
    with _quiet(), _refusals("the tokenizer cannot be read"):
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(told.decode("utf-8", "surrogatepass"))
        backend.no_padding()
        backend.no_truncation()

    def cut(request: bytes) -> bytes:
        asked = json.loads(request)
        text = asked["text"]
        with _refusals("the model's tokenizer cannot cut this text"):
            if asked["most"] is not None:
                backend.enable_truncation(asked["most"], strategy="longest_first")
            first, second = (text, None) if isinstance(text, str) else text
            encoding = backend.encode(first, second, add_special_tokens=asked["special"])
            backend.no_truncation()
            match asked["want"]:
                case "ids":
                    answer: object = encoding.ids
                case "spans":
                    answer = [
                        (token_id, *span)
                        for token_id, span in zip(encoding.ids, encoding.offsets, strict=True)
                    ]
                case _:
                    answer = [encoding.ids, encoding.type_ids]
            return json.dumps(answer).encode()

    return cut


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """JobRefused for what the library raises, its panics included."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        raise JobRefused(f"{what}: {' '.join(str(error).split())[:200]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Last words of a library are about its input, not about us."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
