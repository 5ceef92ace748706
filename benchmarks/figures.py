"""Figures and tables of the papers, by this project's own workflows: one command for each.

    python benchmarks/figures.py                       # the list
    python benchmarks/figures.py windve-tables
    python benchmarks/figures.py searches --format f32 --shape 576,1536 --m 16

Each is a row of FIGURES: what it is in the paper, the function that makes its rows, and the columns that it
prints first. Rows that are measured are of this machine; a paper's own numbers stand in columns named so.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness import Measure, commands
from benchmarks.papers import ladder, machine_types, sandwich, searches, sparamx, unequal, windows, windve


@dataclass(frozen=True)
class Figure:
    """One figure or table. Its command is the function's name."""

    paper: str
    measure: Measure
    columns: tuple[str, ...]

    @property
    def command(self) -> str:
        return self.measure.__name__.replace("_", "-")


FIGURES = (
    Figure("Sandwich, Fig. 8: searches for kernels", searches.searches, ("format", "n", "k", "m", "search")),
    Figure("Sandwich, Table 1: parts of the plan left out in turn", ladder.ladder, ("rung",)),
    Figure("Sandwich, Tables 2 and 3: rules off in turn", sandwich.plans, ("machine", "phase", "rules")),
    Figure("Sandwich, Table 2 on described machines", sandwich.top_k, ("machine", "phase")),
    Figure("Sandwich, Table 3: sizes of the window", windows.windows, ("machine", "window")),
    Figure("Sandwich, Fig. 3 with unequal numbers", unequal.unequal_plans, ("machines", "phase")),
    Figure("Sandwich, section 4: numbers of TopoTrees", sandwich.trees, ("machine", "pus", "levels")),
    Figure("Splitwise: machine types of a profile or of runs", machine_types.machine_types, ("machine",)),
    Figure("WindVE, Tables I to III, Figs. 5 and 6", windve.windve_tables, ("table", "devices")),
    Figure("SparAMX, Table 2: sparse products", sparamx.sparse_products, ("layer", "contestant")),
)

app = commands(__doc__, *(figure.measure for figure in FIGURES))

if __name__ == "__main__":
    app()
