"""The last receipts, in memory. A client sees its own alone. On the event loop."""

from __future__ import annotations

from collections import OrderedDict

from phasewise.serving.http.errors import ApiError

MOST_KEPT = 1000
"""Answers whose receipts are kept."""
MOST_KEPT_CHARACTERS = 32 << 20
_ENTRY_CHARACTERS = 200


class ReceiptStore:
    """Receipts as JSON, by client and by the id of their answer, which has one for each of its choices."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, list[str]]] = {}
        """By client; each client's in order of age."""

    def put(self, client: str, answer_id: str, written: str) -> None:
        """Keep a receipt. Where there is no room, the oldest of the client that holds most give way."""
        self._kept.setdefault(client, OrderedDict()).setdefault(answer_id, []).append(written)
        while sum(map(len, self._kept.values())) > MOST_KEPT:
            self._drop_oldest(max(self._kept, key=lambda owner: len(self._kept[owner])))
        while sum(map(self._characters_of, self._kept)) > MOST_KEPT_CHARACTERS:
            self._drop_oldest(max(self._kept, key=self._characters_of))

    def receipts(self, client: str, answer_id: str) -> str:
        """A JSON list of those of an answer. ApiError where there are none, or none any more."""
        kept = self._kept[client].get(answer_id) if client in self._kept else None
        if kept is None:
            raise ApiError(
                404,
                "no receipt of that answer is kept here (any more): receipts are kept in memory for the "
                "last answers that asked for one, each for its own client",
                code="receipt_not_found",
            )
        return f'{{"object":"list","data":[{",".join(kept)}]}}'

    def _characters_of(self, client: str) -> int:
        return sum(_ENTRY_CHARACTERS + sum(map(len, receipts)) for receipts in self._kept[client].values())

    def _drop_oldest(self, client: str) -> None:
        kept = self._kept[client]
        kept.popitem(last=False)
        if not kept:
            del self._kept[client]
