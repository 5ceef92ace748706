"""How many TopoTrees machines have, the paper's bounds, and how long it takes to meet every one:

    python benchmarks/tree_counts.py [machine.xml ...] [--json]

The paper's two largest machines are always among them: 2x EPYC 7H12 (256 PUs) and 4x Kunpeng 920 (192 cores),
built from their facts. The paper needs 1.18 to 600 s for the groupings alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

from phasewise.topology import Machine, read_lstopo
from phasewise.tuner.topotree import (
    OperatorLimits,
    count_grouped,
    every_configuration,
    every_tree,
    fundamental,
    group_bound,
)
from tests.support.paper_machines import epyc, kunpeng

LIMITS = OperatorLimits(n_heads=32, n_kv_heads=32, head_dim=128, ffn=11008)
"""Llama-2-7B, for the configurations."""


def counts(machine: Machine, power_of_two: bool) -> dict[str, Any]:
    """One row: meet every tree, then every configuration, and take the time of each."""
    tree = fundamental(machine).tree
    started_s = time.perf_counter()
    trees = sum(1 for _ in every_tree(tree, power_of_two=power_of_two))
    met_s = time.perf_counter()
    configurations = every_configuration(every_tree(tree, power_of_two=power_of_two), LIMITS)
    n_configurations = sum(1 for _ in configurations)
    return {
        "machine": Path(machine.source).name,
        "pus": tree.n_pus,
        "levels": " x ".join(f"{level.arity} {level.kind}" for level in tree.levels),
        "power_of_two": power_of_two,
        "groupings": count_grouped(tree, power_of_two=power_of_two),
        "bound": group_bound(tree.n_pus, power_of_two=power_of_two),
        "trees": trees,
        "trees_s": met_s - started_s,
        "configurations": n_configurations,
        "configurations_s": time.perf_counter() - met_s,
    }


def rows(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for machine in (*map(read_lstopo, paths), epyc(), kunpeng()):
        for power_of_two in (True, False):
            yield counts(machine, power_of_two)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("machines", type=Path, nargs="*", help="lstopo XML files")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of a table")
    arguments = parser.parse_args()
    found = list(rows(arguments.machines))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print(tabulate(found, headers="keys", floatfmt=".3g"))


if __name__ == "__main__":
    main()
