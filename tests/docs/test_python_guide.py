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
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.workflows.errors import WorkflowError
from tests.support.models.tiny_models import write_tiny_gguf

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "python.md"
MODEL = Path("models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf")


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PHASEWISE_")}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**inherited, **environment},
        check=False,
    )


@pytest.mark.slow
def test_the_page_runs_as_one_script(tmp_path: Path) -> None:
    cache = Path(os.environ.get("PHASEWISE_CACHE") or platformdirs.user_cache_path("phasewise"))
    if not (cache / MODEL).is_file():
        pytest.skip("the default model is not here: phasewise models pull smollm2-135m-instruct")

    db = tmp_path / "tuning.db"
    done = python(
        "\n".join(blocks()),
        XDG_DATA_HOME=str(tmp_path / "data"),
        TMPDIR=str(tmp_path),
        PHASEWISE_CONFIG="/dev/null",
        PHASEWISE_DB=str(db),
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert db.stat().st_size
    assert not (tmp_path / "data").exists()
    assert "there is no file or folder 'no-such-model.gguf'" in done.stdout
    assert "Paris" in done.stdout
    assert "ms to the first token" in done.stdout
    assert "products settled" in done.stdout


def test_the_page_shows_every_name_of_the_api() -> None:
    shown = "\n".join([*blocks(), PAGE.read_text()])
    calls = {name for name in phasewise.__all__ if callable(getattr(phasewise, name)) and name.islower()}
    assert calls == {"open_model", "open_store", "read_machine", "tune_config", "tune_kernels"}
    assert all(f"{name}(" in shown for name in calls)


def test_the_exceptions_that_the_page_names_can_be_caught_by_these_names() -> None:
    named = set(re.findall(r"`(\w+(?:Error|Exceeded))`", PAGE.read_text()))
    assert {"ModelError", "ContextLengthExceeded", "PlanError", "KernelDbError"} <= named
    assert all(isinstance(getattr(phasewise, name).exit_code, int) for name in named)
    assert {name for name in phasewise.__all__ if name.endswith(("Error", "Exceeded"))} == named


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model's file, with no variable of the user's and no configuration."""
    for name in list(os.environ):
        if name.startswith("PHASEWISE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PHASEWISE_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "config.toml").touch()
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


def test_a_model_is_opened_as_the_variables_and_the_configuration_file_say(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument, then the variable, then the file, then the default."""
    assert phasewise.open_model(tiny).weight_format == "native"
    (tmp_path / "config.toml").write_text('[generate]\nformat = "int8"\nthreads = 1\nkv_format = "f32"\n')
    opened = phasewise.open_model(tiny)
    assert opened.weight_format == "int8"
    assert {len(plan.cores) for plan in opened.plans.values()} == {1}
    monkeypatch.setenv("PHASEWISE_FORMAT", "bf16")
    monkeypatch.setenv("PHASEWISE_ARITHMETIC", "blocks")
    opened = phasewise.open_model(tiny)
    assert opened.weight_format == "bf16"
    assert {table.asked_choice for table in opened._opened.schedules.values()} == {"blocks"}
    assert phasewise.open_model(tiny, weight_format="f32").weight_format == "f32"


def test_an_answer_is_computed_as_they_say(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats, drafters = [], []

    def opening(*arguments: object, drafts: object = None) -> OpenEngine:
        formats.append(arguments[2].kv.format)  # type: ignore[attr-defined]
        drafters.append(drafts)
        return open_engine(*arguments, drafts=drafts)  # type: ignore[arg-type]

    monkeypatch.setattr("phasewise.serving.engine.open_engine.open_engine", opening)
    model = phasewise.open_model(tiny, threads=1)
    want = model.generate("a", 3).token_ids
    (tmp_path / "config.toml").write_text('[generate]\nkv_format = "f32"\n')
    monkeypatch.setenv("PHASEWISE_DRAFT", "off")
    assert model.generate("a", 3).token_ids == want
    assert formats == ["auto", "f32"]
    assert [drafter is None for drafter in drafters] == [False, True]


def test_the_database_is_the_variable_s(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEWISE_DB", str(tmp_path / "mine.db"))
    with phasewise.open_store() as store:
        assert store.stats().rows
    assert (tmp_path / "mine.db").exists()
    (tmp_path / "config.toml").write_text(f'[db.show]\ndb = "{tmp_path / "file.db"}"\n')
    monkeypatch.delenv("PHASEWISE_DB")
    with phasewise.open_store():
        assert (tmp_path / "file.db").exists()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("THREADS", "none"), ("THREADS", "0"), ("SPARSE", "often"), ("CONFIG", "/no")]
)
def test_a_variable_that_cannot_be_is_named(
    tiny: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PHASEWISE_{name}", value)
    with pytest.raises(WorkflowError, match=f"PHASEWISE_{name}"):
        phasewise.open_model(tiny)


def test_importing_phasewise_loads_nothing_heavy() -> None:
    heavy = ("typer", "rich", "numpy", "sqlalchemy", "optuna", "phasewise.cython_kernels")
    done = python(f"import sys, phasewise; print([one for one in {heavy} if one in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_opening_a_model_imports_no_command_line(tmp_path: Path) -> None:
    """From packing a GGUF file to its plans and schedules."""
    script = (
        "import sys, phasewise; from pathlib import Path\n"
        "from tests.support.models.tiny_models import write_tiny_gguf\n"
        f"write_tiny_gguf(Path({str(tmp_path / 'tiny.gguf')!r}))\n"
        f"model = phasewise.open_model({str(tmp_path / 'tiny.gguf')!r})\n"
        "assert len(model.generate('a', 2).token_ids) == 2\n"
        "print([one for one in ('typer', 'rich', 'phasewise.cli') if one in sys.modules])"
    )
    done = python(script, XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.stdout.strip() == "[]", done.stderr
