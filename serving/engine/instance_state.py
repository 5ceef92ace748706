"""The state of each instance behind a host that has several: what /metrics tells of it."""

from __future__ import annotations

from typing import NamedTuple

from phasewise.serving.engine.messages import EngineLoad


class InstanceInfo(NamedTuple):
    """An instance that runs: where, how its weights and keys and values are stored, and its plans."""

    node: str
    """The address of its node; empty: this host."""
    label: str
    """The node label that it was asked to be on, `KEY=VALUE`; empty: none."""
    weight_format: str
    kv_format: str
    n_sparse_weights: int
    """Weights that are stored sparse."""
    prefill_plan: str
    """Its plan in words, e.g. `1 rank on core 0 (default)`."""
    decode_plan: str
    kv_bytes: int
    """Memory for keys and values."""


class InstanceState(NamedTuple):
    """One place for an instance. What the front counts never falls; what the instance counts begins anew with
    each start of it."""

    name: str
    """Its role and number, e.g. `prompt-0`."""
    role: str
    pool: str
    """The one that it is in now."""
    load: EngineLoad | None
    """As it told last; None: it does not run."""
    restarts: int
    prompts: int
    """Requests whose prompts it was given."""
    prompt_tokens: int
    prefix_tokens_expected: int
    """Those of `prompt_tokens` that it was expected to have already when the request was routed."""
    answers: int
    prefix_tokens_held: int
    """Tokens of beginnings of prompts that it says it holds."""
    pool_changes: int
    handing_over: int
    """Prompts on their way from it, and blocks of it that are being filled."""
    hand_overs: int
    """Prompts of it that arrived at the instances which answer them."""
    hand_over_seconds: float
    """From the end of such a prompt to its arrival, all together."""
    hand_over_bytes: int
    """Their keys and values."""
    reports_refused: int
    """Reports of prefixes that could not be true."""
    info: InstanceInfo | None
    """None: it does not run."""
    without_database: int = 0
    """Times that it went on without the tuning database, of all its starts."""
