"""The README and every page of docs/guide work as written: `console` blocks run, in order, in one shell.

README and the first hour run in an environment that is installed by the README's own lines, without extras;
the other pages run the checkout. Three things differ from a reader's terminal: directories of its own for
cache, data and configuration; a
free port in place of 8000; and a configuration file that cuts the tuning budgets to seconds. An HTML comment
before a block may say `<!-- not run: REASON -->`, `<!-- test: COMMAND -->` for what a reader would have at
hand (a file from elsewhere), or `<!-- file: NAME -->` for a block that a reader saves under that name. Where
text after a block begins with "It shows", its code spans are words that the output of that section contains.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from tests.cli.command import parsed
from tests.support import ROOT
from tests.support.servers.ports import reserved_port

GUIDE = ROOT / "docs" / "guide"
FIXTURES = ROOT / "tests" / "data"
MODEL = Path("models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
EMBEDDING_MODEL = "all-minilm-l6-v2"
CONFIG = '[tune-kernels]\nbudget = "2s"\n[tune-config]\nbudget = "12s"\n'
PAGE_TIMEOUT_S = 400
TIMED_OUT = 124
MARK = "-- the end of a section --"
INSTALLS = re.compile(r"^\$ ((?:python3 -m venv|.*pip install \.).*?)(?: {2,}#.*)?$", re.M)
FIRST_PAGES = ("README.md", "first-hour.md")
NOT_COPIED = (".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "_native.c")
WITHOUT_INDEX = re.compile(
    "No matching distribution found|Temporary failure in name resolution|ConnectionError"
)
NEEDS_EXTRA = {
    "kernels": r"phasewise kernels raise|--against \S+\.c\b",
    "quantise": r"phasewise quantise",
    "postgres": r"postgresql",
    "ray": r"--cluster|ray start|phasewise cluster",
    "cuda": r"--embed-accelerators",
    "vllm": r"PHASEWISE_VLLM=",
}
"""By extra: what needs it, in a block of a page."""

BLOCK = re.compile(
    r"(?:<!-- (?P<directive>not run|test|file): (?P<value>.*?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)```",
    re.S,
)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]


def commands(page: str) -> Iterator[str]:
    """The shell lines of a page, in order; a command that goes on after a backslash is one item."""
    for block in BLOCK.finditer(page):
        if block["directive"] == "file":
            yield f"cat > {block['value']} <<'END OF FILE'\n{block['body']}END OF FILE"
        if block["language"] != "console" or block["directive"] == "not run":
            continue
        if block["directive"] == "test":
            yield block["value"]
        for command in re.split(r"^\$ ", block["body"], flags=re.M)[1:]:
            yield command.rstrip("\n")


def sections(page: str) -> list[tuple[str, list[str]]]:
    """The text of each section, and the words that its output contains."""
    shown = []
    for text in re.split(r"^(?=## )", page, flags=re.M):
        said = re.search(r"```\nIt shows (.*?)(?:\n\n|\Z)", text, flags=re.S)
        shown.append(
            (text, re.findall(r"`([^`]+)`", re.split(r"[.:;](?:\s|\Z)", said[1])[0]) if said else [])
        )
    return shown


def test_the_first_tasks_are_twenty_and_each_says_what_it_shows() -> None:
    tasks = sections((GUIDE / "twenty-tasks.md").read_text())[1:]

    numbers = [text.split(".")[0] for text, _ in tasks]
    assert numbers == [f"## {number}" for number in range(1, 21)]
    assert all(list(commands(text)) and words for text, words in tasks)


def test_every_line_of_a_console_block_belongs_to_a_command() -> None:
    """A line without the prompt that continues no command would silently not be run."""
    for path in pages():
        for block in BLOCK.finditer(path.read_text()):
            if block["language"] == "console":
                for line, previous in zip(
                    block["body"].splitlines(), ["", *block["body"].splitlines()], strict=False
                ):
                    assert line.startswith("$ ") or previous.endswith("\\"), f"{path.name}: {line}"


def test_every_link_of_a_page_leads_to_a_file() -> None:
    for path in pages():
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("extra", NEEDS_EXTRA)
def test_a_page_names_an_extra_before_what_needs_it(extra: str) -> None:
    named = 0
    for path in pages():
        text = path.read_text()
        for block in re.finditer(r"```console\n.*?```", text, re.S):
            if needing := re.search(NEEDS_EXTRA[extra], block[0]):
                before = text[: block.start() + needing.start()]
                assert f"phasewise[{extra}]" in before, f"{path.name}: {block[0]}"
                named += 1
    assert named or extra == "cuda"
    first = [path for path in pages() if path.name in FIRST_PAGES]
    assert len(first) == len(FIRST_PAGES)
    assert not any(re.search(NEEDS_EXTRA[extra], path.read_text()) for path in first)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_a_command_that_is_not_run_has_options_that_are_there(path: Path) -> None:
    """None of them is refused. It is parsed, with the names that stand for a reader's own files."""
    for block in BLOCK.finditer(path.read_text()):
        if block["directive"] == "not run" and block["language"] == "console":
            for line in re.split(r"^\$ ", block["body"], flags=re.M)[1:]:
                line = re.sub(r"\[MODEL\]|MODEL\.gguf", "MODEL", line.strip().partition("    #")[0])
                if re.match(r"(?:\S+=\S+ |~/\S+/)?phasewise ", line):
                    parsed(line.removeprefix("~/phasewise/bin/"))


