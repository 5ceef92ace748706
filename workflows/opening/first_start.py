"""Tunes a first start: pulls a remote's schedules for cores like these, and uses those that win a duel here.

It takes FIRST_S at most, apart from finishing a timing that has begun. A remote that cannot be reached or
believed costs one line: the start goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.cython_kernels._native import kernel_abis
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.location import locate, redacted
from phasewise.kerneldb.start_reads import open_start_reads
from phasewise.topology import Machine, core_signature
from phasewise.tuner.measurement_lock import user_lock
from phasewise.tuner.plans import machine_key
from phasewise.workflows.opening.open_model import OpenModel, schedules_under
from phasewise.workflows.opening.settings import Remote, Weights
from phasewise.workflows.opening.tuned_schedules import Plans
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from phasewise.kerneldb.product_counts import ProductCounts
    from phasewise.workflows.tune_kernels.rounds import Round

MOST_BYTES = 64 * 2**20
"""Most bytes of one bundle that a start pulls; a larger bundle is left to `db pull`."""


def pull_what_fits(remote: Remote, db: str | None, seconds: float, report: Report) -> None:
    """Import a remote's rows for cores like these, once for each index; faults are reported, never raised."""
    from phasewise.workflows.database.remote import PullLimits, pull

    if remote.remote is None:
        return
    try:
        limits = PullLimits(seconds, MOST_BYTES, only_news=True)
        pulled = pull(remote.remote, db, remote.trust(), limits=limits, report=report)
    except KernelDbError as error:
        report(f"nothing is pulled, and the start goes on: {error}")
        return
    if pulled.taken.read:
        added = f"{counted(pulled.taken.added, 'row')} added"
        report(f"{redacted(remote.remote)}: {added}, {pulled.taken.known} known already")


def fight_first(
    opened: OpenModel,
    plans: Sequence[Plans],
    weights: Weights,
    db: str | None,
    machine: Machine,
    seconds: float,
    report: Report,
) -> OpenModel:
    """Time hints against the schedules in use, and return the model with the winners.

    plans: each set of plans that the model runs by, one for each instance.
    """
    from phasewise.workflows.tune_kernels.hints import fight_hints
    from phasewise.workflows.tune_kernels.rounds import Tuning

    deadline_s, lock = time.monotonic() + seconds, user_lock(report)
    rounds = [tuning_round for own in plans for tuning_round in _rounds(opened, own, machine)]
    with lock.turn(seconds), open_start_reads(db, report) as reads:
        if reads.store is None:
            return opened
        try:
            tuning = Tuning(machine, reads.store, lock, report)
            done = fight_hints(rounds, tuning, deadline_s - time.monotonic())
        except KernelDbError as error:
            report(f"hints are fought over no more, and the start goes on: {error}")
            return opened
    if not any(outcome.promoted for outcome in done):
        return opened
    return replace(opened, schedules=schedules_under(opened.plans, weights, db, machine, report))


def products_of(
    opened: OpenModel, plans: Sequence[Plans], db: str | None, machine: Machine
) -> ProductCounts | None:
    """Numbers of products of the model: tuned, imported, verified; None where no database can be read."""
    if locate(db).is_absent:
        return None
    from phasewise.kerneldb.product_counts import count_products

    products = {
        (problem, machine_key(machine, tuning_round.cores))
        for own in plans
        for tuning_round in _rounds(opened, own, machine)
        for task in (*tuning_round.tasks, *([tuning_round.attention] if tuning_round.attention else []))
        for problem in task.problems
    }
    with suppress(KernelDbError), open_start_reads(db) as reads:
        if reads.store is not None:
            return count_products(reads.store, core_signature(machine), kernel_abis(), products)
    return None


def _rounds(opened: OpenModel, plans: Plans, machine: Machine) -> Sequence[Round]:
    from phasewise.workflows.tune_kernels.run import MOST_ROWS, rounds_of_model

    return rounds_of_model(replace(opened, plans=plans), machine, [*plans], MOST_ROWS)
