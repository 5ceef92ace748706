"""The paper's Fig. 7 on this machine: how many times as fast as each library, over the number of tokens.

    phasewise bench kernels --format f32,bf16 --shape llama-1.3b --m 1,2,4,8,16,32,64,128,256,512 \\
        -o json > rows.json
    python benchmarks/fig7.py rows.json --svg fig7.svg

As there, a point stands for all products of a Llama-1.3B layer: the sum of their times, a peer's over ours. A
peer without one of the products at some number of tokens has no point there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from phasewise.workflows.bench.kernel_rows import KernelRow, rows_from_json
from phasewise.workflows.line_chart import Chart, Panel, draw_chart


def speedups(rows: Sequence[KernelRow]) -> dict[str, dict[int, float]]:
    """By peer and m: the peer's time over ours, each summed over the shapes."""
    by_m = {m: [row for row in rows if row.m == m] for m in sorted({row.m for row in rows})}
    peers = dict.fromkeys(peer for row in rows for peer in row.peers)
    return {
        peer: {
            m: sum(row.peers[peer] for row in layer) / sum(row.median_ns for row in layer)
            for m, layer in by_m.items()
            if all(peer in row.peers for row in layer)
        }
        for peer in peers
    }


def table(found: dict[str, dict[int, float]]) -> str:
    ms = sorted({m for line in found.values() for m in line})
    rows = [[peer, *(f"{line[m]:.2f}x" if m in line else "" for m in ms)] for peer, line in found.items()]
    aligned = ["left", *["right"] * len(ms)]
    headers = ["over", *(f"m = {m}" for m in ms)]
    return tabulate(rows, headers=headers, tablefmt="github", colalign=aligned, disable_numparse=True)


def figure(rows: Sequence[KernelRow]) -> str:
    """A panel a format."""
    panels = []
    for name in dict.fromkeys(row.format for row in rows):
        found = speedups([row for row in rows if row.format == name])
        lines = {peer: sorted(line.items()) for peer, line in found.items() if line}
        ms = [m for line in lines.values() for m, _ in line]
        panels.append(Panel(name, lines, [(min(ms), 1.0), (max(ms), 1.0)]))
    return draw_chart(
        Chart(
            title=f"A layer's products on {rows[0].threads} threads: phasewise against each library",
            caption=rows[0].core_signature,
            x_name="tokens m",
            y_name="times as fast",
            limit_name="as fast as the library",
            emphasised=None,
            panels=panels,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="of `phasewise bench kernels -o json`")
    parser.add_argument("--svg", type=Path, default=None)
    options = parser.parse_args()
    rows = rows_from_json(options.rows.read_text(encoding="utf-8"))
    for name in dict.fromkeys(row.format for row in rows):
        print(f"{name}\n\n{table(speedups([row for row in rows if row.format == name]))}\n")
    if options.svg is not None:
        options.svg.write_text(figure(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
