"""Files from strangers, given to every command that opens one: one clear line, exit code 1 or 2, soon."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import phasewise._files
from phasewise.cli.main import app
from phasewise.cli.present import on_one_line

MOST_CHARS = 1000
MOST_GROWN_BYTES = 1 << 30

XML = "tests/data/topology"
HEADER = b"arrival_timestamp,prompt_size,token_size\n"
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("predict-len", "train", "FILE", "-o", "OUT"),
    "eval": ("predict-len", "eval", "FILE"),
    "eval --predictor": ("predict-len", "eval", "LOG", "--predictor", "FILE"),
    "simulate TRACE": ("simulate", "FILE", "--pools", "mixed=1*h100"),
    "simulate --pools": ("simulate", "TRACE", "--pools", "FILE"),
    "simulate --perf-model": ("simulate", "TRACE", "--pools", "mixed=1*h100", "--perf-model", "FILE"),
    "simulate --machine-from-xml": (
        "simulate", "TRACE", "--pools", "CLUSTER", "--machine-from-xml", "FILE:none.json",
    ),
    "provision TRACE": ("provision", "FILE", "--rate", "1", "--slo", "table6"),
    "provision --machines": ("provision", "TRACE", "--rate", "1", "--machines", "FILE"),
    "tune-config --trace": ("tune-config", "MODEL", "--evaluator", "modelled", "--trace", "FILE"),
    "tune-config --hints": ("tune-config", "MODEL", "--evaluator", "modelled", "--hints", "FILE"),
    "tune-config --hidden": ("tune-config", "MODEL", "--evaluator", "modelled", "--hidden", "FILE"),
    "tune-config --machine": ("tune-config", "MODEL", "--evaluator", "modelled", "--machine", "FILE"),
    "topo --input": ("topo", "--input", "FILE"),
    "topo --plan-file": ("topo", "--plan-file", "FILE"),
    "kernels check": ("kernels", "check", "FILE", "--against", "C"),
    "kernels check --against": ("kernels", "check", "KERNEL", "--against", "FILE"),
    "kernels raise": ("kernels", "raise", "FILE", "--function", "f"),
    "kernels lower": ("kernels", "lower", "FILE", "--isa", "avx2"),
    "tune-kernels --kernel": ("tune-kernels", "--kernel", "FILE", "--shapes", "n=8"),
    "serve --api-key-file": ("serve", "MODEL", "--api-key-file", "FILE"),
    "serve --tls-cert": ("serve", "MODEL", "--tls-cert", "FILE"),
    "serve --tls-key": ("serve", "MODEL", "--tls-cert", "PEM", "--tls-key", "FILE"),
    "serve --predictor": ("serve", "MODEL", "--predictor", "FILE"),
}  # fmt: skip


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _sparse(path: Path, begin: bytes = b"") -> Path:
    path.write_bytes(begin)
    os.truncate(path, 900 << 20)
    return path


def _with(content: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(content)
        return path

    return write


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


FILES: dict[str, Callable[[Path], Path]] = {
    "a FIFO without a writer": _fifo,
    "/dev/zero": lambda _: Path("/dev/zero"),
    "/dev/null": lambda _: Path("/dev/null"),
    "a directory": _directory,
    "nothing there": lambda path: path / ".." / "none",
    "nothing": _with(b""),
    "a NUL": _with(b"\0"),
    "900 MiB of nothing": _sparse,
    "900 MiB of nothing in a list": lambda path: _sparse(path, b"["),
    "900 MiB of nothing in a row": lambda path: _sparse(path, HEADER),
    "depth of lists": _with(b"[" * 200_000),
    "depth of objects": _with(b'{"a":' * 200_000),
    "depth of tables": _with(b"a" + b".a" * 20_000 + b"=1"),
    "depth of elements": _with(b"<topology>" + b"<object>" * 200_000),
    "depth of brackets": _with(b"int f(int a){return " + b"(" * 200_000 + b"a"),
    "not UTF-8": _with(b"\xff\xfe\x80{"),
    "control characters": _with(b"\x1b]0;owned\x07\x1b[31m\n{\x00"),
    "NaN": _with(b"[NaN, Infinity, -Infinity]"),
    "a NaN as a length": _with(b'{"output_tokens": NaN, "prompt_token_ids": [1]}\n'),
    "a huge number": _with(b'{"input_length": ' + b"9" * 200_000 + b', "output_length": 1}\n'),
    "a negative number": _with(b'{"input_length": -1, "output_length": -1, "timestamp": -1e400}\n'),
    "numbers out of range": _with(HEADER + b"1e400,-5,99999999999\n"),
    "another kind": _with(json.dumps({"groups": [{"n": 1e308, "t": True, "d": -1}], "plans": 3}).encode()),
    "paths": _with(json.dumps([{"pus": ["../../etc/passwd"], "read_gbps": "1"}]).encode()),
}
# What says nothing is right for a few: an empty list of keys is refused, an empty C file is not a kernel.


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phasewise._files, "FIRST_BYTE_S", 0.05)
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PHASEWISE_DB", str(tmp_path / "none.db"))
    monkeypatch.setenv("PHASEWISE_CONFIG", "/dev/null")


def given_files(tmp_path: Path) -> dict[str, str]:
    texts = {
        "LOG": '{"output_tokens": 3, "prompt_token_ids": [1, 2]}\n' * 4,
        "TRACE": HEADER.decode() + "0.0,8,8\n",
        "CLUSTER": '[[pool]]\nrole="mixed"\nmachine="h100"\ncount=1\n',
        "C": "int f(int a) { return a; }\n",
        "KERNEL": Path("tests/ir/samples/rope.kir").read_text()
        if Path("tests/ir/samples/rope.kir").exists()
        else "",
        "MODEL": "{}",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    pem = Path("tests/data/tls")
    certificate = next(iter(sorted(pem.glob("*cert*"))), next(iter(sorted(pem.iterdir()))))
    return {name: str(tmp_path / name) for name in texts} | {
        "PEM": str(certificate.absolute()),
        "OUT": str(tmp_path / "OUT"),
    }


def is_refused(words: tuple[str, ...], file: Path, tmp_path: Path) -> str:
    """The line."""
    names = given_files(tmp_path)
    arguments = [names.get(one, one.replace("FILE", str(file))) for one in words]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = CliRunner().invoke(app, arguments)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    error = result.exception
    code = getattr(error, "exit_code", result.exit_code)
    line = str(error) if getattr(error, "exit_code", None) else result.stderr
    assert code in (1, 2), (arguments, error, result.output)
    assert isinstance(error, SystemExit) or getattr(error, "exit_code", None), repr(error)
    shown = on_one_line(line.strip())
    assert 0 < len(shown) < MOST_CHARS
    assert grown << 10 < MOST_GROWN_BYTES
    assert not (tmp_path / "OUT").exists()
    return shown


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_from_a_stranger_is_refused_in_one_line(command: str, kind: str, tmp_path: Path) -> None:
    is_refused(COMMANDS[command], FILES[kind](tmp_path / "hostile"), tmp_path)
