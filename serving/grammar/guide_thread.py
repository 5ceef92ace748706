"""Guides of requests whose grammars another process has proven: made on a thread, in turns of clients."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from phasewise.serving.errors import ServingError, StepFailed
from phasewise.serving.grammar.guides import Guide, GuideCompiler, GuideRecipe
from phasewise.serving.grammar.late_guides import begun_guide, guide_of
from phasewise.serving.scheduling.waiting_line import ClientTurns

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuideWanted:
    """A request that waits for its guide."""

    request_id: str
    owner: str
    recipe: GuideRecipe
    use: Callable[[Guide], None]
    """Called on the thread, or at once where the grammar is known; not after `forget`."""
    refuse: Callable[[ServingError], None]
    """Called in place of `use`."""


class GuideThread:
    """Compiles one grammar at a time: the thread that asks goes on. Clients take turns, a grammar each."""

    def __init__(self, compiler: GuideCompiler) -> None:
        self._compiler = compiler
        self._changed = threading.Condition()
        self._turns: ClientTurns[GuideWanted] = ClientTurns()
        self._wanted: dict[str, GuideWanted] = {}
        """The wanted guides that are neither compiled nor forgotten."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="phasewise-guides")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Make no more guides. The one that is being made is not waited for, and not used;
        the process ends after it."""
        with self._changed:
            self._is_stopping = True
            self._wanted.clear()
            self._changed.notify()

    def want(self, wanted: GuideWanted) -> None:
        """Make a guide in its client's turn; at once where the grammar was compiled of late."""
        guide = self._compiler.known(wanted.recipe.grammar)
        if guide is not None:
            wanted.use(begun_guide(wanted.recipe, guide, self._compiler.tokens))
            return
        with self._changed:
            self._wanted[wanted.request_id] = wanted
            self._turns.join(wanted.owner, wanted)
            self._changed.notify()

    def forget(self, request_id: str) -> None:
        """The request has ended: once this returns, its guide is not used. Others are no mistake."""
        with self._changed:
            self._wanted.pop(request_id, None)

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            try:
                guide_or_error: Guide | ServingError = guide_of(wanted.recipe, self._compiler)
            except ServingError as error:
                guide_or_error = error
            except Exception as error:
                log.error("a grammar could not be compiled", exc_info=error)
                guide_or_error = StepFailed(
                    f"the grammar could not be compiled: {type(error).__name__}: {error}"
                )
            with self._changed:
                if self._wanted.pop(wanted.request_id, None) is not wanted:
                    continue
                if isinstance(guide_or_error, ServingError):
                    wanted.refuse(guide_or_error)
                else:
                    wanted.use(guide_or_error)

    def _next(self) -> GuideWanted | None:
        """The next that still waits; None: stop."""
        with self._changed:
            while True:
                while not self._turns and not self._is_stopping:
                    self._changed.wait()
                if self._is_stopping:
                    return None
                wanted = self._turns.take()
                if self._wanted.get(wanted.request_id) is wanted:
                    return wanted
