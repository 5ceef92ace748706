"""Every command as people and scripts meet it: in a terminal of 80 columns, with NO_COLOR, and in a pipe.

One walk: what a command leaves (a model's cache, a log, a database) the next ones find.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.command_options import commands
from tests.ir.samples import path_of
from tests.support.models.encoder_models import write_encoder
from tests.support.models.length_examples import made_up, write_log
from tests.support.models.stand_in_hub import serving
from tests.support.models.tiny_models import TinyShape, tiny_gguf, write_tiny_hf
from tests.support.servers.fake_embedding import FakeWorker, embedding_server
from tests.support.servers.fake_server import fake_server
from tests.support.terminal import Place, too_wide

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

TRACE = "lognormal:200,0.8/100,0.8"


@dataclass(frozen=True)
class Step:
    """A call of a command. `until`: it is interrupted once it says this. `exits`: exit codes it may have.
    `saves`: the file that its output goes to as well."""

    command: str
    arguments: str = ""
    until: str = ""
    exits: tuple[int, ...] = (0,)
    saves: str = ""


WALK = (
    Step("topo"),
    Step("doctor"),
    Step("help", "tuning"),
    Step("models pull", "org/tiny-GGUF:Q4_0"),
    Step("pull", "org/tiny-GGUF:Q4_0"),
    Step("replay", "no-such-receipt.json --model m.gguf", exits=(3,)),
    Step("batch", "no-such-requests.jsonl m.gguf -o answers.jsonl", exits=(0, 1)),
    Step("models list"),
    Step("models inspect", "m.gguf"),
    Step("models pack", "m.gguf -o m.packed"),
    Step("generate", "m.gguf hello -n 3"),
    Step("generate", "m.gguf hello -n 3 --explain"),
    Step("chat", "m.gguf -n 3"),
    Step("run", "m.gguf -n 3"),
    Step("serve", "m.gguf --port 0", until="listening on", exits=(0, 130)),
    Step("embed", "bert hello"),
    Step("tune-kernels", "m.gguf --budget 1s"),
    Step("tune-config", "m.gguf --budget 2s"),
    Step("tune-embed", "bert --slo 1s", exits=(0, 1)),
    Step("db path"),
    Step("db upgrade"),
    Step("db upgrade", "--db other.db"),
    Step("db set-plan", "m.gguf --phase decode --cores CORE"),
    Step("db show"),
    Step("db stats"),
    Step("db export", saves="tuned.jsonl"),
    Step("db import", "tuned.jsonl"),
    Step("db diff", "other.db", exits=(0, 1)),
    Step("db merge", "other.db"),
    Step("db push", "remote --dry-run"),
    Step("db push", "remote"),
    Step("db pull", "remote --digest 0", exits=(1,)),
    Step("db gc"),
    Step("bench run", "m.gguf -p 8 -n 4 -r 1"),
    Step("bench kernels", "--shape 64,64 --m 1,8 -r 1"),
    Step("bench machine"),
    Step("bench kv", f"{TRACE} -n 40"),
    Step("bench kv", f"{TRACE} -n 40 --estimate none,error:0.3"),
    Step("bench kv", f"{TRACE} -n 40 --model m.gguf --memory 8M"),
    Step("bench serve", "URL --requests 4 --concurrency 2 --input-len 8 --output-len 4"),
    Step("bench embed", "EMBEDDING_URL -n 4 -c 2 --lengths 3:6"),
    Step("simulate", f"{TRACE} --pools prompt=2*h100,token=1*a100 --rate 4 --duration 10"),
    Step("provision", f"{TRACE} --rate 4 --duration 10"),
    Step("predict-len collect", "m.gguf prompts.txt -o log.jsonl --max-tokens 4"),
    Step("predict-len train", "answers.jsonl -o answers.plen"),
    Step("predict-len eval", "answers.jsonl"),
    Step("predict-len predict", "m.gguf -p hello --predictor answers.plen"),
    Step("prune", "hf -o pruned --sparsity 0.5"),
    Step("quantise", "m.gguf --format q8_0 --requantise -o quantised.gguf", exits=(0, 1)),
    Step("eval", "m.gguf --text prompts.txt", exits=(0, 1)),
    Step("kernels raise", f"{path_of('dot_f32')} --function dot_f32 -o dot.kir"),
    Step("kernels lower", "dot.kir --isa avx2 -o dot.c"),
    Step("kernels check", f"dot.kir --against {path_of('dot_f32')} --isa avx2", exits=(0, 1)),
    Step("kernels emit", "dot.kir -o emitted.c", exits=(0, 1)),
    Step("kernels show"),
    Step("kernels show", "dot_f32", exits=(0, 1)),
    Step("config set", "serve.port 9000"),
    Step("config show"),
    Step("cluster status", exits=(0, 1)),
    Step("cluster drain", "nobody", exits=(1, 2)),
    Step("models prune"),
    Step("models rm", "m", exits=(0, 1)),
)


def test_the_walk_goes_to_every_command() -> None:
    assert sorted({step.command for step in WALK}) == sorted(commands())


@pytest.fixture(scope="module")
def words() -> Iterator[dict[str, str]]:
    """Values of the names in capitals: a core that may be used, and servers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        generates = stack.enter_context(fake_server())
        embeds = stack.enter_context(
            embedding_server(write_encoder(folder / "bert", "bert"), workers=[FakeWorker()], depths=[(4, 9)])
        )
        hub = stack.enter_context(serving())
        hub.repositories["org/tiny-GGUF"] = {"tiny.Q4_0.gguf": tiny_gguf().to_bytes()}
        yield {
            "HUB": hub.url,
            "CORE": str(min(os.sched_getaffinity(0))),
            "URL": generates.url,
            "EMBEDDING_URL": embeds.url,
        }


