"""The prompts that are not computed yet, and the time until a new one will be. Pure: times in, seconds out.

Clients have equal parts of each prefill step (decision 0072), and one client's prompts are computed in their
order. So before a client's prompt is whole, its earlier ones are, and of every other client at most as many
tokens. Tokens that will be taken over from prompts computed before are not known yet: the time is that of
computing all of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from phasewise.serving.engine.messages import EngineLoad, Progress, Submit


@dataclass(slots=True)
class _Pending:
    model: str
    client: str
    n_tokens: int


class PromptWork:
    """Every request that has no token yet, and the part of its prompt that is not computed."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}

    def sent(self, request: Submit, client: str) -> None:
        """It waits for its first token from now on."""
        pending = _Pending(request.model, client, len(request.prompt_token_ids))
        self._pending[request.request_id] = pending

    def goes_on(self, progress: Progress) -> None:
        """A step has computed some of it."""
        pending = self._pending.get(progress.request_id)
        if pending is not None:
            pending.n_tokens = progress.n_prompt - progress.n_computed

    def ended(self, request_id: str) -> None:
        """It has its first token, or will have none."""
        self._pending.pop(request_id, None)

    def seconds_until_first_token(
        self, request: Submit, client: str, load: EngineLoad | None, wait_s: float
    ) -> float | None:
        """From now, as of a request that is to be sent; None: nothing is known of this engine's speed.

        wait_s: until it has a place. The prompts before it are computed meanwhile.
        """
        own = _load_of(request.model, load)
        if load is None or own is None or not own.prompt_token_ns:
            return None
        before: defaultdict[str, int] = defaultdict(int)
        for pending in self._pending.values():
            if pending.model == request.model:
                before[pending.client] += pending.n_tokens
        n_own = len(request.prompt_token_ids)
        n_with_earlier = n_own + before.pop(client, 0)
        n_before = n_with_earlier - n_own + sum(min(n_tokens, n_with_earlier) for n_tokens in before.values())
        token_s = own.prompt_token_ns / 1e9 * (1 + _n_others_at_work(request.model, load))
        return max(wait_s, n_before * token_s) + n_own * token_s


def _load_of(model: str, load: EngineLoad | None) -> EngineLoad | None:
    return load if load is None or load.by_model is None else load.by_model.get(model)


def _n_others_at_work(model: str, load: EngineLoad) -> int:
    """Engines of other models that take every other turn on the cores."""
    others = load.by_model or {}
    return sum(other.n_running > 0 for name, other in others.items() if name != model)
