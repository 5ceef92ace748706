"""Chooses the tests of a tier (tests/support/tiers.py), says what it left out, refuses unexpected skips."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.expected_skips import EXPECTED_SKIPS
from tests.support.tiers import QUICK_SHARE, TIERS, VARIABLE, middle_isas, n_examples

# Read while numpy is loaded. A second thread of its products spins for longer than it works.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

_DEFAULT_EXAMPLES = 100  # hypothesis' own

LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("phasewise")
    group.addoption("--tier", choices=TIERS, default="all", help="which tests to run; default: all but soak")
    group.addoption(
        "--no-unexpected-skips",
        action="store_true",
        help="fail what skips for a reason that tests/support/expected_skips.py does not list",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ[VARIABLE] = config.getoption("--tier")
    os.environ["XDG_STATE_HOME"] = os.devnull  # nothing is remembered from test to test
    # Each HTTP client reads all certificates that it may need: 20 ms for a system's. No test goes outside.
    os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data" / "tls" / "stranger.pem")
    # A background job of a shell ignores SIGINT, and so would the commands that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("tier", max_examples=n_examples(_DEFAULT_EXAMPLES), deadline=None)
    settings.load_profile("tier")
    config.stash[LEFT_OUT] = Counter()
    _use_own_measurement_lock(config)
    _have_patient_clients()


def _use_own_measurement_lock(config: pytest.Config) -> None:
    """The lock lies in TMPDIR: with a shared one, commands under test wait for those of other processes."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own files stay there
    folder = tempfile.mkdtemp(prefix="phasewise-tests-")
    os.chmod(folder, 0o755)  # servers that tests start as another user keep their files below it
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def _have_patient_clients() -> None:
    """A busy machine's server may take longer than the five seconds of httpx."""
    with suppress(ImportError):  # not every environment of the tests has it
        config = import_module("httpx._config").DEFAULT_TIMEOUT_CONFIG
        config.connect = config.read = config.write = config.pool = 60.0


def pytest_collection(session: pytest.Session) -> None:
    """In a run of all tests each worker imports a share of the files first, and what it has compiled of them
    is there for the others: in a fresh clone, compiling all of them takes each half a minute.
    """
    worker, n_workers = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if worker is None or n_workers is None or session.config.getoption("file_or_dir"):
        return
    root = session.config.rootpath
    for path in sorted((root / "tests").rglob("test_*.py"))[int(worker.removeprefix("gw")) :: int(n_workers)]:
        with suppress(Exception, pytest.skip.Exception):  # the collection will tell
            import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    dropped = []
    numbers = Counter[str]()
    for item in items:
        reason = _why_not_quick(item)
        if not reason and item.get_closest_marker("many"):
            function = item.nodeid.partition("[")[0]
            reason = "of those with many parameters" if numbers[function] % QUICK_SHARE else ""
            numbers[function] += 1
        if tier == "quick" and reason:
            config.stash[LEFT_OUT][reason] += 1
        if not _is_in(tier, item, reason):
            dropped.append(item)
    if dropped:
        unwanted = set(dropped)
        items[:] = [item for item in items if item not in unwanted]
        config.hook.pytest_deselected(items=dropped)
    _longest_files_first(items)


def pytest_collection_finish() -> None:
    """Take what tests are made of, millions of objects, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Drop Hypothesis' clock of garbage collections: an interrupt that comes within its call is lost."""
    gc.callbacks.clear()


def _longest_files_first(items: list[pytest.Item]) -> None:
    """No process begins a long file when the others have ended. Which are long is told by the mark slow."""
    n_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -n_slow[item.path])


_SOAK = "marked soak"


def _is_in(tier: str, item: pytest.Item, reason: str) -> bool:
    """True if a tier has a test; reason: why `quick` leaves it out."""
    match tier:
        case "quick":
            return not reason
        case "rest":
            return reason not in ("", _SOAK) or (not reason and (_draws(item) or _takes_all_isas(item)))
        case "all":
            return reason != _SOAK
        case _:
            return True


def _why_not_quick(item: pytest.Item) -> str:
    """Why `quick` leaves a test out; "" where it runs it."""
    if item.get_closest_marker("soak"):
        return _SOAK
    if set(middle_isas()).intersection(_texts_of(item)):
        return "on instruction sets between the lowest and the highest"
    if item.get_closest_marker("slow") and not item.get_closest_marker("smoke"):
        return "marked slow"
    return ""


def _texts_of(item: pytest.Item) -> Iterator[str]:
    """The parameters of a test that are strings, or are in tuples."""
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec else ():
        yield from (
            part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, str)
        )


def _draws(item: pytest.Item) -> bool:
    """True if hypothesis draws a test's examples, of which `quick` has taken a fifth."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def _takes_all_isas(item: pytest.Item) -> bool:
    """True if a test loops over `isas()`, of which `quick` has left some out."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    return code is not None and "isas" in code.co_names and bool(middle_isas())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):
        _refuse_unexpected_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_unexpected_skip(collector.config, report)
    return report


def _refuse_unexpected_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    """With --no-unexpected-skips, a skip for a reason that is not listed is a failure that says so."""
    if report.skipped and config.getoption("--no-unexpected-skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(re.search(pattern, reason) for pattern in EXPECTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"unexpected skip (see tests/support/expected_skips.py): {reason}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(
        session.config, "workeroutput", None
    )  # what a worker of pytest-xdist tells the controller
    if output is not None:
        output["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--tier") == "quick":
        terminalreporter.section("left out of this tier")
        for reason, n in config.stash[LEFT_OUT].most_common():
            terminalreporter.line(f"{n:5} tests {reason}")
        terminalreporter.line("      four fifths of the examples that tests draw")
        terminalreporter.line("make test-all runs them; what is marked soak: make test-soak")
