"""Every option of every command: refused where the product's table says so, and shown to act elsewhere.

`phasewise serve`, which has many ways of running, has a file of its own (test_options_of_serve.py). An option
of another command is shown by a test or a guide that names both, or by a row of `HANDED`: what the command
hands on differs with it. A new option without either fails.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run
from tests.cli.command_options import commands, flag_of
from tests.cli.opened_by_serve import plain
from tests.support.models.tiny_models import write_tiny_gguf

ROOT = Path(__file__).parents[2]
QUIET = {"PHASEWISE_CONFIG": "/dev/null"}


class HandedOn(Exception):
    """Raised with what a command handed on; nothing runs after it."""


@dataclass(frozen=True)
class Handing:
    """A command up to the function `target`, which gets all that the options of `samples` say."""

    target: str
    arguments: Sequence[str]
    samples: Mapping[str, Sequence[str]]
    instead: Mapping[str, Any] = field(default_factory=dict)
    """Functions that are passed on the way, and what they return."""


class FakeChat:
    """A conversation of which the settings and the sampling are of interest."""

    def __init__(self, model: str, settings: object, report: object) -> None:
        self._settings = settings

    def __enter__(self) -> FakeChat:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def answer(self, *arguments: object) -> None:
        raise HandedOn(self._settings, arguments[1])


SAMPLING = {"--top-k": ["--top-k", "3"], "--repetition-penalty": ["--repetition-penalty", "1.3"]}
BENCH_KV = {
    **{flag: [flag, "17"] for flag in ("--prompt-tokens", "--seed", "--max-sequences")},
    "--column": ["--column", "tokens"],
}
HANDED = {
    "generate": Handing(
        "phasewise.workflows.generate.run.generate_text",
        ["m", "-p", "x", "--temperature", "1"],
        {"--arithmetic": ["--arithmetic", "blocks"], "--min-p": ["--min-p", "0.2"], **SAMPLING},
    ),
    "eval": Handing(
        "phasewise.workflows.evaluate.run.evaluate",
        ["m"],
        {
            "--context": ["--context", "64"],
            "--sparse": ["--sparse", "always"],
            "--threads": ["--threads", "2"],
            "--ranks": ["--ranks", "2"],
            "--db": ["--db", "x.db"],
        },
    ),
    "quantise": Handing(
        "phasewise.workflows.quantise.run.quantise", ["m", "-o", "out"], {"--requantise": ["--requantise"]}
    ),
    "chat": Handing(
        "phasewise.workflows.chat.session.ChatSession",
        ["m"],
        {**SAMPLING, "--kv-format": ["--kv-format", "int8"]},
    ),
    "tune-config": Handing(
        "phasewise.workflows.tune_config.subject.open_subject", ["m"], {"--resume": ["--no-resume"]}
    ),
    "tune-embed": Handing(
        "phasewise.workflows.embed.tune.tune_embed",
        ["m"],
        {
            "--tokens": ["--tokens", "9"],
            "--instances": ["--instances", "2"],
            "--embed-device": ["--embed-device", "exec:true"],
        },
    ),
    "simulate": Handing(
        "phasewise.workflows.capacity.simulate.simulate_cluster",
        ["fixed:8/8", "--pools", "mixed=1*h100", "--rate", "1"],
        {
            "--duration": ["--duration", "7"],
            "--reference": ["--reference", "h100"],
        },
    ),
    "provision": Handing(
        "phasewise.workflows.capacity.provision.provision_cluster",
        ["fixed:8/8"],
        {
            "--power": ["--power", "9"],
            "--most-rate": ["--most-rate", "9"],
            "--reference": ["--reference", "h100"],
        },
    ),
    "batch": Handing(
        "phasewise.workflows.batch.run.answer_batch",
        ["in.jsonl", "m", "-o", "out.jsonl"],
        {
            "--concurrency": ["--concurrency", "3"],
            "--format": ["--format", "int8"],
            "--sparse": ["--sparse", "always"],
            "--arithmetic": ["--arithmetic", "blocks"],
            "--threads": ["--threads", "2"],
            "--ranks": ["--ranks", "2"],
            "--draft": ["--draft", "lookup"],
            "--draft-tokens": ["--draft", "lookup", "--draft-tokens", "3"],
            "--kv-format": ["--kv-format", "int8"],
            "--db": ["--db", "x.db"],
        },
        {"phasewise.workflows.batch.server.is_made_for_embedding": False},
    ),
    "replay": Handing(
        "phasewise.workflows.replay.run.replay_files",
        ["receipt.json", "--model", "m"],
        {
            "--sparse": ["--sparse", "always"],
            "--arithmetic": ["--arithmetic", "blocks"],
            "--threads": ["--threads", "2"],
        },
    ),
    "prune": Handing(
        "phasewise.workflows.prune.run.prune",
        ["m", "-o", "out", "--calibration", "text", "--method", "wanda"],
        {"--calibration-tokens": ["--calibration-tokens", "99"], "--recover": ["--recover"]},
    ),
    "bench serve": Handing(
        "phasewise.loadtest.session.run_load_test",
        ["http://127.0.0.1:9", *["--rate", "3", "--slo", "ttft=1s", "--find-rate", "--seed", "1"]],
        {"--probe": ["--probe", "5"]},
    ),
    "bench kv": Handing("phasewise.workflows.bench.kv.replay.replay_policies", ["lengths.csv"], BENCH_KV),
    "bench run": Handing(
        "phasewise.workflows.opening.open_model.open_model",
        ["m"],
        {"--arithmetic": ["--arithmetic", "blocks"]},
    ),
    "bench kernels": Handing(
        "phasewise.workflows.bench.kernels.kernel_rows", [], {"--threads": ["--threads", "1"]}
    ),
    "models inspect": Handing(
        "phasewise.serving.loaders.inspection.densities",
        ["TINY", "--density"],
        {"--format": ["--format", "int8"]},
    ),
    "predict-len collect": Handing(
        "phasewise.workflows.predict_len.answer_prompts.collect_lengths",
        ["m", "prompts", "-o", "log"],
        {"--format": ["--format", "int8"], "--threads": ["--threads", "3"]},
    ),
    "predict-len eval": Handing(
        "phasewise.workflows.predict_len.judge.judge_predictions",
        ["log"],
        {"--overflow": ["--overflow", "0.3"], "--db": ["--db", "other.db"]},
    ),
    "db export": Handing(
        "phasewise.workflows.database.sharing.export_rows",
        [],
        {"--user-kernels": ["--user-kernels"], "--no-plans": ["--no-plans"], "--no-scores": ["--no-scores"]},
    ),
    "bench embed": Handing(
        "phasewise.loadtest.embed.find_model", ["http://127.0.0.1:9"], {"--api-key": ["--api-key", "k"]}
    ),
}

SHOWN_ELSEWHERE = {
    **{(bench, "--wide"): "test_tables.py" for bench in ("bench run", "bench kv")},
    ("bench kernels", "--wide"): "test_tables.py",
    ("provision", "--wide"): "commands/test_cluster_commands.py",
    ("db show", "--wide"): "commands/test_db.py",
    ("tune-embed", "--json"): "test_every_command.py",
    ("bench embed", "--seed"): "commands/test_bench_embed.py",
}
"""Options whose test works without the command's name: the file beside this one that has it."""


