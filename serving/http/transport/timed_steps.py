"""The time for which a coroutine keeps the event loop: that of its own steps, without its waits."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any


async def timed_steps(work: Coroutine[Any, Any, None], spent: Callable[[float], None]) -> None:
    """Run `work`. `spent` is told the seconds of all its steps together, once it has ended."""
    await _steps(work, spent)


@types.coroutine
def _steps(work: Coroutine[Any, Any, None], spent: Callable[[float], None]) -> Generator[Any, Any, None]:
    step: Callable[[], Any] = partial(work.send, None)
    seconds = 0.0
    try:
        while True:
            began_s = time.perf_counter()
            try:
                awaited = step()
            except StopIteration:
                return
            finally:
                seconds += time.perf_counter() - began_s
            try:
                sent = yield awaited
            except BaseException as error:
                step = partial(work.throw, error)
            else:
                step = partial(work.send, sent)
    finally:
        spent(seconds)
