"""Models with states in divided pools: a state goes with keys and values, and no answer changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.real.test_begun_answers_of_instances import assert_ends_change_nothing
from tests.cluster.real.test_pools import assert_divided_equals_whole
from tests.soak.changing_instances import every_way, undisturbed
from tests.support.models import family_models as families
from tests.support.servers.pools import guides_of

LONG = {"max_position_embeddings": 16_384}


def test_divided_requests_get_the_answers_of_one_engine(tmp_path: Path) -> None:
    """A gated delta rule with convolutions, over shared memory."""
    assert_divided_equals_whole(families.write_family_hf(tmp_path / "m", "qwen3next", LONG))


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shm", "tcp"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3next", "granitehybrid", "falcon-h1", "kimi-linear"])
def test_whatever_the_kind_of_state(tmp_path: Path, family: str, transfer: str) -> None:
    n_drafts = assert_divided_equals_whole(
        families.write_family_hf(tmp_path / "m", family, LONG), transfer=transfer
    )
    assert n_drafts > 0 or family == "qwen3next"  # whose texts repeat nothing


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_with_two_ranks_a_pool(tmp_path: Path, transfer: str) -> None:
    model = families.write_family_hf(tmp_path / "m", "granitehybrid", LONG)
    assert assert_divided_equals_whole(model, 2, transfer) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3next", "granitehybrid"])
@pytest.mark.parametrize("roles", [("prompt", "token"), ("mixed", "mixed")], ids=" ".join)
def test_begun_answers_go_on_where_instances_are_killed(
    tmp_path: Path, family: str, roles: tuple[str, ...]
) -> None:
    model = families.write_family_hf(tmp_path / "m", family, LONG)
    asked = every_way(guides_of(model))
    assert_ends_change_nothing(model, asked, undisturbed(model, asked), roles)
