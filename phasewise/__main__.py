"""The `phasewise` command, also as `python -m phasewise`.

Ctrl-C while the command line is still being imported ends in one line too.
"""

import os
import signal
import sys


def main() -> None:
    """Import the command line and run it; exits with its code."""
    try:
        from phasewise._interrupts import keep_interrupts

        keep_interrupts()
        from phasewise.cli.main import main as run
    except KeyboardInterrupt:
        print("phasewise: interrupted", file=sys.stderr, flush=True)
        # Python remembers that a module was interrupted, and after sys.exit it would end by SIGINT itself.
        os._exit(128 + signal.SIGINT)
    run()


if __name__ == "__main__":
    main()
