"""Facts of the last answers: responses that others go on from, and receipts. In memory.

A client sees its own alone. Used on the event loop.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Any, Generic, NamedTuple, TypeVar

from phasewise.serving.http.errors import ApiError

MOST_KEPT = 1000
MOST_KEPT_CHARACTERS = 32 << 20
STORED_S = 3600.0
"""The limits of responses: their number, their size together, and their age. Receipts have no age."""
_ENTRY_CHARACTERS = 200
"""The bytes that an answer, or a message, takes beside its texts, more or less."""
_MOST_ID = 80  # characters of what is repeated

Value = TypeVar("Value")
Json = dict[str, Any]


class _LastAnswers(Generic[Value]):
    """Values of answers, by client and by the answers' ids."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, tuple[float, int, Value]]] = {}
        """By client, each client's in order of age: when it was put, its characters, and it."""

    @property
    def kept_s(self) -> float:
        return math.inf

    def keep(self, client: str, answer_id: str, value: Value, n_characters: int) -> None:
        """The oldest of the client that holds most give way where there is no room."""
        self._forget_old()
        kept = self._kept.setdefault(client, OrderedDict())
        kept[answer_id] = time.monotonic(), _ENTRY_CHARACTERS + n_characters, value
        while sum(map(len, self._kept.values())) > MOST_KEPT:
            self._drop_oldest(max(self._kept, key=lambda owner: len(self._kept[owner])))
        while sum(map(self._characters_of, self._kept)) > MOST_KEPT_CHARACTERS:
            self._drop_oldest(max(self._kept, key=self._characters_of))

    def find(self, client: str, answer_id: str) -> Value | None:
        self._forget_old()
        kept = self._kept[client].get(answer_id) if client in self._kept else None
        return None if kept is None else kept[2]

    def drop(self, client: str, answer_id: str) -> None:
        """Forget one that is kept."""
        kept = self._kept[client]
        del kept[answer_id]
        if not kept:
            del self._kept[client]

    def _forget_old(self) -> None:
        too_old_s = time.monotonic() - self.kept_s
        for client in list(self._kept):
            while client in self._kept and next(iter(self._kept[client].values()))[0] < too_old_s:
                self._drop_oldest(client)

    def _drop_oldest(self, client: str) -> None:
        self.drop(client, next(iter(self._kept[client])))

    def _characters_of(self, client: str) -> int:
        return sum(n_characters for _, n_characters, _ in self._kept[client].values())


class ReceiptStore(_LastAnswers[list[str]]):
    """Receipts as JSON; an answer has one for each of its choices."""

    def put(self, client: str, answer_id: str, written: str) -> None:
        """Keep a receipt."""
        receipts = [*(self.find(client, answer_id) or ()), written]
        self.keep(client, answer_id, receipts, sum(map(len, receipts)))

    def receipts(self, client: str, answer_id: str) -> str:
        """A JSON list of those of an answer. ApiError where there are none, or none any more."""
        kept = self.find(client, answer_id)
        if kept is None:
            raise ApiError(
                404,
                "no receipt of that answer is kept here (any more): receipts are kept in memory for the "
                "last answers that asked for one, each for its own client",
                code="receipt_not_found",
            )
        return f'{{"object":"list","data":[{",".join(kept)}]}}'


class StoredResponse(NamedTuple):
    """One response, as it was sent, and the conversation up to and with it."""

    messages: list[Json]
    written: str


class ResponseStore(_LastAnswers[StoredResponse]):
    """The last responses and their conversations."""

    @property
    def kept_s(self) -> float:
        return STORED_S

    def put(self, client: str, response_id: str, messages: list[Json], written: str) -> None:
        """Keep a response."""
        n_characters = len(written) + sum(map(_size, messages))
        self.keep(client, response_id, StoredResponse(messages, written), n_characters)

    def stored(self, client: str, response_id: str) -> StoredResponse:
        """ApiError where it is not, or no longer, kept."""
        stored = self.find(client, response_id)
        if stored is None:
            message = f"there is no response {response_id[:_MOST_ID]!r} here, or no longer"
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return stored

    def conversation(self, client: str, response_id: str) -> list[Json]:
        """The conversation up to and with this response. ApiError where it is not, or no longer, known."""
        stored = self.find(client, response_id)
        if stored is None:
            raise ApiError(
                400,
                "previous_response_id names a response that is not stored (any more); send the whole "
                "conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.messages


def _size(message: Json) -> int:
    calls = message.get("tool_calls", ())
    texts = (str(message.get("content") or ""), message.get("reasoning_content") or "")
    return _ENTRY_CHARACTERS + sum(map(len, texts)) + sum(len(str(call)) for call in calls)
