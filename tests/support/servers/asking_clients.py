"""Clients of a server that is disturbed while it answers, by the standard library alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Clients:
    """A client for each prompt, which asks for its answer again until the block ends.

    ask: a function from a prompt to its answer, called in the clients' own threads.
    """

    def __init__(self, prompts: Sequence[str], ask: Callable[[str], str]) -> None:
        self.texts: dict[str, list[str]] = {prompt: [] for prompt in prompts}
        self._ask = ask
        self._ending = threading.Event()
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(prompt,)) for prompt in prompts]

    @property
    def n_answers(self) -> int:
        return sum(map(len, self.texts.values()))

    def _run(self, prompt: str) -> None:
        try:
            while not self._ending.is_set():
                self.texts[prompt].append(self._ask(prompt))
        except BaseException as error:
            self._failed.append(error)

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        assert not self._failed, self._failed