@cache
def texts() -> tuple[str, ...]:
    """Tests, and guides, whose commands are run by tests/docs/test_guide.py."""
    own = {Path(__file__), Path(__file__).with_name("test_options_of_serve.py")}
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path not in own]
    read = (path.read_text(encoding="utf-8") for path in (*tests, *(ROOT / "docs" / "guide").glob("*.md")))
    return tuple(text.replace("fields_of", "fields_of --json") for text in read)


def is_shown(command: str, flags: Sequence[str]) -> bool:
    """True where a test or a guide has the command's words and the flag."""
    flag = re.compile("|".join(rf"(?<![\w-]){re.escape(flag_name)}(?![\w-])" for flag_name in flags))
    return any(all(word in text for word in command.split()) and flag.search(text) for text in texts())


OTHERS = sorted(set(commands()) - {"serve", "run"})  # `run` is another name of `chat`


@pytest.mark.many
@pytest.mark.parametrize("command", OTHERS)
def test_every_option_is_shown_to_act(command: str) -> None:
    missing = []
    for parameter in commands()[command].params:
        flag = flag_of(parameter)
        if flag is None or flag in (HANDED[command].samples if command in HANDED else ()):
            continue
        if (command, flag) in SHOWN_ELSEWHERE:
            assert (Path(__file__).parent / SHOWN_ELSEWHERE[command, flag]).is_file()
        elif not is_shown(command, (*parameter.opts, *parameter.secondary_opts)):
            missing.append(flag)
    assert not missing, f"options of {command} that no test and no guide shows"


