"""The `phasewise` command, also as `python -m phasewise`.

Ctrl-C ends in one exit code also while the command line is being imported, and while Python shuts down.
"""

import os
import signal
import sys
from contextlib import suppress

EXIT_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Import the command line and run it; exits with its code."""
    try:
        from phasewise._interrupts import exit_at_interrupts, keep_interrupts

        keep_interrupts()
        from phasewise.cli.main import main as run

        exit_code: str | int | None = EXIT_INTERRUPTED
        try:
            run()
        except SystemExit as end:
            exit_code = end.code
            raise
        finally:
            with suppress(MemoryError):  # a shortage has been said by then
                exit_at_interrupts(exit_code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("phasewise: interrupted", file=sys.stderr, flush=True)
        # Python remembers that a module was interrupted, and after sys.exit it would end by SIGINT itself.
        os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
