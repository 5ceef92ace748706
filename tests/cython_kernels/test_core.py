"""Kinds of cores: PHASEWISE_CORE, what the table of traits may change, and the one file that knows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels import _native, isa
from tests.support.kernels import core
from tests.support.kernels.gemm_reference import FORMATS, make_weight

KERNELS = Path(__file__).parents[2] / "cython_kernels"
VENDOR_TEST = re.compile(r"__builtin_cpu_(is|supports)|AuthenticAMD|GenuineIntel|HygonGenuine")
ROWS = (1, 2, 5, 9, 17, 40, 70)


def run_with(wanted: str) -> subprocess.CompletedProcess[str]:
    code = (
        "from tests.support.kernels import core;"
        "from phasewise.topology import core_signature, read_machine;"
        "print(core.active()); print(core_signature(read_machine()))"
    )
    environment = os.environ | {"PHASEWISE_CORE": wanted}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", core.names())
def test_an_override_is_used_and_keys_measurements_apart(name: str) -> None:
    own, forced = run_with("").stdout.splitlines(), run_with(name).stdout.splitlines()

    assert forced[0] == name
    assert own[0] in core.names()
    assert forced[1] == f"{own[1]} as {name}"


def test_an_unknown_core_is_a_clear_error() -> None:
    got = run_with("pentium")

    assert got.returncode != 0
    last = got.stderr.strip().splitlines()[-1]
    assert "PHASEWISE_CORE" in last
    assert "'pentium'" in last
    assert all(name in last for name in core.names())


@pytest.mark.parametrize("name", isa.usable())
@pytest.mark.parametrize("fmt", FORMATS)
def test_no_trait_changes_a_bit(name: str, fmt: str) -> None:
    rng = np.random.default_rng(7)
    weight = make_weight(fmt, 83, 416, rng)
    x = rng.standard_normal((max(ROWS), 416), dtype=np.float32)

    def products(kind: str) -> list[bytes]:
        with core.using(kind):
            return [_native.gemm(x[:rows], weight).tobytes() for rows in ROWS]

    with isa.using(name):
        first, *others = map(products, core.names())

    assert all(other == first for other in others)


def test_traits_reach_the_default_schedules() -> None:
    weight = make_weight("bf16", 256, 512, np.random.default_rng(8))

    def ahead(kind: str) -> int:
        with core.using(kind):
            return int(_native.default_schedule(weight, 1)["prefetch_bytes"])

    assert ahead("zen4") == 0 < ahead("intel")


def test_vendors_are_told_apart_in_one_file() -> None:
    sources = [path for path in KERNELS.rglob("*") if path.suffix in (".c", ".h", ".pxi", ".py", ".pyx")]
    knowing = {path.name for path in sources if VENDOR_TEST.search(path.read_text())}

    assert knowing - {"_native.c"} == {"cpu.c"}
