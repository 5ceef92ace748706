"""A tokenizer whose parts could take minutes or gigabytes cuts texts in a confined process (`confined`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from phasewise.serving.errors import ModelError, QueueFull, RequestError
from phasewise.serving.sandbox.confined import Bounds, ConfinedError, ConfinedProcess, JobRefused, Unserved

BOUNDS = Bounds(seconds=1.0, memory_bytes=256 << 20, start_s=30.0)
"""Bounds of cutting one text, or one text of a batch."""


class ConfinedTokenizer:
    """Cuts texts by the whole of a tokenizer.json. Any thread may ask; texts take turns.

    ModelError where it cannot be read within the bounds; RequestError for a text that cannot be cut within
    them, QueueFull where the machine does not get to it.
    """

    def __init__(self, text: str, bounds: Bounds = BOUNDS) -> None:
        self._process = ConfinedProcess("tokenizer", text.encode("utf-8", "surrogatepass"), bounds)
        try:
            self._process.start()
        except ConfinedError as error:
            raise ModelError(f"the tokenizer cannot be read: {error}; fetch the model again") from error

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids."""
        ids: list[int] = self._ask("ids", text, add_special, None)
        return ids

    def encode_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Token ids, each with where it begins and ends in the text; no special tokens around them."""
        return [(token_id, begin, end) for token_id, begin, end in self._ask("spans", text, False, None)]

    def encode_typed(
        self, text: str | tuple[str, str], max_tokens: int | None
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Token ids and types of a text or a pair, cut off behind `max_tokens`, with special tokens."""
        ids, types = self._ask("typed", text, True, max_tokens)
        return ids, types

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, want: str, text: str | tuple[str, str], add_special: bool, max_tokens: int | None) -> Any:
        request = {"want": want, "text": text, "special": add_special, "most": max_tokens}
        try:
            return json.loads(self._process.ask(json.dumps(request).encode()))
        except JobRefused as error:
            raise RequestError(str(error)) from error
        except Unserved as error:
            raise QueueFull(f"the text was not cut into tokens: {error}; try again later", 1) from error
        except ConfinedError as error:
            raise RequestError(f"the model's tokenizer was stopped: {error}; send another text") from error
