"""Optuna's storage of studies in the tuning database, without messages on stderr."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.location import MEMORY_URL, Location

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

HEARTBEAT_S = 15
GRACE_S = 120
"""Seconds without a sign of life after which another process may take a trial. A sign comes with every slice
of the trace; opening a large model may take a minute. A death on the same machine is seen at once."""

_ATTEMPTS = 8
_PAUSE_S = 0.05


def open_storage(location: Location) -> BaseStorage:
    """Optuna's storage in the tuning database, created if missing. KernelDbError if it is not usable."""
    from optuna.storages import InMemoryStorage, get_storage

    from phasewise.kerneldb.store import open_store

    if location.url == MEMORY_URL:
        return InMemoryStorage()
    with open_store(None if location.is_default else location.url or location.file):
        pass  # The database exists now, with a write-ahead log and this program's tables.
    for attempt in range(_ATTEMPTS):
        try:
            # A cache of finished trials, which Optuna would put there itself.
            return get_storage(_open_tables(location))
        except KernelDbError:
            # Another process may be creating the same tables at this moment.
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_PAUSE_S * (attempt + 1))
    raise AssertionError


def _open_tables(location: Location) -> BaseStorage:
    from optuna.storages import RDBStorage

    from phasewise.kerneldb.guests import engine_arguments, lock_when_beginning

    url, arguments = engine_arguments(location)
    with clear_storage_errors(location.name), quiet():
        storage = RDBStorage(url, arguments, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)
    lock_when_beginning(storage.engine)
    return storage


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's log and its warnings about experimental parts."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


@contextmanager
def clear_storage_errors(name: str) -> Iterator[None]:
    """Turn errors of Optuna or its driver about the database `name` into a KernelDbError of one line."""
    from optuna.exceptions import StorageInternalError

    from phasewise.kerneldb.connect import clear_errors

    try:
        with clear_errors(name):
            try:
                yield
            except StorageInternalError as error:
                raise error.__cause__ or error from error
    except (StorageInternalError, RuntimeError) as error:
        raise KernelDbError(f"the studies in database {name} cannot be used: {error}") from error
