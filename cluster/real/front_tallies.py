"""Counts of each instance that a front keeps, and the sums that it tells of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasewise.cluster.real.supervisor import InstanceMember
from phasewise.cluster.routing import Router
from phasewise.serving.engine.engine_host import InstanceInfo, InstanceState
from phasewise.serving.engine.messages import EngineLoad
from phasewise.serving.engine.stored_prefixes import shape_of
from phasewise.serving.prefix_store.store import summed
from phasewise.serving.scheduling.held_prefixes import BLOCK_TOKENS


@dataclass(slots=True)
class InstanceTally:
    """Counts of one instance since the start of the front. They never fall."""

    hand_overs: int = 0
    hand_over_s: float = 0.0
    hand_over_bytes: int = 0
    reports_refused: int = 0

    def arrived(self, member: InstanceMember, n_prompt: int, took_s: float) -> None:
        """Count a prompt of `member` whose keys and values have arrived where it is answered."""
        self.hand_overs += 1
        self.hand_over_s += max(0.0, took_s)
        if member.ready is not None:
            shape = shape_of(member.ready.identity.shape)
            self.hand_over_bytes += n_prompt * shape.n_layers * shape.slot_bytes


def instance_states(
    members: Sequence[InstanceMember],
    router: Router,
    tallies: Sequence[InstanceTally],
    places: Sequence[Mapping[str, object]],
) -> list[InstanceState]:
    """The state of each instance, in the order of their places. Any thread may ask. places: as
    `Launcher.place` tells them."""
    told = zip(members, router.roles, router.counts, tallies, places, strict=True)
    return [
        InstanceState(
            f"{member.role}-{member.index}",
            member.role,
            pool,
            member.load,
            max(0, member.life - 1),
            counts.prompts,
            counts.prompt_tokens,
            counts.tokens_expected,
            counts.answers,
            router.n_blocks(member.index) * BLOCK_TOKENS,
            counts.pool_changes,
            member.n_handing_over,
            tally.hand_overs,
            tally.hand_over_s,
            tally.hand_over_bytes,
            tally.reports_refused,
            _info(member, place),
            member.n_without_database,
        )
        for member, pool, counts, tally, place in told
    ]


def _info(member: InstanceMember, place: Mapping[str, object]) -> InstanceInfo | None:
    ready = member.ready
    if ready is None:
        return None
    plans = {phase: words for phase, _, words in (plan.partition(": ") for plan in ready.plans)}
    fingerprint = ready.identity.fingerprint
    return InstanceInfo(
        str(place.get("node") or ""),
        str(place.get("label") or ""),
        fingerprint.weight_format,
        fingerprint.kv_format,
        ready.n_sparse_weights,
        plans.get("prefill", ""),
        plans.get("decode", ""),
        ready.kv_bytes,
    )


def load_together(loads: Sequence[EngineLoad], n_waiting: int, n_running: int) -> EngineLoad:
    """The load of several instances; the front knows how many requests wait and run."""
    return EngineLoad(
        n_waiting,
        n_running,
        sum(load.kv_slots_used for load in loads),
        sum(load.kv_slots for load in loads),
        None,
        sum(load.preemptions for load in loads),
        sum(load.prefix_hits for load in loads),
        sum(load.prefix_tokens_reused for load in loads),
        sum(load.phase_switches for load in loads),
        sum(load.n_clients_waiting for load in loads),
        steps_over_tpot=sum(load.steps_over_tpot for load in loads),
        stored=summed([load.stored for load in loads if load.stored is not None]),
        prompt_token_ns=_together_ns([load.prompt_token_ns for load in loads]),
        best_token_ns=_together_ns([load.best_token_ns for load in loads]),
    )


def _together_ns(times_ns: Sequence[float]) -> float:
    """Nanoseconds a token of several instances that compute prompts at the same time; 0: none has computed
    one."""
    positive_ns = [time_ns for time_ns in times_ns if time_ns > 0]
    return 1 / sum(1 / time_ns for time_ns in positive_ns) if positive_ns else 0.0
