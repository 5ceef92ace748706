"""tests/soak/served_process.py: a script that is told to end does, whatever it is doing."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.support import ROOT

SWALLOWS = """
import os, signal, sys, time, weakref
from tests.soak.served_process import leave_no_server

leave_no_server()

class Thing:
    pass

thing = Thing()
watched = weakref.ref(thing, lambda _: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.01)))
del thing
print("swallowed", flush=True)
time.sleep(60)
"""


def test_sigterm_ends_a_script_even_where_a_callback_swallows_the_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout == "swallowed\n"
    assert done.returncode == 128 + signal.SIGTERM
