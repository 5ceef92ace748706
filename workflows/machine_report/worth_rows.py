"""The worth of tuning as rows of words, which the page and the terminal put into tables of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from phasewise._words import counted, multiple, number, plural

if TYPE_CHECKING:
    from phasewise.kerneldb.records import MachineKey
    from phasewise.workflows.machine_report.worth import ModelSpeed, ProductGains, Worth

PRODUCT_COLUMNS = ("kernels", "format", "rows", "tuned", "gain", "interval", "most")
MODEL_COLUMNS = ("tokens/s of", "step", "before", "after", "gain", "interval")


class MachineWorth(NamedTuple):
    """The rows of one kind of machine. `products`: PRODUCT_COLUMNS, `models`: MODEL_COLUMNS."""

    machine: MachineKey
    is_imported: bool
    products: list[tuple[str, ...]]
    models: list[tuple[str, ...]]
    remarks: list[str]


def worth_by_machine(worth: Worth) -> Iterator[MachineWorth]:
    """In the order of the database's machines, those measured here first."""
    groups: dict[tuple[MachineKey, bool], tuple[list[ProductGains], list[ModelSpeed]]] = {}
    for (machine, verified), products in groupby(worth.products, lambda one: (one.machine, one.verified)):
        groups.setdefault((machine, not verified), ([], []))[0].extend(products)
    for one in worth.models:
        groups.setdefault((one.machine, not one.verified), ([], []))[1].append(one)
    for (machine, is_imported), (products_of, models) in sorted(
        groups.items(), key=lambda item: (item[0][1], repr(item[0][0]))
    ):
        missing = {
            name: found for (other, name), found in worth.unmeasured.items() if other == machine and models
        }
        yield MachineWorth(
            machine,
            is_imported,
            [_product_row(one) for one in products_of],
            [_model_row(one) for one in models],
            [*_remarks(products_of, models, missing)],
        )


def _product_row(one: ProductGains) -> tuple[str, ...]:
    first, last = one.rows
    rows = f"{first}" if first == last else f"{first} up" if last is None else f"{first}-{last}"
    return (
        *(one.kernels, one.format, rows, f"{one.tuned}/{one.products}", f"{one.gain:.3f}"),
        f"{one.gain_low:.3f}-{one.gain_high:.3f}" if one.tuned else "none",
        f"{one.most:.2f}",
    )


def _model_row(one: ModelSpeed) -> tuple[str, ...]:
    step = one.step
    what = f"prompt of {step.tokens}" if step.phase == "prefill" else f"decode x {step.sequences}"
    found = one.comparison
    interval = "not in pairs"
    if found is not None:
        interval = f"{found.gain_low:.3f}-{found.gain_high:.3f}" if found.gain_low > 0 else "too few pairs"
    gain = one.gain if found is None else found.gain
    rates = (number(one.before_tokens_per_s, 4), number(one.after_tokens_per_s, 4))
    return (one.model_key, what, *rates, f"{gain:.3f}", interval)


def _remarks(
    products: Sequence[ProductGains], models: Sequence[ModelSpeed], missing: dict[str, Sequence[int]]
) -> Iterator[str]:
    count, tuned = sum(one.products for one in products), sum(one.tuned for one in products)
    if count:
        weighed = 1.0
        for one in products:
            weighed *= one.gain ** (one.products / count)
        yield (
            f"{tuned} of {counted(count, 'product')} run by a tuned schedule, {count - tuned} by the default:"
            f" {multiple(weighed, 3)} in the mean over all of them."
        )
    idle = [f"{one.kernels} {one.format}, rows {_product_row(one)[2]}" for one in products if not one.tuned]
    if idle:
        yield f"Nothing was gained: {'; '.join(idle)}."
    even = [
        _model_row(one)[0] + ", " + _model_row(one)[1]
        for one in models
        if (one.gain if one.comparison is None else one.comparison.gain_low) <= 1.0
    ]
    if even:
        yield f"No gain is shown for the whole model: {'; '.join(even)}."
    for model, sequences in missing.items():
        what = ", ".join(map(str, sequences))
        yield f"{model}: decode was not measured at {what} {plural(sequences[-1], 'sequence')}."
