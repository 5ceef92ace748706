"""The text of `--explain` about bands of decode's plan: a table for each, by the sequences it begins at."""

from __future__ import annotations

from phasewise.cli.explain_text import uses_fields, uses_text
from phasewise.tuner.plans import Phase
from phasewise.workflows.opening.tuned_schedules import ScheduleUse


def use(phase: Phase, from_sequences: int) -> ScheduleUse:
    return ScheduleUse(
        *(phase, "head", "int4", 64, 32, "fma", 1, 1, 8, "default: nothing tuned", None),
        from_sequences=from_sequences,
    )


def test_each_band_has_a_table() -> None:
    uses = [use("prefill", 1), use("decode", 1), use("decode", 8), use("decode", 32)]

    told = uses_text(uses).splitlines()

    titles = [line.partition("  ")[0] for line in told if "schedule" in line]
    assert titles == ["prefill", "decode", "decode from 8", "decode from 32"]
    assert sum(line.startswith("head") for line in told) == 4
    assert [fields["from_sequences"] for fields in uses_fields(uses)] == [1, 1, 8, 32]
