"""Logs of a server: what becomes of lines when a disk does not take them, whichever log it is."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIG_IGN, SIGXFSZ, signal

import pytest

from phasewise.serving.http.http_settings import RequestFacts
from phasewise.serving.http.length_log import LengthLog
from phasewise.serving.http.monitoring.access_log import Logging, open_log
from phasewise.serving.http.requests.lengths import RealisedLength
from phasewise.serving.processes.line_log import LineLog
from tests.support.servers.rude_clients import until

LENGTH = RealisedLength(
    RequestFacts((1, 2, 3), 0.7, 64, 2, "abcd"), 9, "stop", 1_699_999_999.5, 1_700_000_000.25
)
Open = Callable[[Path, Callable[[str], None]], "contextmanager[tuple[LineLog, Callable[[], None]]]"]


@contextmanager
def length_log(path: Path, report: Callable[[str], None]) -> Iterator[tuple[LineLog, Callable[[], None]]]:
    with LengthLog(path, report) as log:
        yield log, lambda: log.put("fake", LENGTH)


@contextmanager
def access_log(path: Path, report: Callable[[str], None]) -> Iterator[tuple[LineLog, Callable[[], None]]]:
    with open_log(Logging(path, "info"), report) as (lines, log):
        assert log is not None
        yield lines, lambda: log._write("x" * 200)


BOTH = pytest.mark.parametrize("opened", [length_log, access_log])


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """A disk that is full, as far as one file can tell."""
    before = signal(SIGXFSZ, SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal(SIGXFSZ, before)


@BOTH
def test_a_full_disk_costs_lines_and_one_warning_and_no_half_line(opened: Open, tmp_path: Path) -> None:
    """Every line is in the file or counted, and the log goes on when there is room."""
    path, said = tmp_path / "log", list[str]()
    with opened(path, said.append) as (log, put):
        with files_of_at_most(300):
            for _ in range(5):
                put()
            until(lambda: log.n_lost == 4, "all are written")
        put()
    lines = path.read_text().splitlines()

    assert len(lines) == 2
    assert lines[0][:40] == lines[1][:40]
    assert len(said) == 1
    assert str(path) in said[0]


@BOTH
def test_a_full_device_is_told(opened: Open) -> None:
    said: list[str] = []
    with opened(Path("/dev/full"), said.append) as (log, put):
        put()
        put()

    assert log.n_lost == 2
    assert [line for line in said if "No space left on device; lines are lost" in line] == said
    assert len(said) == 1


@BOTH
def test_the_disk_may_stand_still_and_nobody_waits_for_it(opened: Open, tmp_path: Path) -> None:
    path, said = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with opened(path, said.append) as (log, put):
        for _ in range(20_000):
            put()
        assert log.n_lost > 0
        assert len(said) == 1
        os.close(reader)


@BOTH
def test_a_link_and_a_folder_are_refused(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for name, why in (("link", "symbolic link"), (".", "directory"), ("no/log", "No such file")):
        with pytest.raises(Exception, match=why), opened(tmp_path / name, print):
            pass
    assert not (tmp_path / "none").exists()
