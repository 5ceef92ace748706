"""Settings of `bench kv`: which requests are replayed, on which pool, by which policies."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from phasewise._options import option, parse_bytes
from phasewise.workflows.errors import UsageError
from phasewise.workflows.options import KvFormat


@dataclass(frozen=True)
class TraceSelection:
    """The requests of a trace that are replayed."""

    PANEL = "Requests"

    column: str | None = option(
        None,
        "column of a CSV file that holds the lengths of answers; prompts have --prompt-tokens",
        config_only=True,
    )
    prompt_tokens: int = option(
        48, "prompt length of each request of a CSV file", min=1, max=1 << 16, config_only=True
    )
    count: int = option(2000, "most requests of each trace", "-n", "--count", min=1)
    part: str = option(
        "all",
        "all requests, or one of two halves that the seed draws: one to tune settings, one to test",
        kind=Literal["all", "first", "second"],
        config_only=True,
    )
    model: str | None = option(
        None, "model whose tokens a log's prompts are [default: the one that its lines name]"
    )
    seed: int = option(0, "seed of samples, halves and errors", config_only=True)


@dataclass(frozen=True)
class ReplayWish:
    """The way requests are replayed."""

    PANEL = "Replay"

    max_tokens: str = option(
        "512",
        "limit of answers; or final:SHARE, live:SHARE: the limit at which static allocation "
        "reaches this utilisation",
    )
    estimate: str = option(
        "none", "any of none, exact, constant, error:SIGMA, predictor files", metavar="LIST"
    )
    slots: int = option(8192, "KV slots of the pool", min=16)
    memory_bytes: int | None = option(
        None,
        "memory for the weights and the KV cache of --model, e.g. 8G, in place of --slots",
        "--memory",
        parser=parse_bytes,
        metavar="BYTES",
    )
    kv_format: str = option(
        "auto",
        "format of the keys and values of --model; auto: two bytes a number, or f32 beside f32 and F16",
        kind=KvFormat,
    )
    max_sequences: int = option(256, "most running requests", min=1, config_only=True)
    step_ms: float | None = option(
        None,
        "replay arrivals; each step lasts this long [default: all requests wait]",
        min=0.001,
        config_only=True,
    )
    speeds: str | None = option(
        None,
        "tokens/s of prefill, and of decode by sequences, e.g. prompt:900,1:108,8:641,copy:200000",
        config_only=True,
    )
    policies: str = option(
        "odma,odma-whole,static,fixed,paged,paged-16",
        "any of odma, odma-whole, static, fixed, paged, paged-16 (slots a page)",
        metavar="LIST",
    )


@dataclass(frozen=True)
class PoolOverrides:
    """Settings of the policies that differ from `ComparedSettings`; None: as there."""

    PANEL = "Policies"

    n_buckets: int | None = option(None, "odma: most buckets", "--buckets", min=1, max=64, config_only=True)
    alpha: float | None = option(
        None, "odma: enlarge an estimate of uncertainty u by the factor 1 + ALPHA u", min=0, config_only=True
    )
    tau: float | None = option(
        None, "odma: ignore predictions whose uncertainty exceeds TAU", min=0, max=1, config_only=True
    )
    window: int | None = option(None, "odma: recent answers to learn from", min=16, config_only=True)
    refresh_every: int | None = option(
        None, "odma: answers between two updates of the buckets", min=1, config_only=True
    )
    reserve_share: float | None = option(
        None, "odma: share of the slots kept free for growth", "--reserve", min=0, max=0.9, config_only=True
    )
    page_slots: int | None = option(None, "paged: KV slots per page", min=16, config_only=True)
    n_fixed: int | None = option(None, "fixed: number of buckets", "--fixed-buckets", min=1, config_only=True)

    def chosen(self) -> dict[str, Any]:
        """Those that were given. UsageError for a page that is no multiple of 16 slots."""
        if self.page_slots is not None and self.page_slots % 16:
            raise UsageError(f"--page-slots {self.page_slots}: a page is a multiple of 16 slots")
        return {name: value for name, value in asdict(self).items() if value is not None}
