"""`doctor --bits`: known results on this machine, and what is said where one is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cli.main import app
from phasewise.cython_kernels import isa
from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.engine.fingerprint import ARITHMETIC_VERSION
from phasewise.topology import read_machine
from phasewise.workflows.replay import bits_check, bits_known


def test_every_known_result_is_this_machines() -> None:
    """A change of the arithmetic is a new ARITHMETIC_VERSION, and new results in `bits_known`: the same for
    every instruction set.
    """
    assert ARITHMETIC_VERSION == 2
    outcomes = bits_check.check_bits()
    assert [one for one in outcomes if one.problem] == []
    assert {(one.isa, one.kv_format) for one in outcomes if one.weights != "bf16"} >= {
        (name, kv_format) for name in isa.usable() for kv_format in KV_FORMATS
    }
    assert {one.isa for one in outcomes if one.weights == "bf16"} == set(isa.usable())
    assert {one.core for one in outcomes} == set(read_machine().allowed_pus)
    assert all(one.is_known for one in outcomes if one.weights != "bf16")
    assert set(bits_known.KNOWN) == set(KV_FORMATS)


def test_a_bit_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of one weight, in its last bit."""
    model = bits_check.known_model(bits_check.KINDS)
    final = model.vectors["final_norm"].copy()
    final[3] = np.nextafter(final[3], np.float32(2))
    model.vectors["final_norm"] = final  # type: ignore[index]
    monkeypatch.setattr(bits_check, "known_model", lambda kinds: model)

    result = CliRunner().invoke(app, ["doctor", "--bits", "--json"])

    assert result.exit_code == 1
    told = json.loads(result.stdout)
    known = [one for one in told["outcomes"] if one["is_known"]]
    assert told["problems"] == len(known) > 0
    assert all("known are" in one["problem"] for one in known)


def test_a_sound_machine_is_said_to_be_so() -> None:
    result = CliRunner().invoke(app, ["doctor", "--bits"])

    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "all bits are right")
    refused = CliRunner().invoke(app, ["doctor", "--bits", "--strict"])
    assert refused.exit_code == 2
