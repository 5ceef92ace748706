"""Files of pools, which may come from a stranger; and the names by which instances are drained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise._toml import parse_toml
from phasewise.workflows.cluster_status import named_instances, refuse_the_last
from phasewise.workflows.errors import UsageError
from phasewise.workflows.serve.cluster_pools import MAX_INSTANCES, ClusterPool, _pool, pools_of_file
from tests.support.tiers import examples

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "pools.md"


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pools.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as refusal:
        pools_of_file(str(path))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_the_guide_s_file_is_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    path = tmp_path / "pools.toml"
    path.write_text(text)

    prompt, token = pools_of_file(str(path))

    assert prompt == ClusterPool("prompt", 2, 24, "phasewise=big", sparse="never")
    assert token == ClusterPool("token", 4, 8, "phasewise=small", sparse="always", kv_bytes=8 << 30)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "has no [[pool]]"),
        ("pool = 3", "has no [[pool]]"),
        ("pool = [3]", "pool 1 must be a table"),
        ("[pools]", "nothing is called 'pools'"),
        ("a = ", "is not TOML"),
        (f"{'a.' * 40}b = 1", "has a key of more than"),
        ("[[pool]]\ninstances = 1", "role must be one of prompt, token, mixed, not None"),
        ('[[pool]]\nrole = ["mixed"]', "role must be one of"),
        ('[[pool]]\nrole = "mixed"', "instances is missing"),
        ('[[pool]]\nrole = "mixed"\ninstances = true\ncores = 1', "instances must be a whole number"),
        ('[[pool]]\nrole = "mixed"\ninstances = 1\ncores = 0', "cores must be a whole number from 1"),
        ('[[pool]]\nrole = "mixed"\ninstances = 1\ncores = 1\ncorse = 1', "did you mean cores?"),
        ('[[pool]]\nrole = "mixed"\ninstances = 1\ncores = 1\nlabel = 3', "label must be text"),
        ('[[pool]]\nrole = "mixed"\ninstances = 1\ncores = 1\nlabel = "a b"', "a label is a name"),
        ('[[pool]]\nrole = "mixed"\ninstances = 1\ncores = 1\nformat = "q9"', "format must be one of native"),
        ('[[pool]]\nrole = "mixed"\ninstances = 1\ncores = 1\nsparse = "yes"', "sparse must be one of auto"),
        ('[[pool]]\nrole = "mixed"\ninstances = 1\ncores = 1\nkv_budget = "-1"', "kv_budget must be bytes"),
        ('[[pool]]\nrole = "mixed"\ninstances = 1\ncores = 1\nkv_budget = 1.5', "kv_budget must be bytes"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it(tmp_path: Path, line: str, says: str) -> None:
    assert says in refused(tmp_path, line)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.toml", tmp_path):
        with pytest.raises(UsageError, match="--pools"):
            pools_of_file(str(path))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@examples(200)
@given(
    st.dictionaries(
        st.sampled_from(["role", "instances", "cores", "label", "format", "sparse", "kv_budget", "x"]),
        st.sampled_from(["mixed", "big", "8G", 1, "native", "auto"]) | anything,
        max_size=7,
    )
)
def test_drawn_tables_are_pools_or_one_line(table: dict[str, Any]) -> None:
    try:
        pool = _pool(table, "FILE, pool 1")
    except UsageError as error:
        assert str(error).startswith("FILE, pool 1")  # noqa: PT017 (either is right)
        assert len(str(error)) < 400  # noqa: PT017
        return
    assert 1 <= pool.instances <= MAX_INSTANCES
    assert pool.cores >= 1
    assert pool.label is None or "=" in pool.label


def test_toml_is_read_by_the_reader_of_strangers_files() -> None:
    with pytest.raises(ValueError, match="key of more than"):
        parse_toml(b"a." * 40 + b"b = 1")


INSTANCES = [
    {"server": server, "index": index, "name": f"mixed-{index}-1", "node": node, "node_id": node * 2} | state
    for server, index, node, state in [
        ("aa", 0, "10.0.0.1", {"state": "running"}),
        ("aa", 1, "10.0.0.2", {"state": "running"}),
        ("bb", 0, "10.0.0.1", {"state": "running"}),
        ("bb", 1, "10.0.0.2", {"state": "starting"}),
    ]
]


def test_an_instance_is_named_with_its_server_where_two_have_one_of_that_name() -> None:
    def places(name: str) -> list[tuple[str, int]]:
        return [(str(own["server"]), int(own["index"])) for own in named_instances(INSTANCES, name)]

    assert places("mixed-0-1@aa") == places("mixed-0@aa") == [("aa", 0)]
    assert places("10.0.0.2") == places("10.0.0.210.0.0.2") == [("aa", 1), ("bb", 1)]
    with pytest.raises(UsageError, match="of several servers: mixed-0-1@aa, mixed-0-1@bb"):
        places("mixed-0-1")
    with pytest.raises(UsageError, match="no instance and no node is called 'mixed-9'"):
        places("mixed-9")
    with pytest.raises(UsageError, match="no instance and no node"):
        places("")


def test_the_last_instance_that_takes_requests_is_not_drained() -> None:
    refuse_the_last(INSTANCES, named_instances(INSTANCES, "mixed-0@aa"))
    for name in ("mixed-0@bb", "10.0.0.1"):
        with pytest.raises(UsageError, match="server bb would have no instance"):
            refuse_the_last(INSTANCES, named_instances(INSTANCES, name))