@pytest.mark.parametrize("command", sorted(HANDED))
def test_an_option_changes_what_is_handed_on(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handing = HANDED[command]
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("phasewise.tuner.measurement_lock.user_lock", _no_lock)
    for dotted, value in handing.instead.items():
        monkeypatch.setattr(dotted, lambda *_args, _value=value, **_more: _value)
    monkeypatch.setattr(handing.target, FakeChat if command == "chat" else _hand_on)

    def handed(*options: str) -> Any:
        base = [
            str(tmp_path / "tiny.gguf") if argument == "TINY" else argument for argument in handing.arguments
        ]
        with pytest.raises(HandedOn) as handed_on:
            run(*command.split(), *base, *options, env=QUIET, stdin="hi\n")
        return [plain(argument) for argument in handed_on.value.args]

    amount = ["--cost", "5"] if command == "provision" else []
    without = handed(*amount)
    assert handed(*amount) == without
    for flag, sample in handing.samples.items():
        assert handed(*([] if flag == "--power" else amount), *sample) != without, flag


def _hand_on(*arguments: object, **settings: object) -> None:
    raise HandedOn(arguments, settings)


def _no_lock(*_report: object) -> Any:
    class Lock:
        def turn(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    return Lock()


# ---- options without effect -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "topo --format int8",
        "topo --plan --db x.db",
        "topo m",
        "doctor --root /nowhere --db x.db",
        "simulate fixed:8/8 --pools mixed=1*h100 --duration 9",
        "simulate fixed:8/8 --pools mixed=1*h100 --rate 1 --prefix-reuse",
        "simulate fixed:8/8 --pools mixed=1*h100 --rate 1 --db x.db",
        "tune-kernels --kernel k.kir --shapes n=8 --max-m 3",
        "tune-kernels m --isa avx2",
        "tune-config m --slo ttft=1s",
        "tune-config m --emit numactl --cores 0-3",
        "generate m -p x --seed 3",
        "prune m -o out --calibration text",
        "bench serve http://127.0.0.1:9 --probe 3",
        "bench embed http://127.0.0.1:9 --find --slo 1s -c 3",
        "bench embed http://127.0.0.1:9 --find --slo 1s --inputs 3",
        "kernels emit k.kir -D A=1",
        "models inspect m --format int8",
    ],
)
def test_a_flag_without_effect_is_wrong_usage_and_the_command_does_not_begin(line: str) -> None:
    assert "no effect" in run(*line.split(), env=QUIET).usage_error


def test_variables_of_other_runs_are_no_error_and_say_nothing(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[topo]\nformat = "int8"\n')
    standing = {
        "PHASEWISE_CONFIG": str(config),
        "PHASEWISE_DB": str(tmp_path / "x.db"),
        "PHASEWISE_FORMAT": "int8",
    }
    done = run("topo", "--json", env=standing)
    assert (done.exit_code, done.stderr) == (0, "")


OF_OTHER_PROGRAMS = {
    *("--enforce-eager", "--tensor-parallel-size"),
    *("--cpus", "--cpuset-cpus", "--health-cmd", "--stop-timeout"),
    *("--formats", "--kv-formats", "--help", "--target", "--offline"),
    *("--auth-type", "--config", "--provider"),
    *("--no-index", "--find-links", "--only", "--kl-divergence", "--address", "--labels"),
}
"""Flags of vLLM, coding agents, containers, pip, Ray, scripts in the checkout, or of every command."""


PAGES = [page for page in sorted((ROOT / "docs" / "guide").glob("*.md")) if "coming-from" not in page.stem]
"""Those on other programs name their flags beside ours: `tests/docs/test_coming_from.py` tells them apart."""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_flag_that_a_guide_names_is_there(page: Path) -> None:
    flags = {
        flag
        for command in commands().values()
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", prose)
    named = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span)}
    assert named <= flags | OF_OTHER_PROGRAMS
