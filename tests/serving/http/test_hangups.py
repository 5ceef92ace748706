"""SIGHUP, twice: the keys are those that were read last, however long a read takes."""

from __future__ import annotations

import threading

from phasewise.serving.http.routes.hangup import on_hangup
from phasewise.serving.http.routes.middleware import ApiKeys
from tests.support.servers.rude_clients import until


def test_keys_that_were_read_first_do_not_replace_those_that_were_read_later() -> None:
    """The first read has the old file and takes its time; a key is withdrawn meanwhile."""
    keys, file = ApiKeys(("start",)), [("old", "withdrawn")]
    has_read, goes_on, n_reads = threading.Event(), threading.Event(), 0

    def read() -> tuple[str, ...]:
        nonlocal n_reads
        n_reads, own = n_reads + 1, file[-1]
        if n_reads == 1:
            has_read.set()
            goes_on.wait(0.2)  # the second would be through by then, where it does not wait
        return own

    hang_up = on_hangup((), keys, read)
    assert hang_up is not None
    hang_up()
    assert has_read.wait(60)
    file.append(("old",))
    hang_up()

    until(lambda: n_reads == 2, "the file is not read again")
    until(lambda: not any(each.name == "phasewise-keys" for each in threading.enumerate()), "a read goes on")
    assert keys.digest_of("old") is not None
    assert keys.digest_of("withdrawn") is None
