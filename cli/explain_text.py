"""Text and JSON of `--explain`: schedules, NUMA nodes of weights, shares of ranks, the rule of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasewise._words import counted, percent, plural

if TYPE_CHECKING:
    from phasewise.workflows.opening.drafts import DraftRule
    from phasewise.workflows.opening.memory_placement import MemoryPlacement
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse


_CELL_CHARS = 16
"""Most characters of a cell with a weight's names or shape; a longer text is wrapped, for 80 columns."""


def uses_text(
    uses: Sequence[ScheduleUse], memory: MemoryPlacement | None = None, drafts: DraftRule | None = None
) -> str:
    """Text of `--explain`: a table for each phase and band with a row for each use, then the nodes of weights
    and the rule of drafts. `--json` has all fields of a schedule."""
    from tabulate import tabulate

    tables = []
    for load in dict.fromkeys((use.phase, use.from_sequences) for use in uses):
        words = load[0] if load[1] == 1 else f"{load[0]} from {load[1]}"
        rows = [
            (
                use.used_for.replace("layers.*.", ""),
                _problem(use),
                str(use.first_m) if use.first_m == use.last_m else f"{use.first_m}-{use.last_m}",
                use.compute_path + (f" in {counted(use.k_parts, 'part')}" if use.k_parts > 1 else ""),
                "by the step" if use.schedule is None else f"{tile(use.schedule)}, {grid(use.schedule)}",
                use.why.partition(":")[0].partition(" ")[0],  # `default`, `exact` or `neighbour`
            )
            for use in uses
            if (use.phase, use.from_sequences) == load
        ]
        headers = (words, "format n x k", "rows", "by", "tile, grid", "schedule")
        widths = [_CELL_CHARS, _CELL_CHARS, *([None] * (len(headers) - 2))]
        tables.append(tabulate(rows, headers=headers, tablefmt="plain", maxcolwidths=widths))
    tables += dict.fromkeys(_storage(use) for use in uses if use.storage_why or use.storage != "dense")
    if memory is not None:
        tables.append(_memory_text(memory))
    if drafts is not None:
        tables.append(_rule_text(drafts))
    return "\n".join(tables)


def _storage(use: ScheduleUse) -> str:
    """The storage of a weight that could be sparse or dense, and the reason; all other weights are dense."""
    return f"{_problem(use)}: {use.storage}" + (f"\n  {use.storage_why}" if use.storage_why else "")


def _memory_text(memory: MemoryPlacement) -> str:
    from phasewise.tuner.plans import list_cores

    ranks = [
        f"rank {rank} on {plural(len(nodes), 'node')} {list_cores(nodes)}" + " by turns" * (len(nodes) > 1)
        for rank, nodes in enumerate(memory.rank_nodes)
        if nodes
    ]
    local = [f"{phase} {percent(share)}" for phase, share in memory.local_reads.items()]
    copies = f"  keys and values: {memory.kv_factor:.2f} times those of one rank, as ranks share KV heads"
    nodes_told = [
        "weights on NUMA nodes:",
        *(f"  {line}" for line in ranks),
        *(f"  node {node}: {n_bytes / 1e6:.1f} MB" for node, n_bytes in memory.bytes_by_node.items()),
        f"  reads that are local: {', '.join(local)}",
        *([copies] if memory.kv_factor > 1 else []),
    ]
    shares_told = [
        "shares of ranks, by what their cores were measured to do:",
        *(f"  {phase}: {', '.join(map(percent, own))}" for phase, own in memory.rank_shares.items()),
    ]
    told = nodes_told if memory.bytes_by_node else []
    return "\n".join(told + (shares_told if memory.rank_shares else []))


def _rule_text(drafts: DraftRule) -> str:
    source = "lookup in each sequence"
    if drafts.name is not None:
        kind = "model " if drafts.source == "model" else ""
        source = f"{kind}{drafts.name}, {drafts.weight_bytes / 1e6:.1f} MB"
    length = f"0 to {drafts.most} in a step: as many as give most tokens a second"
    rule = f"{length}, from {percent(drafts.least_gain - 1)} more on"
    if drafts.n_tokens is not None:
        rule = f"{drafts.n_tokens} in every step that has room for them"
    return f"drafts: {source}\n  {rule}"


def tile(schedule: Mapping[str, Any]) -> str:
    """The tile of a schedule, rows x columns."""
    return f"{schedule['mr']}x{16 * schedule['panels']}"


def grid(schedule: Mapping[str, Any]) -> str:
    """The threads of a schedule over m, n and k."""
    return "x".join(str(schedule[f"threads_{side}"]) for side in "mnk")


def _problem(use: ScheduleUse) -> str:
    return f"{use.format} {use.n} x {use.k}"
