"""`doctor --bits`: known results on this machine, and what is said where one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

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
from phasewise.workflows.replay import bits_check
from tests.support.kernels import emulated_native


def test_every_known_result_is_this_machines() -> None:
    """A change of the arithmetic is a new ARITHMETIC_VERSION, and new results in `bits_known`: the same for
    every instruction set.
    """
    assert ARITHMETIC_VERSION == 2
    outcomes = bits_check.check_bits()
    assert [outcome for outcome in outcomes if outcome.problem] == []
    assert {(outcome.isa, outcome.kv_format) for outcome in outcomes if outcome.weights != "bf16"} >= {
        (name, kv_format) for name in isa.usable() for kv_format in KV_FORMATS
    }
    assert {outcome.isa for outcome in outcomes if outcome.weights == "bf16"} == set(isa.usable())
    assert {outcome.core for outcome in outcomes} == set(read_machine().allowed_pus)
    assert all(outcome.is_known for outcome in outcomes if outcome.weights != "bf16")
    assert set(bits_check.KNOWN) == set(KV_FORMATS)


def test_blocks_have_one_result_on_every_instruction_set_and_it_is_not_that_of_groups() -> None:
    model, core = bits_check.known_model(bits_check.BLOCK_KINDS), read_machine().allowed_pus[0]
    for name in isa.usable():
        with isa.using(name):
            digest, _ = bits_check.computed(model, "f32", core, bits_check.BLOCK_PATH)
            assert digest == bits_check.KNOWN_OF_BLOCKS
            assert bits_check.computed(model, "f32", core)[0] != bits_check.KNOWN_OF_BLOCKS


def test_bf16_weights_are_known_by_both_arithmetics() -> None:
    """Of each instruction set with dots of 16 bits; here as many as it has."""
    model, core = bits_check.known_model(("bf16",)), read_machine().allowed_pus[0]
    for name in isa.usable():
        with isa.using(name):
            paths = bits_check.paths_of_bf16()
            digests = {path: bits_check.computed(model, "f32", core, path)[0] for path in paths}
        own = {path: digest for path, digest in digests.items() if path != "fma"}
        assert digests["fma"] == bits_check.KNOWN_OF_BF16
        assert own.keys() <= bits_check.KNOWN_OF_DOTS.get(name, {}).keys() | bits_check.SPECIFIED
        assert {path: own[path] for path in own.keys() - bits_check.SPECIFIED} == {
            path: bits_check.KNOWN_OF_DOTS[name][path] for path in own.keys() - bits_check.SPECIFIED
        }


@pytest.mark.soak
def test_emulated_dots_give_what_is_known(tmp_path: Path) -> None:
    """The whole program on a CPU with dots of bf16, of float16 and with tiles, by each arithmetic; K-quants
    have integers for 256 inputs by default where tiles multiply them.
    """
    assert emulated_native.known(tmp_path) == {
        name: {
            **of_dots,
            "fma": bits_check.KNOWN_OF_BF16,
            "every": bits_check.KNOWN["f32"],
            "int8_block": bits_check.KNOWN_OF_BLOCKS,
            "default of q4_k": "int8_block" if name == "amx" else "int8_dot",
        }
        for name, of_dots in bits_check.KNOWN_OF_DOTS.items()
    }


def test_a_result_that_another_maker_may_round_otherwise_is_compared_with_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A digest that is not known is no wrong bit where Intel alone says how it is rounded; else it is one."""
    model = bits_check.known_model(("bf16",))
    monkeypatch.setattr(bits_check, "computed", lambda *_: ("another", True))
    for path, is_wrong in (("bf16_dot", False), ("bf16_tile", False), ("f16_fma", True), ("fma", True)):
        outcome = bits_check._outcome(model, "f32", "known", 0, path)
        assert ((outcome.problem is not None), outcome.is_known) == (is_wrong, is_wrong)


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
    known_outcomes = [outcome for outcome in told["outcomes"] if outcome["is_known"]]
    assert told["problems"] == len(known_outcomes) > 0
    assert all("known are" in outcome["problem"] for outcome in known_outcomes)


def test_a_sound_machine_is_said_to_be_so() -> None:
    result = CliRunner().invoke(app, ["doctor", "--bits"])

    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "all bits are right")
    refused = CliRunner().invoke(app, ["doctor", "--bits", "--strict"])
    assert refused.exit_code == 2
