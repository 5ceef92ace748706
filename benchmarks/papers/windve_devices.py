"""Tables I and II of WindVE in real time: devices that take the paper's times, behind our server."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from benchmarks.harness import Model, Yielded, listed
from benchmarks.papers.windve import PAPER_TOKENS, SLOS_S, TABLES, line_of, with_gain
from benchmarks.peers.servers import phasewise, running
from phasewise.serving.embedding.depth import LatencyLine
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
from phasewise.serving.embedding.queues import Depth
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.topology import read_machine
from phasewise.workflows.embed.kept_plan import keep_plan
from tests.support.modelled_device import command

MOST_TOKENS = 2 * PAPER_TOKENS
"""The most tokens of a query of 75 words."""
MOST_INPUTS = 512
"""The depth of a device that is measured alone: more than any holds."""
PHASEWISE = [sys.executable, "-m", "phasewise"]


def windve_devices(
    model: Model = "all-minilm-l6-v2",
    weights: Annotated[str, Option("--format")] = "int8",
    table: Annotated[str, Option(help="I, II or both")] = "I,II",
    slo: Annotated[str, Option(help="1, 2 or both, in seconds")] = "1,2",
) -> Yielded:
    """Tables I and II of WindVE in real time: devices that take the paper's times, and this machine's CPU.

    Each device is a process behind `serve --embed-device`, whose batch of n takes alpha n + beta, by the line
    through the paper's depths under 1 s and 2 s. Depths alone limit them, as in the paper: no time is
    promised. `bench embed --find` measures the most queries of 75 words at once that are all answered in
    time: by each device alone; by the accelerator with the paper's CPU as a second device; with this
    machine's CPU, which runs MODEL (bge-large, the paper's, would hold one query or two on two cores).
    Together each has the depth that it was found to hold alone. Sum: both of those. Paper: the depths that
    the lines are through.
    """
    loaded = load_model(model, weights)
    with tempfile.TemporaryDirectory() as folder:
        for slo_s in map(float, listed(slo)):
            bench = _Bench(loaded, model, slo_s, Path(folder))
            on_cpu = bench.tuned()
            cpu_alone = bench.found(on_cpu, {})
            on_cpu = tuple(replace(own, depth=_depth(cpu_alone // len(on_cpu))) for own in on_cpu)
            column = SLOS_S.index(slo_s)
            for number in listed(table):
                for name, depths in TABLES[number].items():
                    fast, slow = (line_of(of_device) for of_device in depths)
                    alone = bench.found((), {"exec:0": (fast, MOST_INPUTS)})
                    theirs = bench.found((), {"exec:0": (slow, MOST_INPUTS)})
                    both = {"exec:0": (fast, alone)} | ({"exec:1": (slow, theirs)} if theirs else {})
                    with_theirs = bench.found((), both)
                    with_ours = bench.found(on_cpu, {"exec:0": (fast, alone)})
                    yield {
                        "table": number,
                        "devices": name,
                        "SLO, s": slo_s,
                        "paper": with_gain(depths[0][column], depths[1][column]),
                        "alone": f"{alone} + {theirs}",
                        "together": with_gain(alone, with_theirs - alone),
                        "with this CPU": with_gain(alone, with_ours - alone),
                        "sum": alone + cpu_alone,
                        "over the sum": with_ours / max(1, alone + cpu_alone),
                    }


class _Bench:
    """The ways to measure under one SLO."""

    def __init__(self, loaded: PackedModel, ref: str, slo_s: float, folder: Path) -> None:
        self._loaded, self._ref, self._slo_s, self._folder = loaded, ref, slo_s, folder

    def tuned(self) -> tuple[Instance, ...]:
        """The CPU's part of a plan."""
        db = str(self._folder / "tuned.db")
        tuning = ["tune-embed", self._ref, "--format", self._loaded.format, "--slo", f"{self._slo_s}s"]
        options = ["--no-embed-accelerators", "--tokens", str(PAPER_TOKENS), "--db", db, "--json"]
        done = subprocess.run([*PHASEWISE, *tuning, *options], check=True, stdout=subprocess.PIPE)
        best = max(json.loads(done.stdout)["measured"], key=lambda cut: cut["depth"])
        inputs = best["depth"] // len(best["cores"])
        return tuple(
            Instance(f"cpu:{index}", tuple(own), _depth(inputs)) for index, own in enumerate(best["cores"])
        )

    def found(self, on_cpu: tuple[Instance, ...], devices: Mapping[str, tuple[LatencyLine, int]]) -> int:
        """The most queries at once, of these devices together: each a line and the inputs it may hold."""
        with self._serving(on_cpu, devices) as url:
            asked = ["bench", "embed", url, "--find", "--slo", f"{self._slo_s}s", "--encoding", "base64"]
            done = subprocess.run([*PHASEWISE, *asked, "--json"], check=True, stdout=subprocess.PIPE)
        answer: dict[str, Any] = json.loads(done.stdout)
        return int(answer["highest_concurrency"])

    @contextmanager
    def _serving(
        self, on_cpu: tuple[Instance, ...], devices: Mapping[str, tuple[LatencyLine, int]]
    ) -> Iterator[str]:
        machine = read_machine()
        core = (min(machine.allowed_pus),)
        accelerated = [
            Instance(name, core, _depth(inputs), batch_s=line.beta_s)
            for name, (line, inputs) in devices.items()
        ]
        db = str(self._folder / "plans.db")
        plan = EmbeddingPlan((*accelerated, *on_cpu))
        keep_plan(db, self._loaded, machine, plan, lambda _line: None)
        options = ["--db", db, "--no-embed-accelerators"]
        for line, _inputs in devices.values():
            options += ["--embed-device", f"exec:{shlex.join(command(line, self._folder))}"]
        os.environ["PHASEWISE_EMBED_CPU"] = str(int(bool(on_cpu)))
        with running(phasewise(self._ref, self._loaded.format, *options), 0, 0, 0) as url:
            yield url


def _depth(inputs: int) -> Depth:
    return Depth(max(1, inputs), max(1, inputs) * MOST_TOKENS)
