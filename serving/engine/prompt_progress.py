"""The progress of prompts: the number of their tokens that each prefill step leaves computed."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.serving.batch import Batch
from phasewise.serving.engine.messages import Progress


@dataclass(slots=True)
class _Prompt:
    """A prompt that is not whole yet. n_cached: its tokens that were there when its first step began."""

    n_tokens: int
    n_cached: int = 0
    began_ns: int | None = None


class PromptProgress:
    """The prompts that are not whole yet."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}

    def expect(self, request_id: str, n_prompt: int) -> None:
        """It will be computed, from the start."""
        self._prompts[request_id] = _Prompt(n_prompt)

    def forget(self, request_id: str) -> None:
        """Nothing more of it is computed."""
        self._prompts.pop(request_id, None)

    def of(self, batch: Batch, began_ns: int, now_ns: int) -> tuple[Progress, ...]:
        """The progress of each prompt of a step, which took from `began_ns` to `now_ns`; none of decode."""
        out = []
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            prompt = self._prompts.get(name)
            if prompt is None or batch.phase != "prefill":
                continue
            if prompt.began_ns is None:
                prompt.began_ns, prompt.n_cached = began_ns, piece.start
            n_computed = min(prompt.n_tokens, piece.start + len(piece.token_ids))
            took_ns = now_ns - prompt.began_ns
            out.append(Progress(name, prompt.n_tokens, prompt.n_cached, n_computed, took_ns))
            if n_computed == prompt.n_tokens:
                self.forget(name)
        return tuple(out)
