"""Every command keeps its promises: help, exit codes, the sources of its options, a page that is true."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phasewise import __version__
from tests.cli import command
from tests.support.scripts import script

ROOT = Path(__file__).resolve().parents[2]


def phasewise(*arguments: object, **environment: str) -> command.Done:
    return command.run_process(*arguments, env=environment)


def _reference_pages() -> object:
    return script("docs/make_reference.py")


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_the_package_version(flag: str) -> None:
    assert phasewise(flag).stdout == f"phasewise {__version__}\n"


@pytest.mark.parametrize("arguments", [["no-such-command"], ["topo", "--no-such-option"], ["bench", "run"]])
def test_wrong_usage_ends_with_2_and_says_so_on_stderr(arguments: list[str]) -> None:
    assert "Usage:" in phasewise(*arguments).usage_error


def test_an_expected_failure_is_one_line_and_1(tmp_path: Path) -> None:
    assert phasewise("models", "inspect", tmp_path / "absent.gguf").refusal


def test_options_come_from_flag_then_environment_then_file_then_default(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[db.path]\ndb = "{tmp_path}/file.db"\n')
    from_file = {"PHASEWISE_CONFIG": str(config)}
    from_environment = {**from_file, "PHASEWISE_DB": f"{tmp_path}/environment.db"}

    assert "file.db" in phasewise("db", "path", **from_file).stdout
    assert "environment.db" in phasewise("db", "path", **from_environment).stdout
    assert "flag.db" in phasewise("db", "path", "--db", f"{tmp_path}/flag.db", **from_environment).stdout


def test_a_broken_configuration_file_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[serve\n")

    assert str(config) in phasewise("topo", PHASEWISE_CONFIG=str(config)).refusal


def test_help_asks_for_no_heavy_library() -> None:
    """`--help` must be instant: numpy and the web stack wait until a command needs them."""
    heavy = ("numpy", "sqlalchemy", "starlette", "tokenizers", "pydantic")
    probe = f"import sys, phasewise.cli.main; print([name for name in {heavy!r} if name in sys.modules])"

    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_a_command_does_not_import_all_others() -> None:
    """A start pays for what it runs."""
    probe = (
        "import sys; sys.argv[1:] = ['db', 'path']; from phasewise.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: print(*{name.split('.')[3] for name in sys.modules if '.commands.' in name})"
    )

    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    imported = result.stdout.splitlines()[-1].split()
    assert "db" in imported
    assert not {"bench", "chat", "generate", "serve"} & {*imported}


def _headings(text: str) -> dict[str, list[str]]:
    """The first word of each entry, by heading, of a help text."""
    parts = re.split(r"^([^\s].*):$", text, flags=re.M)
    return {
        heading: re.findall(r"^  (\S+)", body, flags=re.M)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_help_lists_every_command_once_the_first_hour_first() -> None:
    headings = _headings(phasewise("--help").stdout)
    listed = [
        name
        for heading, names in headings.items()
        if heading not in ("Examples", "Options")
        for name in names
    ]
    registered = {name for name, subcommand in command.tree().commands.items() if not subcommand.hidden}

    assert list(headings)[:2] == ["Examples", "Options"]
    assert list(headings)[2] == "The first hour"
    assert headings["The first hour"][:4] == ["pull", "chat", "serve", "embed"]
    assert len(listed) == len(set(listed))
    assert set(listed) == registered


def test_help_of_serve_begins_with_ten_options() -> None:
    headings = _headings(phasewise("serve", "--help").stdout)

    assert list(headings)[:3] == ["Examples", "Arguments", "Most used"]
    assert len(headings["Most used"]) == 10


def test_what_compares_policies_is_in_the_reference_and_in_no_help() -> None:
    shown = phasewise("serve", "--help").stdout
    reference = _reference_pages().PAGE.read_text(encoding="utf-8")  # type: ignore[attr-defined]

    for line in ("kv_policy", "no_prefix_reuse"):
        assert f"--{line.replace('_', '-')}" not in shown + reference
        assert f"| `{line}` |" in reference


@pytest.mark.parametrize("policy", ["static", "fixed"])
def test_a_policy_that_is_there_to_be_compared_serves_nobody(policy: str) -> None:
    done = phasewise("serve", "model.gguf", PHASEWISE_KV_POLICY=policy)

    assert done.exit_code == 2
    words = " ".join(done.output.replace("│", " ").split())
    assert f"'{policy}' is not one of 'odma', 'paged'" in words


def test_pull_is_models_pull() -> None:
    help_texts = {
        phasewise(*command, "--help").stdout.partition("\n")[2] for command in (["pull"], ["models", "pull"])
    }

    assert len(help_texts) == 1


def test_every_command_is_documented_as_it_is() -> None:
    """`make docs` writes the page; a command or an option that changed without it fails here."""
    module = _reference_pages()

    for page, text in ((module.PAGE, module.render()), (module.TOGETHER, module.together())):  # type: ignore[attr-defined]
        assert page.read_text(encoding="utf-8") == text, "stale page: run `make docs`"


def test_ctrl_c_is_one_line_and_130() -> None:
    """`bench machine` runs for seconds: time enough to be interrupted."""
    process = command.start("bench", "machine")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("measuring")

    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)

    assert process.returncode == 130
    assert rest == "phasewise: interrupted\n"


@pytest.mark.parametrize("words", [["topo"], ["topo", "--json"], ["--help"]])
def test_a_reader_that_left_is_told_by_the_exit_code(words: list[str]) -> None:
    """As of other programs in a pipe; and without a line."""
    there, here = os.pipe()
    os.close(there)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "phasewise", *words], stdout=here, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(here)

    assert (result.returncode, result.stderr) == (141, "")


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    line = f"{sys.executable} -m phasewise topo --json | head -c 1"

    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)

    assert "Traceback" not in result.stderr
