"""Every failure that `serving` foresees. A message names the thing, what is wrong with it and what to do.

ServingError
 ├─ ModelError          a model file, its tokenizer or its template cannot be used
 ├─ RequestError        one request cannot be served as asked (its sender's mistake)
 │   └─ ContextLengthExceeded
 ├─ QueueFull           the server has as many requests waiting as it allows
 ├─ Stopping            the server ends before the answer does
 ├─ StepFailed          a forward step failed; only the requests in it are lost
 └─ RanksError          a plan cannot be run in this process, or its memory is not there
     ├─ RankLost        a rank has died; the ranks can be opened again, without their keys and values
     └─ EngineLost      they died again and again, or could not be opened again: nothing is computed any more
"""

from __future__ import annotations

import errno
import mmap
from typing import ClassVar

_OUT_OF_MEMORY = "there is not enough memory: raise `ulimit -v`, or free some"
_OUT_OF_THREADS = "no further thread or process can be started: raise `ulimit -u` or `ulimit -v`"
_OUT_OF_FILES = "no further file can be opened: raise `ulimit -n`"
_SHORTAGES = {
    errno.ENOMEM: _OUT_OF_MEMORY,
    errno.EAGAIN: _OUT_OF_THREADS,
    errno.EMFILE: _OUT_OF_FILES,
    errno.ENFILE: _OUT_OF_FILES,
}
_UNMAPPED = ("failed to map segment", "Cannot allocate memory", "error return without exception set")
"""Words in errors of the linker and Python when a library does not fit into memory."""
_SCARCE_BYTES = 8 << 20
"""Bytes that importing modules and their libraries needs at least."""


def shortage_of(error: BaseException | None) -> str | None:
    """One line about the shortage (memory, threads, files) behind an error; None: another cause."""
    if error is not None and _memory_is_exhausted():
        return _OUT_OF_MEMORY  # an import then fails with any error, such as an unknown codec
    while error is not None:
        if isinstance(error, MemoryError):
            return _OUT_OF_MEMORY
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            return _SHORTAGES[error.errno]
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return _OUT_OF_THREADS
        if isinstance(error, ImportError | SystemError) and any(said in str(error) for said in _UNMAPPED):
            return _OUT_OF_MEMORY
        error = error.__cause__ or error.__context__
    return None


def _memory_is_exhausted() -> bool:
    try:
        mmap.mmap(-1, _SCARCE_BYTES).close()
    except (OSError, MemoryError):
        return True
    return False


class ServingError(Exception):
    """Base of the errors that `serving` raises on purpose."""

    exit_code: ClassVar[int] = 1


class ModelError(ServingError):
    """A model cannot be found, read or used."""


class RequestError(ServingError):
    """A request that cannot be served as asked. `param`: field at fault; None: no single field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(RequestError):
    """Prompt and answer need more positions than the model, or the KV pool, has."""

    sizes: tuple[int, int] | None = None
    """Tokens needed at least, and tokens allowed at most; None: unknown."""

    @classmethod
    def beyond(
        cls, most_tokens: int, asked: str, param: str | None = None, sizes: tuple[int, int] | None = None
    ) -> ContextLengthExceeded:
        """The error in the words that OpenAI's clients look for. `asked`: end of the sentence."""
        error = cls(f"This model's maximum context length is {most_tokens} tokens{asked}", param)
        error.sizes = sizes
        return error


def check_context(most_tokens: int, n_prompt: int, n_answer: int, whose: str = "") -> None:
    """Raise ContextLengthExceeded if prompt and answer together need more than `most_tokens`. `whose`: words
    after the limit in the message."""
    n_needed = n_prompt + n_answer
    if n_needed > most_tokens:
        asked = f"{n_needed} are asked for: {n_prompt} in the prompt and {n_answer} for the answer"
        raise ContextLengthExceeded.beyond(
            most_tokens, f"{whose}, but {asked}", "prompt", (n_needed, most_tokens)
        )


class QueueFull(ServingError):
    """The waiting line is full. `retry_after_s`: seconds until a retry is worthwhile; None: unknown."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopping(ServingError):
    """The server stops before the answer is complete."""


class StepFailed(ServingError):
    """The computation of one step failed; only the requests in it end with this error."""


class RanksError(ServingError):
    """Ranks cannot be set up: the plan does not fit here, or memory is too small."""


class RankLost(RanksError):
    """A rank has died, and with it the keys and values. `Ranks.reopen` may start the ranks again."""


class CoresMoved(RankLost):
    """The ranks' cores have changed, and keys and values are lost; `Ranks.reopen` starts ranks on the cores
    that are left. No request is to blame."""


class EngineLost(RanksError):
    """The engine has given up for good: the process's supervisor must restart the process."""

    exit_code: ClassVar[int] = 70  # EX_SOFTWARE of sysexits.h
