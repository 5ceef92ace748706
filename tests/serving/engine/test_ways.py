"""Every way of computing gives the same bits; the guide's table is of these ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cython_kernels.schedules import has_tiles_arithmetic
from phasewise.workflows.options import ArithmeticChoice
from tests.support.models.tiny_models import TinyShape, tiny_gguf
from tests.support.servers.pools import tiny_model
from tests.support.ways import N_REQUESTS, WAYS, Way, rows

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "same-answer.md"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield tiny_model(tmp_path_factory.mktemp("model"))


def counted(path: Path, ways: tuple[Way, ...]) -> dict[str, tuple[int, int]]:
    return {name: (n_equal, n_unequal) for name, n_equal, n_unequal in rows(path, ways)}


@pytest.mark.slow
def test_every_way_gives_the_same_bits(path: Path) -> None:
    assert counted(path, WAYS) == {way.name: (N_REQUESTS, 0) for way in WAYS}


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["blocks", "tiles"])
def test_an_arithmetic_of_both_phases_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arithmetic: ArithmeticChoice
) -> None:
    """Prompts in cuts, kept and stored prefixes, drafts, scores: of K-quants and bytes, in one process."""
    if arithmetic == "tiles" and not has_tiles_arithmetic():
        pytest.skip("this CPU has no arithmetic of tiles")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = TinyShape(context_length=4096, hidden=256, ffn=512, head_dim=64)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(
        tiny_gguf(types={"": "Q4_K", "attn_v": "Q6_K", "ffn_up": "Q8_0"}, shape=shape).to_bytes()
    )
    ways = tuple(way for way in WAYS if way.has_arithmetic)

    counts = {name: (n_equal, n_unequal) for name, n_equal, n_unequal in rows(path, ways, arithmetic)}

    assert counts == {way.name: (N_REQUESTS, 0) for way in ways}


def test_the_guide_s_table_is_of_these_ways() -> None:
    table = re.findall(r"^\| (.+?) \| \d+ \| \d+ \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert table[: len(WAYS)] == [way.name for way in WAYS]
