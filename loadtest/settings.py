"""The settings of a load test, as its user states them; `session.load_test_of` makes a `LoadTest`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phasewise._options import changed, option, refuse_unused


@dataclass(frozen=True)
class SendingTimes:
    """The times of requests: at a rate, at a trace's arrivals, or by clients that wait."""

    PANEL = "When"

    rate: float | None = option(None, "requests a second", min=1e-3, max=1e5)
    concurrency: int | None = option(
        None,
        "clients that each wait for their answer; with --rate or --trace: most requests in flight",
        min=1,
        max=10_000,
    )
    trace: Path | None = option(
        None,
        "arrivals and lengths of an Azure, Mooncake or ShareGPT file; with --rate its lengths only",
        metavar="FILE",
    )
    duration_s: float | None = option(
        None, "send no request after S seconds", "--duration", metavar="S", min=0.001
    )


@dataclass(frozen=True)
class SentLengths:
    """The number of requests, and their lengths: fixed, drawn from a distribution, or the trace's."""

    PANEL = "What"

    requests: int | None = option(
        None,
        "number of requests [default: 100, the trace's, or as many as fit into --duration]",
        "-n",
        "--requests",
        min=1,
        max=1_000_000,
    )
    input_len: int | None = option(None, "tokens of a prompt [default: 128]", min=1, max=1 << 20)
    output_len: int | None = option(None, "tokens of an answer [default: 64]", min=1, max=1 << 20)
    lengths: str | None = option(
        None,
        "distribution of both lengths, e.g. uniform:1-1024/16-256 or lognormal:220,1.1/160,0.8",
        metavar="DIST",
    )
    warmup: int = option(2, "requests sent first and not counted", min=0, max=10_000)
    seed: int | None = option(
        None,
        "seed of arrivals, lengths and prompts [default: 0, and prompts that no run has sent before]",
        min=0,
        max=1 << 62,
    )


@dataclass(frozen=True)
class Asking:
    """The form of a request."""

    PANEL = "How it is asked"

    endpoint: str = option(
        "completions", "route that requests are sent to", kind=Literal["completions", "chat"]
    )
    ignore_eos: bool = option(False, "ask for answers of the full length", "--ignore-eos")
    temperature: float = option(0.0, "0: always choose the likeliest token", min=0, max=100)
    extra_body: str | None = option(
        None, 'fields added to every request body, e.g. {"cache_prompt": false}', metavar="JSON"
    )
    api_key: str | None = option(
        None,
        "key that requests carry",
        envvar=["PHASEWISE_API_KEY", "OPENAI_API_KEY"],
        metavar="KEY",
        repr=False,
    )
    unix_socket: Path | None = option(None, "connect through this Unix socket", metavar="PATH")


@dataclass(frozen=True)
class Promises:
    """Latency limits, and the search for the highest rate that keeps them."""

    PANEL = "Promises"

    goodput: str | None = option(
        None, "latency limits, e.g. ttft=2s,tpot=280ms (also e2e)", "--slo", "--goodput", metavar="SLO"
    )
    find_rate: bool = option(
        False, "find the highest rate that keeps every --slo limit at P90, starting at --rate", "--find-rate"
    )
    probe_s: float = option(20.0, "length of one probe in seconds", "--probe", metavar="S", min=0.1, max=3600)

    def __post_init__(self) -> None:
        if not self.find_rate:
            refuse_unused("without --find-rate", changed(self, "probe_s"))


@dataclass(frozen=True)
class EmbedLoad:
    """The texts that an embeddings server is sent, when, and the time in which they are to be answered."""

    model: str | None = option(None, "model to ask for [default: the first listed]")
    requests: int = option(256, "number of requests", "-n", min=1)
    inputs: int = option(1, "texts of a request", min=1, max=2048)
    lengths: str = option(
        "75", "words of a text: 75, 20:120 (evenly drawn) or lognormal:75:0.6 (median, sigma)"
    )
    file: Path | None = option(None, "take the texts from FILE, one a line, over and over", metavar="FILE")
    concurrency: list[int] | None = option(
        None, "number of clients, each with one request at a time [repeatable; default: 32]", "-c", min=1
    )
    rate: float | None = option(
        None, "send requests at this rate instead, requests/s, at random (Poisson)", min=0.01
    )
    slo: str | None = option(None, "promised time of an answer, e.g. 1s or 0.5s", metavar="TIME")
    find: bool = option(
        False, "find the most clients at once whose answers all come within --slo (WindVE's metric)", "--find"
    )
    api_key: str | None = option(None, "key that requests carry", envvar="PHASEWISE_API_KEY", repr=False)
    seed: int = option(0, "seed of lengths, words and arrivals", min=0)

    def __post_init__(self) -> None:
        if self.find:
            refuse_unused("with --find", changed(self, "requests", "concurrency", "rate", "inputs"))
        if self.rate is not None:
            refuse_unused("with --rate", changed(self, "concurrency"))
        if self.file is not None:
            refuse_unused("with --file", changed(self, "lengths"))
