"""An instance of a pool that makes no guide before it is let: `python -m MODULE`, by its name below.

In the folder that the environment variable `FOLDER` names it makes the file `begun` when it begins with the
first guide, and goes on once the file `open` is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from phasewise.serving.grammar.guides import Grammar, Guide, GuideCompiler
from phasewise.workflows.serve import instance_process

MODULE = "tests.support.servers.gated_instance"
FOLDER = "TESTS_GATED_INSTANCE"


def main() -> int:
    folder, compile_proven = Path(os.environ[FOLDER]), GuideCompiler.compile_proven

    def compile_once_let(self: GuideCompiler, grammar: Grammar, n_bytes: int) -> Guide:
        (folder / "begun").touch()
        while not (folder / "open").exists():
            time.sleep(0.01)
        return compile_proven(self, grammar, n_bytes)

    GuideCompiler.compile_proven = compile_once_let  # type: ignore[method-assign]
    return instance_process.main()


if __name__ == "__main__":
    sys.exit(main())
