"""Lines of activations that cross nodes in a decode step: columns with gathers, and rows with all-reduces.

    python benchmarks/lines_across_nodes.py smollm2-135m-instruct llama-1b [--nodes 4] [--rows 1]

A rank on each node. By columns (decision 0014) every node reads what the others computed of a row: twice the
hidden state, attention's output and the row between gate, up and down. By rows of every second weight there
are two sums of the hidden state in a layer: a rank reads the others' parts of its chunk, then all read the
chunks (rank-shifted all-reduce). A line counts once for each node that reads it. Weights that a step reads
are told beside it; barriers are the same in both. Up to 8 rows, as each rank prepares those for itself.
A model is a known name or file, or a shape of random_gguf.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from benchmarks.harness import Yielded, commands
from benchmarks.random_gguf import SHAPES
from phasewise.workflows.opening.model_shape import shape_of_reference

LINE_FLOATS = 16
BARRIERS_OF_A_LAYER = 5


@dataclass(frozen=True)
class Widths:
    """Floats of a row at each place of a layer."""

    layers: int
    hidden: int
    attention: int
    ffn: int

    def by_columns(self, nodes: int) -> float:
        """Floats of one row that all nodes read of others in a step."""
        return self.layers * (nodes - 1) * (2 * self.hidden + self.attention + self.ffn)

    def by_rows(self, nodes: int) -> float:
        """The same; two all-reduces read the hidden state twice each: to sum it, and to gather it."""
        return self.layers * (nodes - 1) * 2 * 2 * self.hidden


def widths_of(model: str) -> tuple[Widths, int | None]:
    """And the bytes of weights that a step reads, where there is a file."""
    if model in SHAPES:
        shape = SHAPES[model]
        return Widths(shape.layers, shape.hidden, shape.hidden, shape.ffn), None
    reference = shape_of_reference(model, "native")
    return Widths(
        reference.n_layers, reference.hidden, reference.n_heads * reference.head_dim, reference.ffn
    ), reference.weight_bytes


def lines_across_nodes(
    models: Annotated[list[str], Argument()],
    nodes: int = 4,
    rows: Annotated[int, Option(min=1, max=8, help="sequences of the step")] = 1,
) -> Yielded:
    for model in models:
        widths, weight_bytes = widths_of(model)
        columns = rows * widths.by_columns(nodes) / LINE_FLOATS
        sums = rows * widths.by_rows(nodes) / LINE_FLOATS
        yield {
            "model": model,
            "nodes": nodes,
            "rows": rows,
            "by columns, lines": columns,
            "by rows, lines": sums,
            "columns over rows": columns / sums,
            "by columns, KiB": columns / 16,
            "of the weights read, %": 6400 * columns / weight_bytes if weight_bytes else None,
            "barriers' lines, both": BARRIERS_OF_A_LAYER * widths.layers * (nodes - 1),
        }


app = commands(__doc__, lines_across_nodes)

if __name__ == "__main__":
    app()
