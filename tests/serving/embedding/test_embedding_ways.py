"""Every way of computing an embedding gives the same bits; the guide's table is of these ways."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.embedding.encoder.embedder", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cython_kernels import isa
from tests.support.embedding_ways import FORMATS, INSTANCES, WAYS, Asked, alone, asked, by, rows
from tests.support.models.encoder_models import CASES
from tests.support.tiers import isas, n_examples

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "same-answer.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ways")


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_vectors_are_the_same_on_every_instruction_set(folder: Path, name: str) -> None:
    """By --arithmetic canonical, in every format; scores of pairs too."""
    for weight_format in FORMATS:
        workload = asked(folder, name, weight_format, max(3, n_examples(10)))
        vectors = {which: by(which)(workload) for which in isas()}
        lowest, *others = vectors
        assert [which for which in others if vectors[which] != vectors[lowest]] == [], weight_format


@pytest.mark.parametrize("weight_format", FORMATS)
def test_vectors_are_the_same_in_every_way(folder: Path, weight_format: str) -> None:
    workload = asked(folder, "bert", weight_format)
    for name, n_equal, n_unequal in rows(workload, WAYS):
        assert (n_equal, n_unequal) == (len(workload.inputs), 0), name


@pytest.mark.slow
def test_instances_give_the_same_vectors(folder: Path) -> None:
    workload = asked(folder, "bert", "int8")
    assert list(rows(workload, INSTANCES)) == [("two instances", len(workload.inputs), 0)]


def test_a_vector_that_differs_is_counted(folder: Path) -> None:
    workload = asked(folder, "bert", "f32")

    def other(_one: Asked) -> list[bytes]:
        return [b"", *alone(workload)[1:]]

    assert list(rows(workload, {"other": other})) == [("other", len(workload.inputs) - 1, 1)]


def test_the_guide_s_table_is_of_these_ways() -> None:
    table = GUIDE.read_text(encoding="utf-8").partition("## Embeddings")[2].partition("\n## ")[0]
    names = re.findall(r"^\| (.+?) \|(?: \d+ of \d+ \|){4}$", table, re.MULTILINE)
    assert names[: len(WAYS) + 1] == [*WAYS, *INSTANCES]
    assert isa.usable()
