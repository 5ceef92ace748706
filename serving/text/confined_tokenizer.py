"""A tokenizer whose parts could take minutes or gigabytes cuts texts in a confined process (`confined`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from phasewise.serving.errors import ModelError, QueueFull, RequestError
from phasewise.serving.sandbox.confined import Bounds, ConfinedError, ConfinedProcess, JobRefused, Unserved

if TYPE_CHECKING:
    import tokenizers

BOUNDS = Bounds(seconds=1.0, memory_bytes=256 << 20, start_s=30.0)
"""Bounds of cutting one text, or one text of a batch."""
Want = Literal["ids", "spans", "typed"]
Text = str | tuple[str, str]


class ConfinedTokenizer:
    """Cuts texts by the whole of a tokenizer.json. Any thread may ask; texts take turns.

    ModelError where it cannot be read within the bounds; RequestError for a text that they stop, QueueFull
    where the machine does not get to it.
    """

    def __init__(self, text: str, bounds: Bounds = BOUNDS) -> None:
        self._process = ConfinedProcess("tokenizer", text.encode("utf-8", "surrogatepass"), bounds)
        try:
            self._process.start()
        except ConfinedError as error:
            raise ModelError(f"the tokenizer cannot be read: {error}; fetch the model again") from error

    def cut(self, want: Want, text: Text, *, special: bool, most: int | None = None) -> Any:
        """The result of `cut` for one text."""
        request = {"want": want, "texts": [text], "special": special, "most": most}
        try:
            return json.loads(self._process.ask(json.dumps(request).encode()))[0]
        except JobRefused as error:
            raise RequestError(str(error)) from error
        except Unserved as error:
            raise QueueFull(f"the text was not cut into tokens: {error}; try again later", 1) from error
        except ConfinedError as error:
            raise RequestError(f"the model's tokenizer was stopped: {error}; send another text") from error

    def close(self) -> None:
        """End the process."""
        self._process.close()


def cut(backend: tokenizers.Tokenizer, want: Want, texts: Sequence[Text], special: bool) -> list[Any]:
    """Token ids of each text, alone, or each with its span, or all with their types behind them.

    special: with the tokens that are put around it.
    """
    # A batch, though of one: for that alone the library lets other threads run meanwhile.
    encode = backend.encode_batch_fast if want == "ids" else backend.encode_batch
    encoded = encode(list(texts), add_special_tokens=special)
    if want == "ids":
        return [encoding.ids for encoding in encoded]
    if want == "typed":
        return [(encoding.ids, encoding.type_ids) for encoding in encoded]
    placed = (zip(encoding.ids, encoding.offsets, strict=True) for encoding in encoded)
    return [[(token_id, *span) for token_id, span in pairs] for pairs in placed]


def prepare(told: bytes) -> Callable[[bytes], bytes]:
    """The job of the confined process: a request of `ConfinedTokenizer` in, its answer out, both JSON."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a library do not outlive a fork
    with _quiet(), _refusals("the tokenizer cannot be read"):
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(told.decode("utf-8", "surrogatepass"))
        backend.no_padding()
        backend.no_truncation()

    def job(request: bytes) -> bytes:
        asked = json.loads(request)
        most = asked.pop("most")
        texts = [text if isinstance(text, str) else tuple(text) for text in asked.pop("texts")]
        with _refusals("the model's tokenizer cannot cut this text"):
            if most is not None:
                backend.enable_truncation(most, strategy="longest_first")
            out = json.dumps(cut(backend, texts=texts, **asked)).encode()
            backend.no_truncation()
        return out

    return job


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
