"""Ask /health of a server every 20 ms until stdin ends; print the seconds of each answer as JSON.

    python -m tests.soak.health_probe http://127.0.0.1:8000

A process of its own, so that what holds the server's Python does not hold the clock too; `watching_health`
starts it beside other work.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_PAUSE_S = 0.02


@contextmanager
def watching_health(url: str) -> Iterator[list[float]]:
    """Ask from another process until the block ends; the list then has all answers' seconds, ascending."""
    command = [sys.executable, "-m", "tests.soak.health_probe", url]
    probe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    took_s: list[float] = []
    try:
        yield took_s
    finally:
        said, _ = probe.communicate("end\n", timeout=60)
        took_s += sorted(json.loads(said))


def main() -> None:
    parts = urlsplit(sys.argv[1])
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    took_s = []
    while not over.wait(_PAUSE_S):
        began = time.monotonic()
        link = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=60)
        link.request("GET", "/health")
        link.getresponse().read()
        link.close()
        took_s.append(time.monotonic() - began)
    print(json.dumps(took_s))


if __name__ == "__main__":
    main()
