"""`python -m tests.numa.inside`, inside the machine that the variable MACHINE names."""

import faulthandler
import os

import tests.numa.inside as _all_checks
from tests.numa.checks import run_all
from tests.numa.virtual_machine import REPORT

DUMP_S = 40

assert _all_checks
faulthandler.dump_traceback_later(DUMP_S, repeat=True)  # to the console: what is slow
run_all(os.environ["MACHINE"], REPORT)
