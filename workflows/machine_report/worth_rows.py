"""The worth of tuning as rows of words, which the page and the terminal put into tables of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from phasewise._words import NOTHING, counted, multiple, number, plural, proven
from phasewise.tuner.standing import MeasuredRatio, mean_of

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
    for (machine, verified), products in groupby(
        worth.products, lambda gains: (gains.machine, gains.verified)
    ):
        groups.setdefault((machine, not verified), ([], []))[0].extend(products)
    for speed in worth.models:
        groups.setdefault((speed.machine, not speed.verified), ([], []))[1].append(speed)
    for (machine, is_imported), (products_of, models) in sorted(
        groups.items(), key=lambda item: (item[0][1], repr(item[0][0]))
    ):
        missing = {
            name: sequences
            for (other, name), sequences in worth.unmeasured.items()
            if other == machine and models
        }
        yield MachineWorth(
            machine,
            is_imported,
            [_product_row(gains) for gains in products_of],
            [_model_row(speed) for speed in models],
            [*_remarks(products_of, models, missing)],
        )


def _product_row(gains: ProductGains) -> tuple[str, ...]:
    first, last = gains.rows
    rows = f"{first}" if first == last else f"{first} up" if last is None else f"{first}-{last}"
    return (
        *(gains.kernels, gains.format, rows, f"{gains.tuned}/{gains.products}"),
        proven(gains.gain, gains.gain_low, gains.gain_high, 3),
        f"{gains.gain_low:.3f}-{gains.gain_high:.3f}" if gains.tuned else "none",
        NOTHING if gains.most is None else multiple(gains.most),
    )


def _model_row(speed: ModelSpeed) -> tuple[str, ...]:
    step = speed.step
    what = f"prompt of {step.tokens}" if step.phase == "prefill" else f"decode x {step.sequences}"
    gain, low, high = (getattr(speed.comparison, name) for name in ("gain", "gain_low", "gain_high"))
    interval = f"{low:.3f}-{high:.3f}" if low > 0 else "too few pairs"
    rates = (number(speed.before_tokens_per_s, 4), number(speed.after_tokens_per_s, 4))
    return (speed.model_key, what, *rates, proven(gain, low, high, 3), interval)


def _remarks(
    products: Sequence[ProductGains], models: Sequence[ModelSpeed], missing: dict[str, Sequence[int]]
) -> Iterator[str]:
    count, tuned = sum(gains.products for gains in products), sum(gains.tuned for gains in products)
    if count:
        ratios = [MeasuredRatio(gains.gain, gains.gain_low, gains.gain_high) for gains in products]
        mean = mean_of(
            ratio for gains, ratio in zip(products, ratios, strict=True) for _ in range(gains.products)
        )
        yield (
            f"{tuned} of {counted(count, 'product')} run by a tuned schedule, {count - tuned} by the default:"
            f" {proven(mean.gain, mean.low, mean.high, 3)} in the mean over all of them."
        )
    idle = [
        f"{gains.kernels} {gains.format}, rows {_product_row(gains)[2]}"
        for gains in products
        if not gains.tuned
    ]
    if idle:
        yield f"Nothing was gained: {'; '.join(idle)}."
    even = [
        _model_row(speed)[0] + ", " + _model_row(speed)[1]
        for speed in models
        if not speed.comparison.proves_faster
    ]
    if even:
        yield f"No gain is shown for the whole model: {'; '.join(even)}."
    for model, sequences in missing.items():
        what = ", ".join(map(str, sequences))
        yield f"{model}: decode was not measured at {what} {plural(sequences[-1], 'sequence')}."
