"""Asking other programs. They run in an interpreter that has them: this one, or PHASEWISE_PEERS_PYTHON."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ASKED = Path(__file__).parent.parent / "data" / "peer_tokens.py"


def ask(question: str, package: str, **request: Any) -> Any:
    """The answer of one function of peer_tokens.py. Skips the test where no interpreter has `package`."""
    interpreter = _interpreter_with(package)
    if interpreter is None:
        pytest.skip(f"no {package} here; PHASEWISE_PEERS_PYTHON may name an interpreter that has it")
    result = subprocess.run(
        [interpreter, str(_ASKED)],
        input=json.dumps({"question": question, **request}),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def llama_cpp_source() -> Path:
    """The folder of llama.cpp's source that PHASEWISE_LLAMA_CPP names; skips the test where there is none."""
    folder = Path(os.environ.get("PHASEWISE_LLAMA_CPP", "/nowhere"))
    if not (folder / "src" / "llama-vocab.cpp").is_file():
        pytest.skip("no source of llama.cpp here; PHASEWISE_LLAMA_CPP names it, as `make test-files` does")
    return folder


@functools.cache
def _interpreter_with(package: str) -> str | None:
    for interpreter in (sys.executable, os.environ.get("PHASEWISE_PEERS_PYTHON")):
        if (
            interpreter
            and not subprocess.run([interpreter, "-c", f"import {package}"], capture_output=True).returncode
        ):
            return interpreter
    return None
