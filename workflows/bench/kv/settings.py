"""Settings of `bench kv`: which requests are replayed, on which pool, by which policies."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise._options import changed, option, parse_bytes, refuse_unused
from phasewise.workflows.options import KvFormat


@dataclass(frozen=True)
class ReplayWish:
    """The requests of a trace that are replayed, and how."""

    column: str | None = option(
        None,
        "column of a CSV file that holds the lengths of answers; prompts have --prompt-tokens",
        config_only=True,
    )
    prompt_tokens: int = option(
        48, "prompt length of each request of a CSV file", min=1, max=1 << 16, config_only=True
    )
    count: int = option(2000, "most requests of each trace", "-n", "--count", min=1)
    model: str | None = option(
        None, "model whose tokens a log's prompts are [default: the one that its lines name]"
    )
    seed: int = option(0, "seed of samples and errors", config_only=True)
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
    policies: str = option(
        "odma,odma-whole,static,fixed,paged,paged-16",
        "any of odma, odma-whole, static, fixed, paged, paged-16 (slots a page)",
        metavar="LIST",
    )

    def __post_init__(self) -> None:
        if self.memory_bytes is None:
            refuse_unused("without --memory", changed(self, "kv_format"))
        else:
            refuse_unused("with --memory", changed(self, "slots"))
