"""docs/guide/python.md works as written, and `import phasewise` stays cheap."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

import phasewise

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "python.md"
MODEL = Path("models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf")


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("PHASEWISE_")}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**known, **environment},
        check=False,
    )


@pytest.mark.slow
def test_the_page_runs_as_one_script(tmp_path: Path) -> None:
    cache = Path(os.environ.get("PHASEWISE_CACHE") or platformdirs.user_cache_path("phasewise"))
    if not (cache / MODEL).is_file():
        pytest.skip("the default model is not here: phasewise models pull smollm2-135m-instruct")

    done = python("\n".join(blocks()), XDG_DATA_HOME=str(tmp_path), TMPDIR=str(tmp_path))

    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout
    assert "ms to the first token" in done.stdout
    assert "products settled" in done.stdout


def test_the_page_shows_every_name_of_the_api() -> None:
    shown = "\n".join([*blocks(), PAGE.read_text()])
    calls = {name for name in phasewise.__all__ if callable(getattr(phasewise, name)) and name.islower()}
    assert calls == {"open_model", "open_store", "read_machine", "tune_config", "tune_kernels"}
    assert all(f"{name}(" in shown for name in calls)


def test_importing_phasewise_loads_nothing_heavy() -> None:
    heavy = ("typer", "rich", "numpy", "sqlalchemy", "optuna", "phasewise.cython_kernels")
    done = python(f"import sys, phasewise; print([one for one in {heavy} if one in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_opening_a_model_imports_no_command_line(tmp_path: Path) -> None:
    """From packing a GGUF file to its plans and schedules."""
    script = (
        "import sys, phasewise; from pathlib import Path\n"
        "from tests.support.tiny_models import write_tiny_gguf\n"
        f"write_tiny_gguf(Path({str(tmp_path / 'tiny.gguf')!r}))\n"
        f"model = phasewise.open_model({str(tmp_path / 'tiny.gguf')!r})\n"
        "assert len(model.generate('a', 2).token_ids) == 2\n"
        "print([one for one in ('typer', 'rich', 'phasewise.cli') if one in sys.modules])"
    )
    done = python(script, XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.stdout.strip() == "[]", done.stderr


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        phasewise.nothing  # noqa: B018
