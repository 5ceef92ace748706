"""Every benchmark can be imported and says what it does; figures have functions; peers are checked."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner

from benchmarks import compare, random_gguf
from benchmarks.figures import FIGURES
from benchmarks.harness import Broken, Spread, in_turns, ratios, show
from phasewise._version import SCHEMA_VERSION
from tests.support import ROOT
from tests.support.models.tiny_models import write_tiny_gguf
from tests.support.tiers import first_is_smoke

SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
ON_HARNESS = [
    name for name in SCRIPTS if "app = commands(" in (ROOT / "benchmarks" / f"{name}.py").read_text()
]
OTHERS = [name for name in SCRIPTS if name not in ON_HARNESS and name not in ("harness", "demo")]
SOAKS = (*("changing_instances", "faults", "fuzz_api", "fuzz_http", "fuzz_models", "hostile"), "soak")

FAKE = """#!{python}
import json, sys
asked = sys.argv[1:]
if "--help" in asked:
    sys.exit(print("usage: llama-bench [options]\\n  -o, --output <csv|json>"))
n_prompt, n_gen = int(asked[asked.index("-p") + 1]), int(asked[asked.index("-n") + 1])
assert asked[asked.index("-o") + 1] == "json"
other = {{"n_prompt": 1, "n_gen": 1, "avg_ts": 1.0}}
print(json.dumps([other, {{"n_prompt": n_prompt, "n_gen": n_gen, "avg_ts": 12.5 + ("-fa" in asked)}}]))
"""


@pytest.fixture
def llama_bench(tmp_path: Path) -> Path:
    path = tmp_path / "llama-bench"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ON_HARNESS)
def test_a_benchmark_says_what_it_does(name: str) -> None:
    said = CliRunner().invoke(importlib.import_module(f"benchmarks.{name}").app, ["--help"])

    assert said.exit_code == 0
    assert (importlib.import_module(f"benchmarks.{name}").__doc__ or "?").split()[0] in said.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    first_is_smoke([*(f"benchmarks.{name}" for name in OTHERS), *(f"tests.soak.{name}" for name in SOAKS)]),
)
def test_other_programs_say_what_they_do(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_programs_of_peers_are_python_of_this_version() -> None:
    """They run under interpreters that have what they import, which this one has not."""
    for path in [*(ROOT / "benchmarks").rglob("*.py")]:
        ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.command)
def test_a_figure_has_a_function_that_says_what_it_makes(figure) -> None:  # type: ignore[no-untyped-def]
    module = importlib.import_module(figure.measure.__module__)

    assert getattr(module, figure.measure.__name__) is figure.measure
    assert figure.measure.__doc__
    assert figure.columns


def test_the_columns_of_a_figure_are_those_of_its_rows() -> None:
    (windve,) = (figure for figure in FIGURES if figure.command == "windve-tables")
    first = next(iter(windve.measure()))

    assert tuple(first)[: len(windve.columns)] == windve.columns


@pytest.mark.parametrize("one_type", random_gguf.TYPES)
def test_a_random_file_has_weights_of_the_type_that_was_asked_for(
    one_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(random_gguf.SHAPES, "tiny", random_gguf.Shape("llama", 256, 2, 4, 2, 512, None))
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    write_tiny_gguf(source)

    list(random_gguf.random_gguf("tiny", source, out, one_type))

    tensors = gguf.GGUFReader(out).tensors
    types = {tensor.tensor_type.name for tensor in tensors}
    assert types == {"F32", *({"Q4_K", "Q6_K"} if one_type == random_gguf.MIXED else {one_type})}
    for tensor in tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert values.size == tensor.n_elements
        assert 0 < abs(values).max() <= 1, tensor.name


# ---- the harness -----------------------------------------------------------------------------------------


def test_turns_alternate_and_warm_ups_are_left_out() -> None:
    order: list[str] = []
    systems = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}  # type: ignore[misc]
    taken = in_turns(systems, 2, pause_s=0)

    assert order == ["b", "a", "a", "b", "b", "a"]
    assert taken == {"a": [3, 6], "b": [4, 5]}


def test_ratios_are_of_each_round() -> None:
    assert ratios([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == Spread(3.0, 2.0, 4.0)


def test_rows_are_markdown_or_json_with_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"what": "a|b", "value": 1.2345}, "a remark", {"what": "c", "value": Spread(2.0, 1.0, 3.0)}]

    assert show(rows, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "| what | value |",
        "|---|---|",
        "| a/b | 1.23 |",
        "a remark",
    ]
    assert show([*rows, Broken("a law")], as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["rows"][1]["value"] == {"median": 2.0, "least": 1.0, "most": 3.0}
    assert said["remarks"] == ["a remark", "a law"]
    assert said["schema_version"] == SCHEMA_VERSION
    assert set(said["machine"]) == {"core", "isa", "cpus"}


# ---- llama-bench as a peer -------------------------------------------------------------------------------


def test_llama_bench_is_asked_for_one_phase_at_a_time(llama_bench: Path) -> None:
    label, engine = compare.peer_of(f"ik_llama_cpp@{llama_bench} -fa 1", "model.gguf", 2)

    assert label == "ik_llama_cpp"
    assert [engine.rate(compare.Test.parse(text)) for text in ("prefill 512", "decode 64")] == [13.5, 13.5]


@pytest.mark.parametrize("program", ["/bin/true", "/nowhere/llama-bench", "/dev/null"])
def test_what_is_no_llama_bench_is_refused_in_one_line(program: str) -> None:
    with pytest.raises(SystemExit, match=rf"^{program} is no llama-bench: [^\n]*$"):
        compare.peer_of(f"ik_llama_cpp@{program}", "model.gguf", 2)


def test_a_peer_that_is_not_there_is_left_out_with_its_reason(
    llama_bench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are timed, each by the tests that it can do."""

    class Ours:
        def check(self, test: compare.Test) -> None: ...
        def rate(self, test: compare.Test) -> float:
            return 25.0

        def close(self) -> None: ...

    monkeypatch.setattr(compare, "ours", lambda *_: Ours())
    monkeypatch.setattr(compare, "PAUSE_S", 0.0)
    missing = ["openvino@/nowhere/python", f"openvino@{sys.executable}", "ik_llama_cpp@/nowhere/llama-bench"]
    peers = [f"llama_cpp@{llama_bench}", *missing]

    said = list(compare.compare(["m.gguf"], peers, None, 2, 1, "prefill 8,decode 4 x2", "native"))

    remarks = [part for part in said if isinstance(part, str)]
    rows = [part for part in said if not isinstance(part, str)]
    assert [remark.partition(": ")[0] for remark in remarks] == [
        *(f"{peer} is left out" for peer in missing),
        "llama_cpp is left out of `decode 4 x2`",
    ]
    assert [(row["test"], row["peer"]) for row in rows] == [
        ("prefill 8", "llama_cpp"),
        ("decode 4 x2", "phasewise"),
    ]
    assert rows[0]["ratio"] == Spread(2.0, 2.0, 2.0)


def test_several_sequences_need_the_program_beside_it(llama_bench: Path) -> None:
    _, engine = compare.peer_of(f"llama_cpp={llama_bench}@{llama_bench}", "model.gguf", 2)
    assert isinstance(engine, compare.LlamaBench)

    with pytest.raises(SystemExit, match="is no llama-batched-bench"):
        engine.check(compare.Test("decode", 8, 8))
    with pytest.raises(SystemExit, match="does not time `embed 8`"):
        engine.check(compare.Test("embed", 8))


def test_a_llama_bench_that_fails_or_says_nonsense_ends_in_one_line(llama_bench: Path) -> None:
    _, engine = compare.peer_of(f"llama_cpp@{llama_bench}", "model.gguf", 2)
    for body, said in (("exit 3", "exit code 3"), ("echo nonsense", "no JSON"), ("echo '[]'", "no row of")):
        llama_bench.write_text(f"#!/bin/sh\n{body}\n")
        with pytest.raises(SystemExit, match=said):
            engine.rate(compare.Test("decode", 8))


@pytest.mark.parametrize("text", ["prefill", "decode 0", "decode 8 x", "sing 4"])
def test_what_is_no_test_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="is no test"):
        compare.Test.parse(text)
