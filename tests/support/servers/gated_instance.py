"""An instance of a pool that waits until it is let go on: `python -m MODULE`, by its name below.

In the folder that the environment variable `FOLDER` names it makes the file `begun` when it begins with the
first guide, and goes on once the file `open` is there. With `MOST_TOKENS` as well, it gives out at least so
many tokens, makes the file `held-PID`, and computes no further step before `open` is there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.messages import Answer, Delivery
from phasewise.serving.grammar.guides import Grammar, Guide, GuideCompiler
from phasewise.workflows.serve import instance_process

MODULE = "tests.support.servers.gated_instance"
FOLDER = "TESTS_GATED_INSTANCE"
MOST_TOKENS = "TESTS_GATED_INSTANCE_TOKENS"
ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def gate(folder: Path, most_tokens: int | None = None) -> Iterator[Path]:
    """Yield the file that lets instances go on which start within."""
    places = {"PYTHONPATH": str(ROOT), FOLDER: str(folder)}
    if most_tokens is not None:
        places[MOST_TOKENS] = str(most_tokens)
    with patch.dict(os.environ, places):
        yield folder / "open"


def held(folder: Path) -> set[int]:
    """The processes that have given out the most tokens that they may."""
    return {int(path.name.removeprefix("held-")) for path in folder.glob("held-*")}


def main() -> int:
    folder, compile_proven, step = Path(os.environ[FOLDER]), GuideCompiler.compile_proven, Engine.step
    n_tokens, most_tokens = 0, float(os.environ.get(MOST_TOKENS, "inf"))

    def wait() -> None:
        while not (folder / "open").exists():
            time.sleep(0.01)

    def compile_once_let(self: GuideCompiler, grammar: Grammar, n_bytes: int) -> Guide:
        (folder / "begun").touch()
        wait()
        return compile_proven(self, grammar, n_bytes)

    def step_once_let(self: Engine) -> Delivery:
        nonlocal n_tokens
        if n_tokens >= most_tokens:
            (folder / f"held-{os.getpid()}").touch()
            wait()
        delivery = step(self)
        n_tokens += sum(len(out.tokens) for out in delivery.outs if isinstance(out, Answer))
        return delivery

    GuideCompiler.compile_proven = compile_once_let  # type: ignore[method-assign]
    Engine.step = step_once_let  # type: ignore[method-assign]
    return instance_process.main()


if __name__ == "__main__":
    sys.exit(main())
