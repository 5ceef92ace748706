"""Settings of `simulate` and `provision`: the machines' step times, the drawn requests, the goal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from phasewise.workflows.errors import UsageError
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.cluster.simulated.spec_file import MachineCatalogue, StepSources
    from phasewise.cluster.simulated.steps import StepTimes

DB_MACHINE, XML_MACHINE = "db", "xml"
"""Names of the machine types that `machine_from_db` and `machine_from_xml` give step times."""


@dataclass(frozen=True)
class ClusterInputs:
    """The sources of step times and drawn requests. `reference`: the machine type that slowdowns are of."""

    model: str | None = None
    duration_s: float = 120.0
    draw: Literal["requests", "columns"] = "requests"
    seed: int = 0
    perf_model: Path | None = None
    machine_from_db: str | None = None
    machine_from_xml: str | None = None
    reference: str = "a100"
    db: str | None = None


@dataclass(frozen=True)
class SimulationWish:
    """The scheduling and routing of one simulated cluster's machines; `rate`: requests/s to draw."""

    scheduler: str = "production"
    policy: str | None = None
    rate: float | None = None
    prefix_reuse: bool = False
    slo: str | None = None


@dataclass(frozen=True)
class ProvisionWish:
    """The designs that are compared, what limits them, and what is made small or large."""

    design: str = "baseline,split-homogeneous,split-heterogeneous,capped"
    rate: float | None = None
    cost: float | None = None
    power: float | None = None
    slo: str = "table6"
    minimise: Literal["cost", "power", "machines"] | None = None
    maximise: str | None = None
    rate_step: float = 5.0
    most_rate: float = 500.0
    most: int = 120
    machines: Path | None = None
    policy: str = "splitwise"
    embeddings: Path | None = None
    """A machine that embeds: then a day of queries is provisioned for, and no language model."""

    def check(self) -> None:
        """UsageError where these exclude each other."""
        if sum(amount is not None for amount in (self.rate, self.cost, self.power)) != 1:
            raise UsageError("give exactly one of --rate, --cost and --power")


def step_sources(inputs: ClusterInputs, report: Report = silent) -> StepSources:
    """The source of step times, besides the machine types' own curves. ClusterError or KernelDbError."""
    from phasewise.cluster.simulated.spec_file import StepSources
    from phasewise.cluster.simulated.steps import read_profile
    from phasewise.workflows.capacity.load import steps_from_db, steps_from_xml

    profile = None if inputs.perf_model is None else read_profile(inputs.perf_model)
    timed: dict[str, StepTimes] = {}
    if inputs.machine_from_db is not None:
        timed[DB_MACHINE] = steps_from_db(inputs.db, inputs.machine_from_db, report)
    if inputs.machine_from_xml is not None:
        xml, _, model = inputs.machine_from_xml.partition(":")
        if not xml or not model:
            raise UsageError(f"--machine-from-xml takes XML:MODEL, not {inputs.machine_from_xml!r:.60}")
        timed[XML_MACHINE] = steps_from_xml(xml, model, "native", report)
    return StepSources(profile, timed)


def reference_steps(name: str, catalogue: MachineCatalogue, report: Report) -> StepTimes | None:
    """None where the catalogue's model is not known on that type: then nothing is told as a slowdown."""
    from phasewise.cluster.errors import ClusterError

    try:
        return catalogue[name].steps
    except ClusterError as error:
        report(f"no slowdowns: {error}")
        return None
