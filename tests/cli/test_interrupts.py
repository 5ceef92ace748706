"""Ctrl-C ends every command and the Python API, whatever runs when it comes."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phasewise._interrupts import remembered_interrupts
from phasewise.kerneldb.store import open_store
from tests.cli import command
from tests.support.tiers import n_examples

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

CALLBACKS = {
    "a weak reference": """
class Own: pass
own = Own()
kept = weakref.ref(own, lambda _: signal.raise_signal(signal.SIGINT))
del own
""",
    "a finaliser": """
class Own:
    def __del__(self): signal.raise_signal(signal.SIGINT)
Own()
""",
    "a callback of C": """
@ctypes.CFUNCTYPE(None)
def called(): signal.raise_signal(signal.SIGINT)
called()
""",
    "a generator that is dropped": """
def own():
    try: yield
    finally: signal.raise_signal(signal.SIGINT)
next(own())
""",
    "several in a row": """
class Own:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
for _ in range(50): Own()
""",
}
"""Code in which Python drops a KeyboardInterrupt."""

ENDED = """
import ctypes, signal, sys, threading, time, weakref
{imported}
try:
{body}
    for _ in range(600): time.sleep(0.1)
except KeyboardInterrupt:
    print("ended")
"""


@pytest.mark.parametrize("imported", ["import phasewise; phasewise.read_machine", "keeps"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_an_interrupt_that_python_drops_ends_the_program(name: str, imported: str) -> None:
    """By the Python API, and as commands begin. Nothing is printed of what was dropped."""
    if imported == "keeps":
        imported = "from phasewise._interrupts import keep_interrupts; keep_interrupts(); keep_interrupts()"
    body = "".join(f"    {line}\n" for line in CALLBACKS[name].splitlines())
    code = ENDED.format(imported=imported, body=body)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ended.stdout == "ended\n"
    assert "KeyboardInterrupt" not in ended.stderr


def test_other_errors_in_callbacks_are_told_as_ever() -> None:
    code = """
from phasewise._interrupts import keep_interrupts
keep_interrupts()
class Own:
    def __del__(self): raise ValueError("told")
Own()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "ValueError: told" in ended.stderr


def test_an_interrupt_amid_code_of_a_string_ends_with_the_same_exit_code(tmp_path: Path) -> None:
    """As dataclasses and SQLAlchemy make it: Python would end by SIGINT itself."""
    ended = run_as_the_command("lambda **_: exec('raise KeyboardInterrupt')", tmp_path)

    assert (ended.returncode, ended.stderr) == (130, "phasewise: interrupted\n")


def test_an_error_that_takes_the_place_of_an_interrupt_is_no_traceback(tmp_path: Path) -> None:
    """SQLAlchemy asserts, while a transaction closes, that it has closed."""
    body = """
def run(**_):
    try:
        raise KeyboardInterrupt
    finally:
        raise AssertionError
"""
    ended = run_as_the_command("run", tmp_path, body)

    assert (ended.returncode, ended.stderr) == (130, "phasewise: interrupted\n")


SHUTDOWNS = {
    "waits for a thread that does not end": """
def waited_for():
    threading.main_thread().join()
    while True:  # one that comes just before Python waits is seen at the next
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
threading.Thread(target=waited_for).start()
""",
    "calls what was registered": "atexit.register(os.kill, os.getpid(), signal.SIGINT)",
    "takes modules apart": """
class Own:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT): kill(pid, number)
signal.own = Own()
""",
}
"""Code that has an interrupt come while Python shuts down and does this."""
ENDS = {
    "sys.exit(0)": (0, ""),
    "sys.exit(7)": (7, ""),
    "fail('no model', 1)": (1, "phasewise: no model\n"),
    "signal.raise_signal(signal.SIGINT)": (130, "phasewise: interrupted\n"),
    "exec('raise KeyboardInterrupt')": (130, "phasewise: interrupted\n"),
}
"""The end of a command: its exit code and what is on stderr."""


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("shutdown", SHUTDOWNS)
def test_an_interrupt_after_a_command_ended_leaves_its_exit_code(
    shutdown: str, end: str, tmp_path: Path
) -> None:
    body = "".join(f"    {line}\n" for line in (*SHUTDOWNS[shutdown].splitlines(), end))
    ended = run_as_the_command("run", tmp_path, f"def run(**_):\n{body}")

    assert (ended.returncode, ended.stderr) == ENDS[end]


def test_a_command_that_ignores_interrupts_does_so_to_its_end(tmp_path: Path) -> None:
    """As a shell without job control starts one in the background."""
    before = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    ended = run_as_the_command(
        "lambda **_: (atexit.register(print, 'last'), signal.raise_signal(2), sys.exit(0))", tmp_path, before
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "last\n", "")


def run_as_the_command(app: str, folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """A process whose command line is the Python expression `app`, after the code `before`."""
    (folder / "interrupted.py").write_text(
        "import atexit, os, signal, sys, threading, time\n"
        "from phasewise import __main__\n"
        "from phasewise.cli import main\n"
        f"from phasewise.cli.present import fail\n{before}\n"
        f"main.app = {app}\n"
        "__main__.main()\n"
    )
    command_line = [sys.executable, "-m", "interrupted"]
    return subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=folder)


def interrupted_at(second: float, *arguments: object) -> tuple[int, str]:
    """The exit code and stderr of a command that would not end by itself, with SIGINT so long after its first
    line on stderr."""
    process = command.start(*arguments)
    assert process.stderr is not None
    first = process.stderr.readline()
    time.sleep(second)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    return process.returncode, first + rest


def check_draws(n_draws: int, roomy: Path, db: Path, seed: int) -> None:
    """Interrupt at drawn times up to half a second; half of the draws are within the first 140 ms."""
    rng = random.Random(seed)
    for _ in range(n_draws):
        second = rng.uniform(0, 0.14) if rng.random() < 0.5 else rng.uniform(0, 0.5)
        code, said = interrupted_at(
            second, "generate", roomy, "-p", "hello", "-n", 99_000, "--ignore-eos", "--db", db
        )
        assert code == 130, (second, said)
        assert said.endswith("phasewise: interrupted\n"), (second, said)
        assert "Traceback" not in said, (second, said)


def test_an_interrupt_ends_generate_whenever_it_comes(roomy: Path, tmp_path: Path) -> None:
    """A part of the draws; the others are a soak."""
    db = tmp_path / "x.db"
    with open_store(db):
        pass  # a start opens and closes it: what SQLAlchemy cleans up has callbacks
    check_draws(4, roomy, db, seed=1)


@pytest.mark.soak
def test_two_hundred_interrupts_end_generate(roomy: Path, tmp_path: Path) -> None:
    db = tmp_path / "x.db"
    with open_store(db):
        pass
    check_draws(n_examples(200, soak=1000), roomy, db, seed=2)


def test_an_interrupt_that_is_cleared_on_its_way_is_raised_by_the_next_look() -> None:
    with remembered_interrupts() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):  # as code in C that clears errors
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_that_takes_the_place_of_an_interrupt_is_the_interrupt() -> None:
    def assert_amid_interrupt() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise AssertionError

    with pytest.raises(KeyboardInterrupt), remembered_interrupts():
        assert_amid_interrupt()
    with pytest.raises(AssertionError), remembered_interrupts():
        raise AssertionError
