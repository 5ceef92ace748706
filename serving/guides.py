"""What an answer may say: a grammar that forbids, token by token, whatever would break it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Guide(Protocol):
    """The place that one answer has reached in its grammar. Used by one thread at a time."""

    def fresh(self) -> Guide:
        """The same grammar at its beginning. May be asked of a guide that is never advanced, by any thread."""
        ...

    def forbid(self, logits: npt.NDArray[np.float32]) -> bool:
        """Set to -inf what may not come next. False where nothing may: `logits` are then left as they are."""
        ...

    def advance(self, token_id: int) -> None:
        """The answer goes on with this token, which `forbid` has let through."""
        ...

    @property
    def end_token_id(self) -> int:
        """The token that ends an answer where nothing else can come."""
        ...