@pytest.mark.slow
@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_a_page_works_as_written(
    path: Path, tmp_path: Path, guide_cache: Path, request: pytest.FixtureRequest
) -> None:
    parts = sections(path.read_text())
    script = "\n".join(
        "\n".join([*commands(text), f"{{ echo; echo {MARK}; }} 2> /dev/null"]) for text, _ in parts
    )
    if not any(list(commands(text)) for text, _ in parts):
        pytest.skip(f"{path.name} has no commands of its own")
    script = script.replace("8000", str(reserved_port()))
    first = path.name in FIRST_PAGES
    programs = request.getfixturevalue("installed") if first else Path(sys.executable).parent
    config = tmp_path / "config" / "phasewise" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PHASEWISE_")}
    environment |= {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(guide_cache),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "FIXTURES": str(FIXTURES),
    }

    code, said = _run(f"set -em -o pipefail\n{script}\n", tmp_path, environment)

    assert code == 0, said[-3000:]
    for (text, words), shown in zip(parts, re.split(f"^{MARK}$", said, flags=re.M), strict=False):
        output = re.sub(r"^\++ .*$", "", shown, flags=re.M)
        for word in words:
            assert word in output, f"{text.splitlines()[0]}: {word!r} is not in\n{output[-2000:]}"


def _run(script: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a bash script; nothing that it started outlives it."""
    output = folder / "output.txt"  # a file: a pipe stays open while a server in the background has it
    with output.open("wb") as written:
        process = subprocess.Popen(
            ["bash", "-xc", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=PAGE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        finally:
            _end_session(process.pid)
            process.wait()
    return code, output.read_text(errors="replace")


def _end_session(session: int) -> None:
    """Kill every process of a session: under `set -m` each background job is a group of its own."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of an environment that the README's lines make, in a copy of this tree."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT, home / "clone", symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    lines = INSTALLS.findall((ROOT / "README.md").read_text())
    assert [line.split()[0] for line in lines] == ["python3", "PHASEWISE_ISA_BUILD=native"]
    output = home / "output.txt"
    with output.open("wb") as written:
        code = subprocess.run(
            ["bash", "-exc", "\n".join(lines)],
            cwd=home / "clone",
            env={**os.environ, "HOME": str(home), "PIP_QUIET": "1"},
            stdout=written,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    said = output.read_text(errors="replace")
    if code and WITHOUT_INDEX.search(said):
        pytest.skip("no index of packages answers, which an installation needs")
    assert code == 0, said[-3000:]
    yield home / "phasewise" / "bin"
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def guide_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that holds the default model, fetched before, and what the pages pack of it."""
    fetched = Path(os.environ.get("PHASEWISE_CACHE") or platformdirs.user_cache_path("phasewise")) / MODEL
    if not fetched.is_file():
        pytest.skip("the default model is not here: phasewise models pull smollm2-135m-instruct")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    cache = tmp_path_factory.mktemp("cache")
    (cache / "phasewise" / MODEL).parent.mkdir(parents=True)
    shutil.copy(fetched, cache / "phasewise" / MODEL)
    embeds = fetched.parents[1] / EMBEDDING_MODEL
    if embeds.is_dir():  # else its page fetches it
        shutil.copytree(embeds, cache / "phasewise" / "models" / EMBEDDING_MODEL)
    return cache
