"""The names by which instances are drained."""

from __future__ import annotations

import pytest

from phasewise.workflows.cluster_status import named_instances, refuse_the_last
from phasewise.workflows.errors import UsageError

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
