"""The size of an engine: limits and memory, from a model and its share of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from phasewise._words import counted
from phasewise.cython_kernels.division import Teams
from phasewise.serving.batch import KV_CHUNK, STEP_TOKENS
from phasewise.serving.drafts.contract import MOST_DRAFTED
from phasewise.serving.errors import ContextLengthExceeded, ServingError
from phasewise.serving.models.forward import (
    AUTO,
    Capacity,
    build_program,
    kv_bytes_by_reach,
    kv_bytes_per_slot,
    resolve_kv_format,
)
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import ALIGNMENT, Rings
from phasewise.serving.pools.opening import DEFAULT_POLICY
from phasewise.serving.processes.headroom import available_bytes
from phasewise.serving.ranks.first_rank import KvSettings, RankOptions, room_for
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS
from phasewise.serving.scheduling.request import SchedulerLimits
from phasewise.tuner.plans import Phase, ServicePlan

KV_SHARE_OF_FREE_MEMORY = 0.25
KV_SHARE_OF_WEIGHTS = 4
_KV_BYTES_ALWAYS_WORTH_IT = 1 << 30
_STATES_SHARE = 0.5
"""Share of a KV budget for states, copies of earlier ones included, in models whose layers keep states."""
_STATES_FOR_ONE = 1 + MOST_DRAFTED
_LEAST_COPIES = 16
_LEAST_CONTEXT = 256
"""Shortest context worth serving, unless the model's own is shorter."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Size and settings of an engine: values for its scheduler and its ranks."""

    limits: SchedulerLimits
    kv: KvSettings
    kv_policy: str = DEFAULT_POLICY
    """Allocation policy of the KV pool, one of `pools.opening.POLICIES`."""
    tpot_ms: float = DEFAULT_TPOT_MS
    """Promised milliseconds per output token, which limit the prefill steps between tokens."""

    threads: int = 0
    """Most threads of a rank once cores are added; 0: no more than at the start."""

    @property
    def step_tokens(self) -> int:
        """Most rows that pass through the model at once."""
        return max(min(self.limits.max_batch_tokens, STEP_TOKENS), self.limits.max_sequences)

    @classmethod
    def for_one(cls, model: PackedModel, n_prompt: int, max_tokens: int, kv_format: str = AUTO) -> EngineSize:
        """The size that one request needs. ContextLengthExceeded: the model's context is shorter."""
        context = model.config.context_length
        if n_prompt + max_tokens > context:
            raise ContextLengthExceeded(
                f"{model.name} has a context of {context} tokens, but"
                f" {n_prompt + max_tokens} are asked for: "
                f"{n_prompt} in the prompt and {max_tokens} for the answer"
            )
        kv_slots = aligned(n_prompt + max_tokens)
        most_rows = max(1, min(STEP_TOKENS, n_prompt))
        limits = SchedulerLimits(context, most_rows, 1, prefix_reuse=False)
        states = _STATES_FOR_ONE if model.config.state_bytes else 1
        kv = KvSettings(kv_slots, kv_format, rings=_rings_of(model, kv_slots, 1), states=states)
        return cls(limits, kv)

    @classmethod
    def for_many(
        cls,
        model: PackedModel,
        max_sequences: int,
        context_length: int | None,
        kv_bytes: int | None,
        kv_format: str = AUTO,
        draft: PackedModel | None = None,
        *,
        kv_shared: bool = False,
        free: Callable[[], int | None] | None = None,
        teams: Teams = (),
    ) -> EngineSize:
        """The largest size whose slots `kv_bytes` pays for, up to `max_sequences` full contexts.
        ServingError: what is asked for does not fit.

        `draft`: a draft model, which has as many slots of its own. `kv_shared`: `KvSettings.shared`; no layer
        keeps rings then. `free`: tells the free bytes where the engine will run, or None; None: here.
        `teams`: teams of ranks that keep copies of shared heads (`rank_layout.teams_of`); (): one rank. The
        default budget is a quarter of free memory, but at most 1 GiB or four times the weights, whichever is
        larger. The default context is the model's, or as much of it as the slots hold."""
        context = _context(model, context_length)
        seen_by_all, windowed = kv_bytes_by_reach(model, kv_format, teams)
        if draft is not None:
            seen_by_all += kv_bytes_per_slot(draft, kv_format)
        per_slot = seen_by_all + windowed
        n_free = available_bytes() if free is None else free()
        budget = default_kv_bytes(model, n_free) if kv_bytes is None else kv_bytes
        if kv_bytes is not None and n_free is not None and kv_bytes > n_free:
            where = "this machine" if free is None else "its node"
            raise ServingError(
                f"a KV budget of {_mib(kv_bytes)} does not fit: {where} has {_mib(n_free)} of free memory"
            )
        if kv_shared and model.config.has_mixed_heads:
            raise ServingError(
                f"{model.name} has heads of several sizes, which pools do not hand over and prefix caches do "
                "not hold: serve it without pools, --cluster and --prefix-cache"
            )
        states = _n_states(model, max_sequences, budget)
        budget -= states * model.config.state_bytes
        most = max_sequences * aligned(context)
        kv_slots = min(budget // per_slot, most)
        rings = None if kv_shared else _rings_of(model, context, max_sequences, kv_slots)
        if rings is not None:
            left = budget - rings.n_slots * windowed
            kv_slots = min(left // seen_by_all, most) if seen_by_all else most
        if kv_slots < ALIGNMENT:
            raise ServingError(
                f"a KV budget of {budget} bytes is too small: {ALIGNMENT} tokens, the least block, "
                f"need {ALIGNMENT * per_slot} bytes"
            )
        kv_slots -= kv_slots % ALIGNMENT
        least = context if context_length is not None else min(context, _LEAST_CONTEXT)
        if kv_slots < least:
            room = "" if kv_bytes is None else f"; --kv-budget {_mib_up(aligned(least) * per_slot)} would do"
            shorter = f"; --context {kv_slots} fits" if context_length is not None else ""
            raise ServingError(
                f"{_mib(budget)} for keys and values hold {kv_slots} tokens of {model.name}, and {least} are "
                f"needed for the context{room}{shorter}"
            )
        if rings is not None:
            rings = replace(rings, first_slot=kv_slots)
        limits = SchedulerLimits(min(context, kv_slots), max_sequences=max_sequences)
        kv = KvSettings(kv_slots, kv_format, shared=kv_shared, rings=rings, states=states)
        return cls(limits, kv)

    def with_slots(self, kv_slots: int) -> EngineSize:
        """A copy with this number of slots, and a context that fits into them."""
        context = min(self.limits.context_length, kv_slots)
        limits, kv = replace(self.limits, context_length=context), replace(self.kv, slots=kv_slots)
        return replace(self, limits=limits, kv=kv)


def _n_states(model: PackedModel, max_sequences: int, budget: int) -> int:
    """Number of state places: one for each sequence and as many for copies of earlier states, or at least
    _LEAST_COPIES, within the budget. ServingError: the budget pays for less than two."""
    each = model.config.state_bytes
    if each == 0:
        return 1
    n_states = min(max_sequences + max(max_sequences, _LEAST_COPIES), int(budget * _STATES_SHARE) // each)
    if n_states < 2:
        raise ServingError(
            f"a KV budget of {_mib(budget)} is too small for {model.name}, whose sequences keep a state of"
            f" {_mib(each)} each: --kv-budget {_mib_up(int(4 * each / _STATES_SHARE))} would do"
        )
    return n_states


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):.0f} MiB" if n_bytes >= 1 << 20 else counted(n_bytes, "byte")


def _mib_up(n_bytes: int) -> str:
    """A size for `--kv-budget`, rounded up to MiB."""
    return f"{-(-n_bytes // (1 << 20))}M"


def _rings_of(
    model: PackedModel, longest_request: int, max_sequences: int, most_slots: int | None = None
) -> Rings | None:
    """Rings for a model with windows, behind `longest_request` slots; None: rings would save nothing. A ring
    holds the largest window and what one step writes. There is one for each sequence, but no more than
    `most_slots` slots in all, the number that these layers would have without rings."""
    config = model.config
    if config.state is not None:  # what is copied of a prefix is as long as a kept state says
        return None
    window = max(part.window or 0 for part in config.keeping)
    longest = -(-(window + STEP_TOKENS) // KV_CHUNK) * KV_CHUNK
    if window == 0 or longest >= longest_request:
        return None
    n_slots = longest * max_sequences
    if most_slots is not None:
        n_slots = min(n_slots, most_slots // KV_CHUNK * KV_CHUNK)
    return Rings(longest_request, n_slots, longest, window) if n_slots >= longest else None


def _context(model: PackedModel, asked: int | None) -> int:
    own = model.config.context_length
    if asked is not None and asked > own:
        raise ServingError(f"{model.name} has a context of {own} tokens; {asked} are too many")
    return asked or own


def default_kv_bytes(model: PackedModel, free: int | None) -> int:
    """Default bytes for keys and values of a model served alone. `free`: free bytes; None: unknown."""
    enough = max(_KV_BYTES_ALWAYS_WORTH_IT, KV_SHARE_OF_WEIGHTS * model.weight_bytes)
    return enough if free is None else min(enough, int(free * KV_SHARE_OF_FREE_MEMORY))


VOCABULARY_BYTES_A_TOKEN = 900
"""Bytes for each token in the tokenizer, its pieces and grammars: 863 measured with 49,152 tokens."""


class _Told(Exception):
    """Raised with the bytes that a program would take, before it takes them."""


def program_bytes(model: PackedModel, capacity: Capacity) -> int:
    """Keys, values, states and scratch of one program. ModelError: the model does not fit the kernels."""

    def tell(_name: str, n_bytes: int, _kv_slots: int) -> None:
        raise _Told(n_bytes)

    try:
        build_program(model, capacity, tell)
    except _Told as told:
        return int(told.args[0])
    raise AssertionError("a program is not built before its memory is checked")


def engine_bytes(
    model: PackedModel, plans: Mapping[Phase, ServicePlan], size: EngineSize, draft: PackedModel | None
) -> int:
    """Bytes of weights, programs and vocabulary of a model and its draft model. Each further rank adds
    scratch, counted as for a rank that computes all columns, and its copies of shared heads."""
    feeds, limits = draft is not None and bool(draft.config.drafts), size.limits
    options = RankOptions(
        size.kv, limits.max_batch_tokens, limits.max_sequences, feeds=feeds, threads=size.threads
    )
    threads = max(len(rank.cores) for plan in plans.values() for each in plan.each for rank in each.ranks)
    n_ranks = max(len(plan.ranks) for plan in plans.values())
    n_bytes = 0
    for served in (model, draft):
        if served is None:
            continue
        own = options if served is model else replace(options, feeds=False)
        room = room_for(own, threads, resolve_kv_format(served, size.kv.format))
        program = program_bytes(served, room)
        own_kv = kv_bytes_of(served, size.kv, ())
        n_bytes += served.weight_bytes + program + VOCABULARY_BYTES_A_TOKEN * served.config.vocab_size
        if served is model:
            copies = kv_bytes_of(served, size.kv, teams_of(plans)) - own_kv
            n_bytes += (n_ranks - 1) * (program - own_kv) + copies
    return n_bytes


def kv_bytes_of(model: PackedModel, kv: KvSettings, teams: Teams) -> int:
    """Bytes of all keys and values, with the copies of shared heads that ranks keep."""
    seen_by_all, windowed = kv_bytes_by_reach(model, kv.format, teams)
    return kv.slots * seen_by_all + (kv.ring_slots or kv.slots) * windowed
