"""One request on an engine of one's own, and the times of its tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.messages import Answer, DraftCounts, Progress, Submit


@dataclass(slots=True)
class OneAnswer:
    """An answer in the making: iterate `pieces`, then read what came. TTFT is from the request to its first
    token; TPOT the mean time of each token after the first."""

    request: Submit
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    sent_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    n_generated: int = 0
    drafts: DraftCounts | None = None
    """None where drafts are off."""
    progress: Progress | None = None
    """The newest of its prompt; None before its first step, and once the answer has begun."""

    def pieces(self, engine: Engine, *, with_steps: bool = False) -> Iterator[str]:
        """Run it, yielding text as it is made. Raises what the engine says if it fails. with_steps: an empty
        text after each step of the prompt, whose `progress` is told then."""
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
        """None where there is one token only."""
        n_more = self.n_generated - 1
        return (self.last_ns - self.first_ns) / 1e6 / n_more if n_more else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second: the inverse of TPOT."""
        return 1000 / self.tpot_ms if self.tpot_ms else None

    def _add(self, out: Answer) -> None:
        self.first_ns = self.first_ns or out.at_ns
        self.last_ns = out.at_ns
        self.n_generated = out.n_generated
        self.text += out.text
        self.token_ids += [token.token_id for token in out.tokens]
        self.finish_reason = out.finish_reason
        self.drafts = out.drafts
