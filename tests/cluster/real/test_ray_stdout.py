"""Stdout beside a connection to Ray: its data is ours alone."""

from __future__ import annotations

import contextlib
import io
import sys
import threading

import pytest

from phasewise.cluster.real.ray_connection import OwnStdout


@pytest.mark.parametrize(
    ("name", "is_data"), [("MainThread", True), ("worker", True), ("ray_listen_error_messages", False)]
)
def test_lines_of_rays_threads_are_no_data(
    name: str, is_data: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = io.StringIO()
    with contextlib.redirect_stdout(OwnStdout(data)):
        thread = threading.Thread(target=lambda: print("a node is dead"), name=name)
        thread.start()
        thread.join()
        sys.stdout.flush()

    assert (data.getvalue() == "a node is dead\n") == is_data
    assert (capsys.readouterr().err == "a node is dead\n") != is_data
