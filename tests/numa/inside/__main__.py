"""`python -m tests.numa.inside`, inside the machine that the variable MACHINE names."""

import os
import sys
import threading
import time
import traceback

import tests.numa.inside as _all_checks
from tests.numa.checks import run_all
from tests.numa.virtual_machine import REPORT

TELL_S = 40

assert _all_checks


def tell_what_is_slow() -> None:
    """Stacks of all threads, to the console. faulthandler walks them while they run, and may crash."""
    while True:
        time.sleep(TELL_S)
        for frame in sys._current_frames().values():
            traceback.print_stack(frame)


threading.Thread(target=tell_what_is_slow, daemon=True).start()
run_all(os.environ["MACHINE"], REPORT)
