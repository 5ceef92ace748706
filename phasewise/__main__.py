"""The `phasewise` command, also as `python -m phasewise`.

Ctrl-C while the command line is still being imported ends in one line too.
"""

import signal
import sys


def main() -> None:
    """Import the command line and run it; exits with its code."""
    try:
        from phasewise.cli.main import main as run
    except KeyboardInterrupt:
        print("phasewise: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    run()


if __name__ == "__main__":
    main()
