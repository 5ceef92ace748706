"""The contract between an engine and what hands its prompts over to another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from phasewise.serving.pools.contract import Placement


class Outbox(Protocol):
    """Takes keys and values of prompts that are answered elsewhere. Called on the engine's thread."""

    def starts(self, request_id: str, placement: Placement, n_prompt: int, n_computed: int) -> None:
        """Its block stays where it is, until `drop` or `rests`, and `n_computed` of its tokens are in it."""
        ...

    def rests(self, request_id: str) -> bool:
        """Between two steps its block may move again, unless the other engine wants what is in it (True).

        False: nothing is read from it once this returns, until it `starts` again.
        """
        ...

    def computed(self, request_id: str, logits: npt.NDArray[np.float32]) -> None:
        """All of it is computed, before or after `starts`.

        logits: float32 [vocab], valid until the call returns.
        """
        ...

    def lost(self, request_id: str) -> None:
        """The other engine has a block for it, and it has none here any more: it cannot be handed over."""
        ...

    def drop(self, request_id: str) -> None:
        """Its block is about to be freed: nothing is read from it once this returns."""
        ...
