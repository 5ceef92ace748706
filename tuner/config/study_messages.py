"""Messages between processes that work on one study, kept as attributes of the study."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from phasewise.kerneldb.guests import only_reading
from phasewise.kerneldb.location import MEMORY_URL, Location
from phasewise.tuner.config.storage import clear_storage_errors, open_storage

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_SAID_MS = "said_ms"


class StudyMessages:
    """Messages of one study, which must exist; a study in memory drops them.

    Raises KernelDbError when the database fails.
    """

    def __init__(self, location: Location, study_name: str) -> None:
        self._location = location
        self._study_name = study_name

    def say(self, name: str, fields: Mapping[str, Any]) -> None:
        """Store these fields (JSON values) under `name`; later calls of `hear` return them."""
        if self._location.url == MEMORY_URL:
            return
        with clear_storage_errors(self._location.name):
            self._storage.set_study_user_attr(self._study_id, name, {**fields, _SAID_MS: _now_ms()})

    def hear(self, name: str, since_ms: int) -> Mapping[str, Any] | None:
        """The last message under `name`, if it is newer than `since_ms` (Unix time)."""
        if self._location.url == MEMORY_URL:
            return None
        with clear_storage_errors(self._location.name), only_reading():
            said = self._storage.get_study_user_attrs(self._study_id).get(name)
        return said if isinstance(said, dict) and said.get(_SAID_MS, 0) >= since_ms else None

    @cached_property
    def _storage(self) -> BaseStorage:
        return open_storage(self._location)

    @cached_property
    def _study_id(self) -> int:
        return self._storage.get_study_id_from_name(self._study_name)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
