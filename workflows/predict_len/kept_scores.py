"""Scores of `predict-len eval` in the tuning database: figures and counts, never a prompt."""

from __future__ import annotations

import time
from pathlib import Path

from phasewise._version import __version__
from phasewise._words import counted
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.records import Origin, PredictorScore
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.plans import machine_key
from phasewise.workflows.predict_len.judge import Judged
from phasewise.workflows.predict_len.settings import EvalWish
from phasewise.workflows.report import Report, silent


def keep_scores(judged: Judged, wish: EvalWish, report: Report = silent) -> int:
    """Append a score for each log that was judged, and return their number. Where the database takes none,
    that is reported.
    """
    origin = Origin(machine_key(read_machine()), __version__, time.time_ns() // 1_000_000)
    judged_by = "drift" if wish.drift else "held_out" if wish.folds is None else "folds"
    try:
        scores = [
            PredictorScore(
                judged.model_name,
                name_of(log.grounds.reads),
                log.grounds.answers_key,
                judged_by,
                log.grounds.learnt_answers,
                log.n_answers,
                1 - wish.overflow,
                origin,
                log.figures_of_ours(),
            )
            for log in judged.reports
        ]
        with open_store(wish.db, report) as store:
            store.add(scores)
    except KernelDbError as error:
        report(f"nothing is kept of it: {error}")
        return 0
    report(f"kept in the tuning database: {counted(len(scores), 'score')}")
    return len(scores)


def name_of(encoder: str) -> str:
    """A model's name; of a file or folder the last part, since a score names no path."""
    is_path = encoder.startswith(("/", "~", ".")) or Path(encoder).exists()
    return Path(encoder).name or "model" if is_path else encoder
