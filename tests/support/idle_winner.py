"""Stands in for the process of idle tuning: a schedule of small blocks wins every product at once.

Which of them a real search would find depends on the machine. `python -m` and this module's name, with an
`IdleTask` on standard input.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

from phasewise._version import __version__
from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.records import Comparison, Measurement, Origin, Promotion, Sample
from phasewise.kerneldb.store import open_store
from phasewise.serving.processes.behind_others import end_with_parent
from phasewise.topology import read_machine
from phasewise.tuner.plans import machine_key
from phasewise.workflows.opening.open_model import open_under
from phasewise.workflows.tune_kernels.idle_process import MOST_ROWS, IdleTask
from phasewise.workflows.tune_kernels.run import rounds_of_model

MODULE = "tests.support.idle_winner"
GAIN = Comparison(1.5, 1.4, 1.6, 0.99, 15)


def main() -> None:
    end_with_parent()
    task = IdleTask.from_json(sys.stdin.read())
    machine, abi, won = read_machine(), kernel_abi("gemm"), 0
    opened = open_under(task.plans, task.model, task.weights, task.db, machine)
    with open_store(task.db) as store:
        for tuning_round in rounds_of_model(opened, machine, [*task.plans], MOST_ROWS):
            origin = Origin(machine_key(machine, tuning_round.cores), __version__, 1_795_000_000_000)
            for own in tuning_round.tasks:
                for m in own.ms:
                    small = replace(own.group.default(m), mr=1, panels=1, block_m=1, block_n=16, block_k=32)
                    sample = Sample(small, (10, 10, 10), 10, None, 100)
                    store.add([Measurement(own.problem(m), sample, abi, origin)])
                    store.add([Promotion(own.problem(m), small, None, GAIN, abi, origin)])
                    won += 1
    sys.stdout.write(f"{won}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
