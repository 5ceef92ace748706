"""One request on an engine of its own, and the times of its tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.messages import Answer, DraftCounts, Progress, Submit


@dataclass(slots=True)
class OneAnswer:
    """An answer being generated: iterate `pieces`, then read the fields. TTFT is the time from the request to
    its first token; TPOT the mean time of each later token."""

    request: Submit
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    sent_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    n_generated: int = 0
    drafts: DraftCounts | None = None
    """Draft counts; None: drafts are off."""
    progress: Progress | None = None
    """Latest progress of the prompt; None: before the first step, and once the answer has begun."""

    def pieces(self, engine: Engine, *, with_steps: bool = False) -> Iterator[str]:
        """Run the request and yield its text piece by piece. Raises the engine's error if the request fails.
        `with_steps`: yield an empty text after each step of the prompt, when `progress` is set."""
        self.sent_ns = time.perf_counter_ns()
        engine.submit(self.request)
        while engine.has_work:
            delivery = engine.step()
            self.progress = delivery.progress[-1] if delivery.progress and not delivery.outs else None
            if with_steps and self.progress is not None:
                yield ""
            for out in delivery.outs:
                if not isinstance(out, Answer):
                    raise out.error
                self._add(out)
                if out.text:
                    yield out.text

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.sent_ns) / 1e6

    @property
    def tpot_ms(self) -> float | None:
        """Mean milliseconds per token after the first; None: there is only one token."""
        n_more = self.n_generated - 1
        return (self.last_ns - self.first_ns) / 1e6 / n_more if n_more else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second: the inverse of TPOT; None: there is only one token."""
        return 1000 / self.tpot_ms if self.tpot_ms else None

    def _add(self, out: Answer) -> None:
        self.first_ns = self.first_ns or out.at_ns
        self.last_ns = out.at_ns
        self.n_generated = out.n_generated
        self.text += out.text
        self.token_ids += [token.token_id for token in out.tokens]
        self.finish_reason = out.finish_reason
        self.drafts = out.drafts
