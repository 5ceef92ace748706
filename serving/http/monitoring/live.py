"""The live view: rates and states of one server, kept as the engine delivers."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.serving.engine.messages import Answer, EngineLoad, Failure, StepStats, Submit
from phasewise.serving.http.http_settings import RequestFacts
from phasewise.tuner.plans import Phase

_LAST = 64


@dataclass(frozen=True)
class MachineFacts:
    """The facts that do not change while a server runs. `machine_svg`: the machine with its plans; "": no
    picture.

    `schedules`: rows of texts, by the names that the page's table has.
    """

    machine_svg: str = ""
    schedules: tuple[dict[str, str], ...] = ()


class LiveView:
    """An observer of the engine's client. On the event loop; a few operations for each token."""

    def __init__(self) -> None:
        self._tokens: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self._n_ended = 0
        self._ttft_ms: deque[float] = deque(maxlen=_LAST)
        self._tpot_ms: deque[float] = deque(maxlen=_LAST)
        self._sent_ns: dict[str, int] = {}
        self._first_ns: dict[str, int] = {}

    def sent(self, request: Submit, facts: RequestFacts) -> None:
        self._sent_ns[request.request_id] = time.perf_counter_ns()

    def delivered(self, outs: Sequence[Answer | Failure], stats: StepStats | None) -> None:
        if stats is not None:
            self._tokens[stats.phase] += stats.n_tokens
        for out in outs:
            sent_ns = self._sent_ns.get(out.request_id)
            if sent_ns is None:
                continue
            if isinstance(out, Failure):
                self.forgotten(out.request_id)
                continue
            if out.request_id not in self._first_ns:
                self._first_ns[out.request_id] = out.at_ns
                self._ttft_ms.append((out.at_ns - sent_ns) / 1e6)
            if out.finish_reason is not None:
                if out.n_generated > 1:
                    took_ns = out.at_ns - self._first_ns[out.request_id]
                    self._tpot_ms.append(took_ns / 1e6 / (out.n_generated - 1))
                self._n_ended += 1
                self.forgotten(out.request_id)

    def forgotten(self, request_id: str) -> None:
        self._sent_ns.pop(request_id, None)
        self._first_ns.pop(request_id, None)

    def fields(self, load: EngineLoad | None, state: str) -> dict[str, Any]:
        """As the page wants them. Tokens are counted from the start: the page makes rates of them."""
        out: dict[str, Any] = {
            "at_s": time.monotonic(),
            "state": state,
            "prefill_tokens": self._tokens["prefill"],
            "decode_tokens": self._tokens["decode"],
            "requests_ended": self._n_ended,
            "ttft_ms": statistics.median(self._ttft_ms) if self._ttft_ms else None,
            "tpot_ms": statistics.median(self._tpot_ms) if self._tpot_ms else None,
            "running": load.n_running if load else 0,
            "waiting": load.n_waiting if load else 0,
            "kv_slots": load.kv_slots if load else 0,
            "kv_slots_used": load.kv_slots_used if load else 0,
        }
        buckets = load.pool.buckets if load and load.pool else ()
        out["buckets"] = [
            {
                "name": bucket.name,
                "bound_tokens": bucket.bound_tokens,
                "blocks_used": bucket.blocks_used,
                "slots_used": bucket.slots_used,
            }
            for bucket in buckets
        ]
        return out
