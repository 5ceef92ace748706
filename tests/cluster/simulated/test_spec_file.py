"""Cluster files and machine types: what ships, what a file may say, and files that say something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.simulate import Pool
from phasewise.cluster.simulated.spec_file import (
    MachineCatalogue,
    parse_pools,
    read_cluster,
    read_machines,
    shipped,
)
from phasewise.cluster.simulated.steps import Curve, StepTimes

XEON = """
[machines.xeon]
memory_bytes = 1_000_000
cost = 2.5
link = { bytes_per_s = 1e9, layerwise_above_tokens = 0 }
[machines.xeon.models.tiny]
weight_bytes = 200_000
kv_bytes_per_token = 100
n_layers = 4
prefill_ms = [[1, 1.0], [101, 2.0]]
decode_ms = [[1, 1.0]]
"""
CLUSTER = 'model = "tiny"\n[[pool]]\nrole = "prompt"\nmachine = "xeon"\ncount = 2\n'


def _file(path: Path, text: str) -> Path:
    (path / "cluster.toml").write_text(text, encoding="utf-8")
    return path / "cluster.toml"


@pytest.mark.parametrize("name", shipped())
@pytest.mark.parametrize("model", ["bloom-176b", "llama2-70b"])
def test_shipped_types_are_whole(name: str, model: str) -> None:
    """Step times grow with tokens, and the paper's ratios of cost and power hold (Table V)."""
    machine = MachineCatalogue(model)[name]
    a100 = MachineCatalogue(model)["a100"]

    assert machine.kv_slots > 32768
    assert machine.steps.prefill_s(4096) > machine.steps.prefill_s(512) > 0
    assert machine.steps.decode_s(1, 32768) > machine.steps.decode_s(1, 512) > 0
    ratios = {"a100": (1.0, 1.0), "h100": (2.15, 1.75), "h100-capped": (2.15, 1.225)}
    assert (round(machine.cost / a100.cost, 2), machine.power_w / a100.power_w) == ratios[name]


def test_a_file_has_pools_and_its_own_types(tmp_path: Path) -> None:
    path = _file(tmp_path, 'policy = "prefix-aware"\nsplit_above_tokens = 64\n' + CLUSTER + XEON)

    spec, catalogue = read_cluster(path)

    xeon = catalogue["xeon"]
    assert spec.pools == (Pool("prompt", xeon, 2),)
    assert (spec.policy, spec.limits.split_above_tokens, spec.cost) == ("prefix-aware", 64, 5.0)
    assert (xeon.kv_slots, xeon.link.layerwise_above_tokens, xeon.max_batch_tokens) == (8000, 0, 2048)
    assert xeon.steps.prefill_s(51) == pytest.approx(0.0015)
    assert read_machines(path)["xeon"].name == "xeon"


def test_timed_steps_replace_curves() -> None:
    flat = StepTimes(Curve([(1, 9.0)]), Curve([(1, 9.0)]))

    assert MachineCatalogue(timed={"h100": flat})["h100"].steps is flat


def test_pools_in_a_line() -> None:
    catalogue = MachineCatalogue()

    pools = parse_pools("prompt=27*h100, token=3*a100", catalogue)

    assert [(pool.role, pool.machine.name, pool.count) for pool in pools] == [
        ("prompt", "h100", 27),
        ("token", "a100", 3),
    ]
    for text in ("", "prompt", "prompt=h100", "prompt=0*h100", "other=1*h100", "prompt=1*h100,"):
        with pytest.raises(ClusterError, match="pools are a TOML file or written like"):
            parse_pools(text, catalogue)
    with pytest.raises(ClusterError, match="no machine type is called 'b200'"):
        parse_pools("mixed=1*b200", catalogue)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no \\[\\[pool\\]\\]"),
        ("pool = 3", "pool: Input should be a valid list"),
        ("[[pool]\n", "cannot be read as TOML"),
        ("a = " + "[" * 5000, "cannot be read as TOML"),
        ("\x00", "cannot be read as TOML"),
        (CLUSTER, "no machine type is called 'xeon'"),
        (
            CLUSTER.replace("count = 2", "count = 0") + XEON,
            "pool.0.count: Input should be greater than or equal to 1",
        ),
        (
            CLUSTER.replace("count = 2", "count = true") + XEON,
            "pool.0.count: Input should be a valid integer",
        ),
        (CLUSTER.replace("count = 2", "") + XEON, "pool.0.count: Field required"),
        (
            CLUSTER.replace('"prompt"', '"first"') + XEON,
            "pool.0.role: Input should be 'prompt', 'token' or 'mixed'",
        ),
        (CLUSTER + "speed = 3\n" + XEON, "pool.0.speed: Extra inputs are not permitted"),
        ('policy = "best"\n' + CLUSTER + XEON, "policy must be one of"),
        (CLUSTER + XEON.replace("n_layers = 4", "n_layers = -4"), "n_layers: Input should be greater"),
        (CLUSTER + XEON.replace("n_layers", "layers"), "n_layers: Field required"),
        (CLUSTER + XEON.replace("[101, 2.0]", "[1, 2.0]"), "two points at the same"),
        (
            CLUSTER + XEON.replace("[101, 2.0]", "[101, nan]"),
            "prefill_ms.1.1: Input should be a finite number",
        ),
        (CLUSTER + XEON.replace("[101, 2.0]", '"x"'), "prefill_ms.1: Input should be a valid tuple"),
        (CLUSTER + XEON.replace("[[1, 1.0]]", "[]"), "decode_ms: List should have at least 1 item"),
        (CLUSTER + XEON.replace("decode_ms = [[1, 1.0]]", ""), "no step times"),
        (CLUSTER + XEON.replace("cost = 2.5", "cost = inf"), "xeon.cost: Input should be a finite number"),
        (CLUSTER + XEON.replace("models.tiny", "models.large"), "has no step times for model 'tiny'"),
        (CLUSTER + "[machines]\nxeon = 3\n", "machines.xeon: Input should be a valid dictionary"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ClusterError, match=why) as error:
        read_cluster(_file(tmp_path, text))

    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_cluster_or_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("spec") / "cluster.toml"
    path.write_bytes(data)

    with pytest.raises(ClusterError):
        read_cluster(path)


@pytest.mark.parametrize("part", ["a", '"a b"', "'x'"])
def test_a_key_of_thousands_of_parts_is_one_line_at_once(tmp_path: Path, part: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(" . ".join([part] * 5000) + " = 1\n")

    with pytest.raises(ClusterError, match="a key of more than 16 parts"):
        read_cluster(file)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for name in ("absent.toml", "."):
        with pytest.raises(ClusterError):
            read_cluster(tmp_path / name)
    big = tmp_path / "big.toml"
    big.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ClusterError, match="larger than"):
        read_cluster(big)
