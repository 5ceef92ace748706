"""Valid records to build tests from, and a way to run something as a user without rights."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from phasewise.kerneldb.records import (
    SINGLE_CORE,
    Comparison,
    MachineKey,
    Measurement,
    Origin,
    PlanRecord,
    PredictorScore,
    Problem,
    Promotion,
    Sample,
    Schedule,
    ServedStep,
    StepTime,
    StorageDuel,
    UserProblem,
    UserPromotion,
    UserTiming,
)

MACHINE = MachineKey("AuthenticAMD 26/2 avx2+avx512f L1d 48K L2 1M", "2 threads: 1 node x 1 L3 x 2 cores")
OTHER_MACHINE = MachineKey("ARM 8/0xd4f no-isa L1d 64K L2 1M", "4 threads: 1 node x 1 L3 x 4 cores")
ORIGIN = Origin(MACHINE, "0.1.0", 1_795_000_000_000)
ELSEWHERE = replace(ORIGIN, machine=OTHER_MACHINE)
THERE = replace(ORIGIN, verified=False)
PROBLEM = Problem("gemm", "int4", 1536, 576, 8)
SCHEDULE = Schedule(8, 2, 64, 128, 576, 1, 2, 1, "vnni", 1, 0, "nm")
OTHER_SCHEDULE = Schedule(4, 4, 64, 128, 288, 1, 1, 2, "vnni", 2, 512, "mn")
SAMPLE = Sample(SCHEDULE, (1200, 1180, 1950), 1200, 0.00025, 81_000)
MEASUREMENT = Measurement(PROBLEM, SAMPLE, "gemm-5f1c9e", ORIGIN)
NOTICED = {"steal_share": 0.015625, "mhz": 2900.0}
PROMOTION = Promotion(PROBLEM, SCHEDULE, None, Comparison(1.25, 1.125, 1.5, 0.95, 40), "gemm-5f1c9e", ORIGIN)
STORAGE_DUEL = StorageDuel(
    Problem("gemm", "bf16s8", 1536, 576, 1),
    *(SCHEDULE, OTHER_SCHEDULE, Comparison(1.5, 1.25, 1.75, 0.99, 15), "gemm-5f1c9e", ORIGIN),
)
PLAN = PlanRecord(
    "tinyllama@int4",
    "decode",
    '{"format": 1, "phase": "decode", "ranks": [{"cores": [0], "numa_node": 0}]}',
    ORIGIN,
    {"tpot_ms": 4.25},
)
STEP_TIME = StepTime(
    "tinyllama@int4",
    "9f86d081884c7d65",
    '{"format": 1, "phase": "decode", "ranks": [{"cores": [0, 1], "numa_node": 0}]}',
    "default",
    ServedStep("decode", 1, 1, 512),
    (4_100_000, 4_050_000, 4_900_000),
    4_050_000,
    "gemm-5f1c9e",
    ORIGIN,
    {"steal_share": 0.015625},
)
PREDICTOR_SCORE = PredictorScore(
    *("tinyllama", "tokens", "0123456789abcdef0123456789abcdef", "held_out", 1050, 450, 0.995, ORIGIN),
    {"accuracy": 0.99375, "utilisation": 0.625, "coverage_90": 0.90625},
)

USER_PROBLEM = UserProblem("dot", "kernel-dot-avx2-0123456789ab", (("n", 64),))
USER_ORIGIN = replace(ORIGIN, machine=MachineKey(MACHINE.core_sig, SINGLE_CORE))
USER_TIMING = UserTiming(USER_PROBLEM, (("UNROLL", 2),), (90, 80, 85), 82, USER_ORIGIN, {"mhz": 2900.0})
USER_PROMOTION = UserPromotion(
    USER_PROBLEM, (("UNROLL", 2),), (("UNROLL", 1),), Comparison(1.25, 1.125, 1.5, 0.99, 15), USER_ORIGIN
)
_OF_GEMM = (MEASUREMENT, PROMOTION, STORAGE_DUEL, PLAN, STEP_TIME, PREDICTOR_SCORE)
EVERY_KIND = (*_OF_GEMM, USER_TIMING, USER_PROMOTION)
"""A row of each."""


def measured(estimate_ns: int, schedule: Schedule = SCHEDULE, **changes: Any) -> Measurement:
    """MEASUREMENT with another estimate, and other fields of it."""
    sample = replace(SAMPLE, schedule=schedule, samples_ns=(estimate_ns,), estimate_ns=estimate_ns)
    return replace(MEASUREMENT, sample=sample, **changes)


def without_rights(action: Callable[[], Any]) -> Any:
    """Run `action` in a forked child that is not root, and return its result or raise its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            outcome = (True, action())
        except Exception as error:
            outcome = (False, error)
        os.write(writer, pickle.dumps(outcome))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        worked, value = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if not worked:
        raise value
    return value
