"""Files from strangers, given to every command that opens one: one clear line, exit code 1 or 2, soon."""

from __future__ import annotations

import fcntl
import json
import lzma
import os
import resource
import struct
import termios
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phasewise._files
from phasewise.cli.present import on_one_line
from phasewise.cluster.simulated.spec_file import read_cluster
from phasewise.ir.raising.preprocess import read_source
from phasewise.serving.errors import ServingError
from phasewise.topology import read_lstopo, read_machine
from phasewise.tuner.config import trace_files
from phasewise.tuner.config.sharing import read_hidden
from phasewise.tuner.config.trace_files import read_trace
from phasewise.tuner.errors import TraceError, TunerError
from phasewise.tuner.predictor import log
from phasewise.tuner.predictor.files import load_predictor
from phasewise.workflows.capacity.simulate import arrivals_of
from phasewise.workflows.embed.run import lines_of
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.evaluate.run import read_text as _calibration
from phasewise.workflows.generate.answer_settings import prompt_from
from phasewise.workflows.report import silent
from phasewise.workflows.serve.address import http_limits, tls_of
from phasewise.workflows.serve.settings import Accepting, Listening
from phasewise.workflows.topo.plan_json import read_plans
from phasewise.workflows.user_kernels.files import read_text
from tests.cli import command
from tests.ir.samples import NAMES, text_of
from tests.support.models.tiny_models import TinyShape, hf_config
from tests.support.tiers import examples, first_is_smoke

MOST_CHARS = 1000
MOST_GROWN_BYTES = 1 << 30

HEADER = b"arrival_timestamp,prompt_size,token_size\n"
MODELLED = ("tune-config", "MODEL", "--budget", "1s", "--evaluator", "modelled")
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("predict-len", "train", "FILE", "-o", "OUT"),
    "eval": ("predict-len", "eval", "FILE"),
    "eval --predictor": ("predict-len", "eval", "LOG", "--predictor", "FILE"),
    "simulate TRACE": ("simulate", "FILE", "--pools", "mixed=1*h100"),
    "simulate --pools": ("simulate", "TRACE", "--pools", "FILE"),
    "simulate --machine-from-xml": (
        "simulate", "TRACE", "--pools", "CLUSTER", "--machine-from-xml", "FILE:none.json",
    ),
    "provision TRACE": ("provision", "FILE", "--rate", "1", "--slo", "table6"),
    "provision --machines": ("provision", "TRACE", "--rate", "1", "--machines", "FILE"),
    "tune-config --trace": (*MODELLED, "--trace", "FILE"),
    "tune-config --hidden": (*MODELLED, "--hidden", "FILE"),
    "tune-config --machine": (*MODELLED, "--machine", "FILE"),
    "topo --input": ("topo", "--input", "FILE"),
    "topo --plan-file": ("topo", "--plan-file", "FILE"),
    "kernels check": ("kernels", "check", "FILE", "--against", "C"),
    "kernels check --against": ("kernels", "check", "KERNEL", "--against", "FILE"),
    "kernels raise": ("kernels", "raise", "FILE", "--function", "f"),
    "kernels lower": ("kernels", "lower", "FILE", "--isa", "avx2"),
    "tune-kernels --kernel": ("tune-kernels", "--kernel", "FILE", "--shapes", "n=8"),
}  # fmt: skip
PEM = Path("tests/data/tls/cert.pem").absolute()
OPENED_BY_SERVE: dict[str, Callable[[Path], object]] = {
    "--api-key-file": lambda file: _keys_of(file),
    "--tls-cert": lambda file: tls_of(Listening(tls_cert=file), silent),
    "--tls-key": lambda file: tls_of(Listening(tls_cert=PEM, tls_key=file), silent),
    "--predictor": load_predictor,
}
"""Files that `serve` opens beside its model, each by the function that it calls."""
READERS: tuple[Callable[[Path], object], ...] = (
    read_trace,
    log.read_log,
    read_lstopo,
    read_cluster,
    read_source,
    read_text,
    lambda file: read_hidden(file, read_machine()),
    lambda file: arrivals_of(str(file)),
    lambda file: read_plans(file, read_machine()),
)


def _keys_of(file: Path) -> tuple[str, ...]:
    return http_limits(Listening(), Accepting(api_key_file=file), silent).api_keys


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
TIMES = "times_ms = [[1, 9], [2, 10]]\n"
SAYS_NOTHING = ("/dev/null", "nothing")
KEYS = (
    "NaN", "a NaN as a length", "a negative number", "numbers out of range", "another kind", "paths",
)  # fmt: skip
RIGHT = {("provision --machines", kind) for kind in SAYS_NOTHING} | {
    ("--api-key-file", kind) for kind in KEYS
}
"""A TOML file of no further machine types, and texts that a request can carry as its key."""


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phasewise._files, "FIRST_BYTE_S", 0.05)
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PHASEWISE_DB", str(tmp_path / "none.db"))
    monkeypatch.setenv("PHASEWISE_CONFIG", "/dev/null")


