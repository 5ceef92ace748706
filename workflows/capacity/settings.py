"""Settings of `simulate` and `provision`: the machines' step times, the drawn requests, the goal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phasewise._options import changed, option, refuse_unused
from phasewise.workflows.errors import UsageError
from phasewise.workflows.options import DB


@dataclass(frozen=True)
class ClusterInputs:
    """The sources of step times and drawn requests."""

    model: str | None = option(None, "model whose step times machine types state [default: bloom-176b]")
    duration_s: float = option(
        120.0, "with --rate: seconds for which requests are drawn", "--duration", min=1.0
    )
    seed: int = option(0, "seed of the drawn requests", min=0)
    machine_from_db: str | None = option(
        None,
        "take the step times of the machine type db, which a cluster file describes, from the tuning "
        "database: the beginning of a core signature, or CORE@PLACEMENT",
        metavar="SIGNATURE",
    )
    machine_from_xml: str | None = option(
        None,
        "model the step times of the machine type xml, which a cluster file describes: XML from lstopo "
        "of a machine that need not exist, and a model, e.g. machine.xml:config.json",
        metavar="XML:MODEL",
    )
    reference: str = option(
        "a100", "machine type whose times slowdowns are relative to", metavar="TYPE", config_only=True
    )
    db: str | None = DB(None)

    def __post_init__(self) -> None:
        if self.machine_from_db is None:
            refuse_unused("without --machine-from-db", changed(self, "db"))


@dataclass(frozen=True)
class SimulationWish:
    """The scheduling and routing of one simulated cluster's machines; `rate`: requests/s to draw."""

    policy: str | None = option(
        None,
        "how requests are routed [default: the file's, else splitwise]",
        kind=Literal["splitwise", "prefix-aware"] | None,
    )
    rate: float | None = option(
        None,
        "requests/s, drawn anew at exponential intervals with the trace's lengths [default: the "
        "trace's own arrivals]",
        min=0.001,
    )
    prefix_reuse: bool = option(
        False, "reuse common beginnings of prompts (Mooncake traces)", "--prefix-reuse"
    )
    slo: str | None = option(
        None,
        "promises to judge by: table6 (the Splitwise paper's slowdowns), or times such as "
        "ttft=1.5s,tbt=100ms,e2e.p99=20s (P90 where no percentile is named)",
        metavar="SLO",
    )


@dataclass(frozen=True)
class ProvisionWish:
    """The designs to compare, their limits, and the quantity to minimise or maximise."""

    design: str = option(
        "baseline,split-homogeneous,split-heterogeneous,capped",
        "designs to compare: baseline, split-homogeneous, split-heterogeneous, capped (the six of "
        "the Splitwise paper), or kinds of your own: mixed:TYPE, split:PROMPT_TYPE/TOKEN_TYPE",
        metavar="LIST",
    )
    rate: float | None = option(None, "rate that the cluster must serve, requests/s", min=0.001)
    cost: float | None = option(None, "highest cost of the cluster per hour", min=0.0)
    power: float | None = option(None, "highest power of the cluster in watts", min=0.0)
    slo: str = option(
        "table6",
        "promises: table6, or times such as ttft=1.5s,tbt=100ms (P90 where no percentile is named)",
        metavar="SLO",
    )
    minimise: Literal["cost", "power", "machines"] | None = option(
        None, "with --rate: what the cluster should have least of [default: cost]"
    )
    rate_step: float = option(5.0, "distance of the rates that are tried, requests/s", min=0.001)
    most_rate: float = option(500.0, "highest rate that is tried, requests/s", min=0.001, config_only=True)
    most: int = option(120, "most machines of each kind", min=1, max=2000)
    machines: Path | None = option(
        None, "TOML file with [machines.NAME] tables of more types", metavar="FILE"
    )
    policy: str = option(
        "splitwise", "how requests are routed and scheduled", kind=Literal["splitwise", "prefix-aware"]
    )

    def __post_init__(self) -> None:
        if self.rate is None:
            refuse_unused("without --rate", changed(self, "minimise"))
        else:
            refuse_unused("with --rate", changed(self, "rate_step"))

    def check(self) -> None:
        """Raise UsageError where settings exclude each other."""
        if sum(amount is not None for amount in (self.rate, self.cost, self.power)) != 1:
            raise UsageError("give exactly one of --rate, --cost and --power")
