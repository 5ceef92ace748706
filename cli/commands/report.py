"""`phasewise report`: what tuning is worth."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phasewise.cli.commands.topo.text import core_words
from phasewise.cli.options import DbOption, JsonOption
from phasewise.cli.present import note, on_one_line, print_json, say
from phasewise.cli.tables import WIDTH, show, table_of_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.kerneldb.records import MachineKey
    from phasewise.workflows.tuning_worth import ModelSpeed, ProductGains, Worth


def report(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Print what tuning gained.

    $ phasewise report
    $ phasewise report --json

    Printed: gains over the default schedules with their intervals, by kind of
    machine, format and rows; a whole model's tokens/s before and after, where
    tune-kernels or tune-config measured them; and where nothing was gained.
    """
    from phasewise.workflows.tuning_worth import worth_in

    worth = worth_in(db, note)
    if as_json:
        print_json(worth_fields(worth))
    else:
        print_worth(worth)


MAX_WORD_CHARS = 22


def print_worth(worth: Worth) -> None:
    """A machine after another: the whole model first, then products, then where nothing was gained."""
    from phasewise.workflows.tuning_worth import worth_by_machine

    if not worth.products and not worth.models:
        say("Nothing was tuned yet: `phasewise tune-kernels MODEL` measures the gain.")
    for machine_worth in worth_by_machine(worth):
        told = " (imported: measured elsewhere)" if machine_worth.is_imported else ""
        core = core_words(machine_worth.machine.core_sig).replace("+", " ")
        say(textwrap.fill(on_one_line(f"{machine_worth.machine.placement_sig}{told}; {core}"), WIDTH))
        say("")
        for rows in (machine_worth.models, machine_worth.products):
            if rows:
                table = table_of_rows(rows)
                show(replace(table, rows=[_shortened(row) for row in table.rows]), "")
        for remark in machine_worth.remarks:
            say(textwrap.fill(on_one_line(remark), WIDTH))
        say("")


def _shortened(row: Mapping[str, object]) -> dict[str, str]:
    """The end of a long name tells more than its beginning: a model's has the format."""
    cells = {name: on_one_line(cell) for name, cell in row.items()}
    return {
        name: cell if len(cell) <= MAX_WORD_CHARS else "..." + cell[3 - MAX_WORD_CHARS :]
        for name, cell in cells.items()
    }


def worth_fields(worth: Worth) -> dict[str, Any]:
    """All of it. `gain` is over the kernels' own schedules; 1 where the default stayed."""
    return {
        "products": [_product_fields(gains) for gains in worth.products],
        "models": [_model_fields(speed) for speed in worth.models],
        "nothing_gained": {
            "products": [_product_fields(gains) for gains in worth.nothing_gained],
            "models": [_model_fields(speed) for speed in worth.models_without_gain],
        },
        "not_measured": [
            {"machine": _machine_fields(machine), "model": model, "decode_sequences": list(missing)}
            for (machine, model), missing in worth.unmeasured.items()
        ],
    }


def _machine_fields(machine: MachineKey) -> dict[str, str]:
    return {"core": machine.core_sig, "placement": machine.placement_sig}


def _product_fields(gains: ProductGains) -> dict[str, Any]:
    first, last = gains.rows
    return {
        "machine": _machine_fields(gains.machine),
        "measured_here": gains.verified,
        "kernels": gains.kernels,
        "format": gains.format,
        "rows": {"first": first, "last": last},
        "products": gains.products,
        "tuned": gains.tuned,
        "gain": gains.gain,
        "gain_low": gains.gain_low,
        "gain_high": gains.gain_high,
        "most": gains.most,
    }


def _model_fields(speed: ModelSpeed) -> dict[str, Any]:
    return {
        "machine": _machine_fields(speed.machine),
        "measured_here": speed.verified,
        "model": speed.model_key,
        "step": speed.step,
        "before_tokens_per_s": speed.before_tokens_per_s,
        "after_tokens_per_s": speed.after_tokens_per_s,
        "gain": speed.comparison.gain,
        "comparison": speed.comparison,
    }