@pytest.fixture
def place(words: dict[str, str]) -> Iterator[Place]:
    """A folder with a short name, since commands print paths."""
    folder = Path(tempfile.mkdtemp(prefix="pw", dir="/tmp"))
    (folder / "m.gguf").write_bytes(tiny_gguf(shape=TinyShape(context_length=1024)).to_bytes())
    write_tiny_hf(folder / "hf", "llama")
    write_encoder(folder / "bert", "bert")
    (folder / "prompts.txt").write_text("one\ntwo\nthree\n")
    write_log(folder / "answers.jsonl", made_up(120), "m")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PHASEWISE_")}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    for kind in ("CACHE", "DATA", "CONFIG", "STATE"):
        environment[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
    environment["HF_ENDPOINT"] = words["HUB"]
    yield Place(folder, environment)
    shutil.rmtree(folder)


def called(step: Step, words: dict[str, str]) -> list[str]:
    return [*step.command.split(), *(words.get(word, word) for word in step.arguments.split())]


def faults_in(step: Step, code: int, said: str) -> list[str]:
    """Faults of a step that count wherever its command runs."""
    call = f"{step.command} {step.arguments}"
    faults = [] if code in step.exits else [f"{call}: exit code {code}: {said[-500:]}"]
    return [*faults, f"{call}: {said[-500:]}"] if "Traceback" in said else faults


@pytest.mark.slow
@pytest.mark.parametrize("no_color", [False, True])
def test_nothing_wraps_in_a_terminal(place: Place, words: dict[str, str], no_color: bool) -> None:
    """With NO_COLOR a terminal gets no escape sequences at all."""
    faults = []
    for step in WALK:
        code, said = place.in_terminal(called(step, words), until=step.until, no_color=no_color)
        faults += faults_in(step, code, said)
        if step.saves:
            rows = [line for line in said.splitlines() if line.startswith("{")]
            (place.folder / step.saves).write_text("\n".join([*rows, ""]))
        faults += [
            f"{step.command} {step.arguments} wraps: {line}"
            for line in too_wide(said)
            if str(place.folder) not in line and line[:1] != "{"  # a path is printed whole, and JSON
        ]
        if no_color and "\x1b" in said:
            faults.append(f"{step.command} {step.arguments}: escape sequences: {said!r}")
    assert not faults, "\n".join(faults)


AS_WIDE_AS_LLAMA_BENCH = ("bench run",)
"""In a pipe its table has all of llama-bench's columns, for what reads them there."""


@pytest.mark.slow
def test_nothing_is_animated_in_a_pipe(place: Place, words: dict[str, str]) -> None:
    """Nor coloured; and tables are those of a terminal of 80 columns."""
    faults = []
    for step in WALK:
        if step.until:
            continue
        code, said = place.in_pipe(called(step, words))
        faults += faults_in(step, code, said)
        if step.saves:
            rows = [line for line in said.splitlines() if line.startswith("{")]
            (place.folder / step.saves).write_text("\n".join([*rows, ""]))
        faults += [f"{step.command} {step.arguments}: {sign!r}" for sign in ("\x1b", "\r") if sign in said]
        faults += [
            f"{step.command} {step.arguments} is wide: {line}"
            for line in too_wide(said)
            if line.startswith(("|", "---")) and step.command not in AS_WIDE_AS_LLAMA_BENCH
        ]
    assert not faults, "\n".join(faults)
