"""The worth of tuning in tables of 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from phasewise.cli.commands.topo.text import core_words
from phasewise.cli.present import on_one_line, say
from phasewise.workflows.machine_report.worth_rows import MODEL_COLUMNS, PRODUCT_COLUMNS, worth_by_machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phasewise.workflows.machine_report.worth import Worth

WIDTH = 80
MAX_WORD_CHARS = 22


def print_worth(worth: Worth) -> None:
    """A machine after another: the whole model first, then products, then where nothing was gained."""
    if not worth.products and not worth.models:
        say("Nothing was tuned yet: `phasewise tune-kernels MODEL` measures the gain.")
    for machine_worth in worth_by_machine(worth):
        told = " (imported: measured elsewhere)" if machine_worth.is_imported else ""
        core = core_words(machine_worth.machine.core_sig).replace("+", " ")
        say(textwrap.fill(on_one_line(f"{machine_worth.machine.placement_sig}{told}; {core}"), WIDTH))
        say("")
        if machine_worth.models:
            _print_table(MODEL_COLUMNS, machine_worth.models, ["left", "left"])
        if machine_worth.products:
            _print_table(PRODUCT_COLUMNS, machine_worth.products, ["left", "left", "right"])
        for remark in machine_worth.remarks:
            say(textwrap.fill(on_one_line(remark), WIDTH))
        say("")


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], aligned: list[str]) -> None:
    from tabulate import tabulate

    cells = [[_shortened(on_one_line(cell)) for cell in row] for row in rows]
    sides = aligned + ["right"] * (len(columns) - len(aligned))
    say(tabulate(cells, headers=columns, disable_numparse=True, colalign=sides))
    say("")


def _shortened(text: str) -> str:
    """The end of a long name tells more than its beginning: a model's has the format."""
    return text if len(text) <= MAX_WORD_CHARS else "..." + text[3 - MAX_WORD_CHARS :]
