"""A program of its own, that a test kills: `front_alone.py MODEL`. A front over two instances of two ranks.

Prints the processes of its instances as a JSON list, and waits.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from tests.support.servers.pools import pools


def main(model: Path) -> None:
    with pools(model, ("mixed", "mixed"), n_ranks=2) as server:
        print(json.dumps([*server.front.pids.values()]), flush=True)
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