def given_files(tmp_path: Path) -> dict[str, str]:
    texts = {
        "LOG": '{"output_tokens": 3, "prompt_token_ids": [1, 2], "model": "m"}\n' * 4,
        "TRACE": HEADER.decode() + "0.0,8,8\n",
        "EMBEDS": "[machine]\ncost=1\n"
        + "".join(f"[{device}]\n{TIMES}" for device in ("accelerator", "cpu")),
        "CLUSTER": '[[pool]]\nrole="mixed"\nmachine="h100"\ncount=1\n',
        "C": "int f(int a) { return a; }\n",
        "KERNEL": text_of(NAMES[0]),
    }
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(
        json.dumps(hf_config("llama", TinyShape(16, 2048, 5632, 32, 8, 64, 32000, 2048, tied=False)))
    )
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in [*texts, "OUT"]} | {"MODEL": str(shape)}


def _run(arguments: list[str]) -> tuple[int, str]:
    done = command.run(*arguments)
    return done.exit_code, done.stderr


def _is_refused(run: Callable[[], tuple[int, str]], file: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, line = run()
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    shown = on_one_line(line.strip())

    assert code in (1, 2), shown
    assert file.name in shown
    assert len(shown) < MOST_CHARS
    assert grown_bytes < MOST_GROWN_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    first_is_smoke((name, kind) for kind in FILES for name in COMMANDS if (name, kind) not in RIGHT),
)
def test_a_file_from_a_stranger_is_refused_in_one_line(name: str, kind: str, tmp_path: Path) -> None:
    file, names = FILES[kind](tmp_path / "hostile"), given_files(tmp_path)
    arguments = [names.get(word, word.replace("FILE", str(file))) for word in COMMANDS[name]]

    _is_refused(lambda: _run(arguments), file)
    assert not (tmp_path / "OUT").exists()


@pytest.mark.parametrize(
    ("option", "kind"),
    [(option, kind) for kind in FILES for option in OPENED_BY_SERVE if (option, kind) not in RIGHT],
)
def test_what_serve_opens_is_refused_in_one_line(option: str, kind: str, tmp_path: Path) -> None:
    file = FILES[kind](tmp_path / "hostile")

    def run() -> tuple[int, str]:
        try:
            OPENED_BY_SERVE[option](file)
        except (ServingError, TunerError, WorkflowError) as error:
            return error.exit_code, str(error)
        return 0, "nothing was said"

    _is_refused(run, file)


@given(
    content=st.binary(max_size=60)
    | st.text(st.sampled_from('{}[]",:0123456789.-eEnaNIfity\n\x00\x1b\ud7ff'), max_size=80).map(str.encode)
)
@examples(200)
def test_a_drawn_file_is_read_or_refused_in_one_line(content: bytes, tmp_path_factory: Any) -> None:
    """Each reader by itself: what it raises carries an exit code and is a line."""
    file = tmp_path_factory.getbasetemp() / "drawn.jsonl"
    file.write_bytes(content)
    for read in (*OPENED_BY_SERVE.values(), *READERS):
        refusal = _raised(read, file)
        assert refusal is None or getattr(refusal, "exit_code", None) in (1, 2), (content, repr(refusal))
        assert len(on_one_line(str(refusal))) < MOST_CHARS


def _prompt_in(path: Path) -> str:
    return prompt_from(None, None, path, None)


def test_no_reader_waits_for_a_pipe_without_a_writer(tmp_path: Path) -> None:
    pipe = _fifo(tmp_path / "pipe.jsonl")
    for read in (*OPENED_BY_SERVE.values(), *READERS, lines_of, _calibration, _prompt_in):
        assert getattr(_raised(read, pipe), "exit_code", None) == 1


def _raised(read: Callable[[Path], object], file: Path) -> Exception | None:
    try:
        read(file)
    except Exception as error:
        return error
    return None


def test_a_list_of_conversations_is_read_entry_by_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests, whatever is read at a time; an entry longer than its bound is refused."""
    entries = [{"prompt_tokens": n, "output_tokens": 1, "note": "],[" * (n % 7)} for n in range(1, 200)]
    file = tmp_path / "list.json"
    file.write_text(json.dumps(entries, indent=1) + "\n")
    whole = read_trace(file)

    assert [request.prompt_tokens for request in whole] == list(range(1, 200))
    monkeypatch.setattr(trace_files, "MAX_ROW_CHARS", 120)
    for n in (1, 2, 3, 7, 64):
        monkeypatch.setattr(trace_files, "READ_CHARS", n)
        assert read_trace(file) == whole
    for text in ("[", "[,]", "[1,]", "[[1,1]", "[[1,1],]", "[[1,1]]]", "[[1,1]] [", '["' + "a" * 10_000):
        file.write_text(text)
        with pytest.raises(TraceError):
            read_trace(file)


def test_a_log_ends_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However well a stranger packed it."""
    monkeypatch.setattr(log, "MAX_CHARS", 1000)
    (tmp_path / "log.xz").write_bytes(lzma.compress(b'{"output_tokens":1,"prompt_token_ids":[1]}\n' * 1000))

    with pytest.raises(TunerError, match="more than 1000 characters"):
        log.read_log(tmp_path / "log.xz")


def test_a_pipe_with_a_writer_is_read(tmp_path: Path) -> None:
    pipe = _fifo(tmp_path / "pipe")
    end = os.open(pipe, os.O_RDWR)  # so that both ends open without waiting
    os.write(end, HEADER + b"0.0,8,8\n")
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(read_trace, pipe)
        while _n_waiting(end):  # until the reader has it
            time.sleep(0.001)
        os.close(end)

    assert len(reading.result()) == 1


def _n_waiting(pipe: int) -> int:
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]
