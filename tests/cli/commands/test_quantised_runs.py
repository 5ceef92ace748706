"""`phasewise generate` on quantised checkpoints: an answer whose bits are the same by one rank and by two."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.topology import read_machine
from tests.cli import command
from tests.support.models.quantised_models import CASES, write_quantised_hf

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

pytestmark = [
    pytest.mark.usefixtures("own_places"),
    pytest.mark.skipif(len(read_machine().allowed_pus) < 2, reason="two ranks need two cores"),
]

ONE_OF_EACH_KIND = ("w4a16", "w4a16-zeros", "gptq-8", "w8a8", "nvfp4", "mxfp4", "fp8-power", "gptq-act-order")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_EACH_KIND[:4] else pytest.mark.slow)
        for name in ONE_OF_EACH_KIND
    ],
)
def test_one_rank_and_two_answer_alike(tmp_path: Path, name: str) -> None:
    write_quantised_hf(tmp_path / "m", CASES[name])
    answers = [
        command.fields_of(
            "generate",
            tmp_path / "m",
            "-p",
            "hello",
            "-n",
            12,
            "--ignore-eos",
            "--threads",
            2,
            "--ranks",
            ranks,
        )["token_ids"]
        for ranks in (1, 2)
    ]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def test_pruned_bytes_answer_alike_dense_and_sparse(tmp_path: Path) -> None:
    write_quantised_hf(tmp_path / "m", CASES["w8a8-pruned"])
    asked = ("generate", tmp_path / "m", "-p", "hello", "-n", 12, "--ignore-eos")
    answers = [command.fields_of(*asked, "--sparse", mode)["token_ids"] for mode in ("never", "always")]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1
