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
"""The words of the linker and Python where a library does not fit."""
_SCARCE_BYTES = 8 << 20
"""Less than modules and their libraries need."""


def shortage_of(error: BaseException | None) -> str | None:
    """The shortage of the system, in one line, where that is what an error comes of; else
    None."""
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
    """Base of what this room raises on purpose."""

    exit_code: ClassVar[int] = 1


class ModelError(ServingError):
    """A model cannot be found, read or used."""


class RequestError(ServingError):
    """A request asks for what cannot be given. `param` names the field at fault, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(RequestError):
    """Prompt and answer need more positions than the model, or the KV pool, has."""

    sizes: tuple[int, int] | None = None
    """The tokens that are needed, at least, and the most that there may be; None: unknown."""

    @classmethod
    def beyond(
        cls, most_tokens: int, asked: str, param: str | None = None, sizes: tuple[int, int] | None = None
    ) -> ContextLengthExceeded:
        """In the words that clients of OpenAI look for. `asked`: what is longer, as the sentence goes on."""
        error = cls(f"This model's maximum context length is {most_tokens} tokens{asked}", param)
        error.sizes = sizes
        return error


def check_context(most_tokens: int, n_prompt: int, n_answer: int, whose: str = "") -> None:
    """ContextLengthExceeded where a prompt and its answer need more tokens together. whose: what the limit
    is of, as the sentence goes on."""
    n_needed = n_prompt + n_answer
    if n_needed > most_tokens:
        asked = f"{n_needed} are asked for: {n_prompt} in the prompt and {n_answer} for the answer"
        raise ContextLengthExceeded.beyond(
            most_tokens, f"{whose}, but {asked}", "prompt", (n_needed, most_tokens)
        )


class QueueFull(ServingError):
    """No more requests can wait. Try again later, where known in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopping(ServingError):
    """The server is ending, and this answer with it."""


class StepFailed(ServingError):
    """The computation of one step failed; the requests that were in it end with this error."""


class RanksError(ServingError):
    """Ranks cannot be set up: a plan that does not fit here, or too little memory."""


class RankLost(RanksError):
    """One of the ranks has died, and keys and values with it. `Ranks.reopen` may start them anew."""


class CoresMoved(RankLost):
    """The cores of the ranks have changed, and keys and values are given up; `Ranks.reopen` starts them on
    those that are there. Nobody's work is to blame."""


class EngineLost(RanksError):
    """The engine has given up. The process's supervisor must start it again."""

    exit_code: ClassVar[int] = 70  # EX_SOFTWARE of sysexits.h
