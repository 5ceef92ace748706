"""phasewise beside other engines on the same models, in turn, in one run: `make compare`, or

    python benchmarks/compare.py MODEL.gguf --peer llama_cpp --peer openvino --peer vllm=FOLDER@PYTHON
    python benchmarks/compare.py FILE.gguf FILE.gguf --peer "ik_llama_cpp@DIR/llama-bench -fa 1 -rtr 1"
    python benchmarks/compare.py all-minilm-l6-v2 --tests "embed 75 x64" --format int8,bf16 \\
        --peer onnxruntime=FILE.onnx@PYTHON --peer openvino_encoder=FILE.xml@PYTHON --peer llama_server=F@BIN

Engines stay loaded in processes of their own and sleep while another is timed. Every round times each of them
once, so a drift of the machine meets all; ratios are taken round by round. A test is `prefill N`, `decode N`
or `embed N` (a text of N tokens), with ` xS` for S sequences. A peer is `NAME[=FILE][@PROGRAM]`: what it
loads (MODEL, if nothing is said) and an interpreter that has it (PHASEWISE_PEERS_PYTHON). llama.cpp and
ik_llama.cpp are also taken as a built llama-bench, with its options; several sequences need the
llama-batched-bench beside it. A peer that is not there, or does not open MODEL, is left out with its reason.
Other forms of MODEL: peers/make_files.py. `--before CHECKOUT` sets another commit of phasewise beside this
one. `--format bf16:never,bf16:always,bf16:auto` compares ways of `--sparse`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from typer import Argument, Option

from benchmarks.harness import Rounds, Spread, Threads, Yielded, commands, in_turns, listed, ratios

PEERS = Path(__file__).resolve().parent / "peers"
NAMES = (
    *("llama_cpp", "ik_llama_cpp", "openvino", "vllm", "torch"),
    *("onnxruntime", "openvino_encoder", "llama_server"),
)
PROGRAMS = ("llama_cpp", "ik_llama_cpp")
"""Peers whose program may be a llama-bench at a path."""
PAUSE_S = 0.3  # lets the other engine's threads fall asleep
PROBE_S = 20.0
PEER = re.compile(r"(?P<name>\w+)(?:=(?P<file>[^@]+))?(?:@(?P<program>.+))?")
TEST = re.compile(r"(?P<phase>prefill|decode|embed) (?P<n>[1-9]\d*)(?: x(?P<sequences>[1-9]\d*))?")
TESTS = "prefill 128,prefill 512,decode 128,decode 128 x8"


class LeftOut(SystemExit):
    """A peer cannot be timed; the message says why."""


@dataclass(frozen=True)
class Test:
    """`sequences` at once, each prefills or decodes `n` tokens, or is a text of as many."""

    phase: str
    n: int
    sequences: int = 1

    @classmethod
    def parse(cls, text: str) -> Test:
        match = TEST.fullmatch(text.strip())
        if match is None:
            raise SystemExit(
                f"{text!r} is no test: `prefill N`, `decode N` or `embed N`, with ` xS` or without"
            )
        return cls(match["phase"], int(match["n"]), int(match["sequences"] or 1))

    @property
    def name(self) -> str:
        several = f" x{self.sequences}" if self.sequences > 1 else ""
        return f"{self.phase} {self.n}{several}"

    def rate(self, ns: float) -> float:
        """Tokens a second; of `embed`, texts."""
        return (1 if self.phase == "embed" else self.n) * self.sequences * 1e9 / ns


class Engine(Protocol):
    """Something that is timed. `rate`: tokens or texts a second of a test. `check`: LeftOut if none."""

    def check(self, test: Test) -> None: ...
    def rate(self, test: Test) -> float: ...
    def close(self) -> None: ...


class Worker:
    """An engine in a process of its own, asked for one timing at a time."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        """environment: set beside what this process has."""
        self._program = command[0]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=self._said,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise LeftOut(f"{command[0]} does not start: {error.strerror}") from None
        self._answer()

    def _answer(self) -> dict[str, int]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self._said.seek(0)
            raise LeftOut(
                f"{self.process.args[0]} ended with exit code {code}: {_last_line(self._said.read())}"
            )
        answer: dict[str, int] = json.loads(line)
        return answer

    def check(self, test: Test) -> None:
        pass

    def rate(self, test: Test) -> float:
        assert self.process.stdin is not None
        request = {"phase": test.phase, "n": test.n, "sequences": test.sequences}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return test.rate(self._answer()["ns"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self._said.close()


class LlamaBench:
    """llama-bench, started anew for each timing; it loads and warms up outside what it times."""

    def __init__(self, command: list[str], model: str, threads: int) -> None:
        self._program, *self._options = command
        self._common = ["-m", model, "-t", str(threads)]
        _check_program(self._program, "-o, --output")

    def rate(self, test: Test) -> float:
        if test.sequences > 1:
            return self._of_several(test)
        n_prompt, n_gen = (test.n, 0) if test.phase == "prefill" else (0, test.n)
        sizes = ["-p", str(n_prompt), "-n", str(n_gen), "-r", "1", "-o", "json"]
        said = _output([self._program, *self._common, *sizes, *self._options])
        for row in _json(self._program, said):
            if (row.get("n_prompt"), row.get("n_gen")) == (n_prompt, n_gen):
                return float(row["avg_ts"])
        raise SystemExit(f"{self._program} -o json printed no row of {test.name}: update it")

    def check(self, test: Test) -> None:
        if test.phase == "embed" or (test.sequences > 1 and test.phase == "prefill"):
            raise LeftOut(f"{self._program} does not time `{test.name}`: name other tests with --tests")
        if test.sequences > 1:
            _check_program(self._batched, "-npl")

    @property
    def _batched(self) -> str:
        return str(Path(self._program).with_name("llama-batched-bench"))

    def _of_several(self, test: Test) -> float:
        context = test.sequences * (test.n + 16)
        sizes = ["-npp", "16", "-ntg", str(test.n), "-npl", str(test.sequences), "-c", str(context)]
        said = _output([self._batched, *self._common, *sizes, "--output-format", "jsonl"])
        return float(_json(self._batched, f"[{said.strip().splitlines()[-1]}]")[-1]["speed_tg"])

    def close(self) -> None:
        pass


def _check_program(path: str, option: str) -> None:
    """LeftOut in one line unless its help names an option that only such a program has."""
    name = Path(path).name if Path(path).name.startswith("llama-") else "llama-bench"
    try:
        done = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=PROBE_S, check=False)
        is_one = option in done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        is_one = False
    if not is_one:
        raise LeftOut(f"{path} is no {name}: give the path of that program, as its build makes it")


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with exit code {done.returncode}: {_last_line(done.stderr)}")
    return done.stdout


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["it said nothing"])[-1][-300:]


def _json(program: str, said: str) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(said)
    except ValueError:
        raise SystemExit(f"{program} printed what is no JSON: {said[:100]!r}") from None
    return rows


def peer_of(text: str, model: str, threads: int) -> tuple[str, Engine]:
    """(label, engine) of `NAME[=FILE][@PROGRAM]`; SystemExit says what is missing."""
    match = PEER.fullmatch(text)
    if match is None or match["name"] not in NAMES:
        raise SystemExit(f"{text!r} is not NAME[=FILE][@PROGRAM] with a name of {', '.join(NAMES)}")
    command = shlex.split(match["program"] or os.environ.get("PHASEWISE_PEERS_PYTHON", ""))
    if not command:
        raise SystemExit(f"name an interpreter that has {match['name']}: @PYTHON or PHASEWISE_PEERS_PYTHON")
    file = match["file"] or model
    label = match["name"] if match["file"] is None else f"{match['name']} {Path(file).name}"
    if match["name"] in PROGRAMS and not Path(command[0]).name.startswith("python"):
        return label, LlamaBench(command, file, threads)
    if match["name"] == "llama_server":
        return label, Worker([sys.executable, str(PEERS / "llama_server.py"), *command, file, str(threads)])
    return label, Worker([*command, str(PEERS / f"{match['name']}_worker.py"), file, str(threads)])


def ours(checkout: Path | None, model: str, threads: int, weight_format: str) -> Engine:
    """The worker of this checkout, or of another by its own interpreter; SystemExit says what is missing."""
    tail = [model, str(threads), weight_format]
    if checkout is None:
        return Worker([sys.executable, str(PEERS / "phasewise_worker.py"), *tail])
    python, worker = checkout / ".venv/bin/python", checkout / "benchmarks/peers/phasewise_worker.py"
    for needed in (python, worker):
        if not needed.exists():
            raise SystemExit(f"{needed} is not there: --before names a checkout after `make build`")
    return Worker([str(python.absolute()), str(worker), *tail])


def compare(
    models: Annotated[list[str], Argument(help="GGUF files, or what `phasewise` knows")],
    peer: Annotated[
        list[str] | None, Option(metavar="NAME[=FILE][@PROGRAM]", help="llama_cpp if not given")
    ] = None,
    before: Annotated[
        Path | None, Option(metavar="CHECKOUT", help="another commit, built there, as a peer")
    ] = None,
    threads: Threads = 2,
    rounds: Rounds = 9,
    tests: Annotated[str, Option(help="with commas between them")] = TESTS,
    formats: Annotated[
        str, Option("--format", help="of our weights; the first is held against all")
    ] = "native",
) -> Yielded:
    asked = [Test.parse(text) for text in listed(tests)]
    for model in models:
        peers: dict[str, Engine] = {}
        for text in peer or ([] if before or "," in formats else ["llama_cpp"]):
            try:
                label, engine = peer_of(text, model, threads)
                peers[label] = engine
            except LeftOut as reason:
                yield f"{text} is left out: {reason}"
        engines = {
            _label(weight_format): ours(None, model, threads, weight_format)
            for weight_format in listed(formats)
        }
        if before is not None:
            engines["before"] = ours(before, model, threads, listed(formats)[0])
        engines |= peers
        try:
            for test in asked:
                able = dict(engines)
                for name, engine in engines.items():
                    try:
                        engine.check(test)
                    except LeftOut as reason:
                        del able[name]
                        yield f"{name} is left out of `{test.name}`: {reason}"
                yield from compared(Path(model).name, test, able, rounds)
        finally:
            for engine in engines.values():
                engine.close()


def _label(weight_format: str) -> str:
    return "phasewise" if weight_format == "native" else f"phasewise {weight_format}"


def compared(model: str, test: Test, engines: Mapping[str, Engine], rounds: int) -> Yielded:
    """A row for each peer: rates of the rounds after a warm-up, and ours over its own."""

    def turn(engine: Engine) -> float:
        time.sleep(PAUSE_S)
        return engine.rate(test)

    rates = in_turns({name: lambda engine=engine: turn(engine) for name, engine in engines.items()}, rounds)  # type: ignore[misc]
    first, *peers = rates
    for name in peers or [first]:
        yield {
            "model": model,
            "test": test.name,
            "unit": "texts/s" if test.phase == "embed" else "tokens/s",
            "peer": name,
            first: Spread.of(rates[first]),
            "peer's": Spread.of(rates[name]),
            "ratio": ratios(rates[first], rates[name]),
        }


app = commands(__doc__, compare)

if __name__ == "__main__":
    app()
