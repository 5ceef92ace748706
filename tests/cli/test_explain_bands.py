"""The text of `--explain` about bands of decode's plan: a table for each, by the sequences it begins at."""

from __future__ import annotations

from dataclasses import replace

from phasewise.cli.explain_text import uses_text
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


def test_a_row_fits_eighty_columns_whatever_it_says_and_what_is_not_dense_is_told_below() -> None:
    schedule = {"mr": 32, "panels": 4, "threads_m": 1, "threads_n": 16, "threads_k": 1}
    stored = ScheduleUse(
        phase="decode",
        used_for="layers.*.shared_gate_up, layers.*.expert_gate_up",
        format="iq4_xs",
        n=151936,
        k=18944,
        compute_path="int8_block",
        k_parts=1,
        first_m=129,
        last_m=512,
        why="neighbour: measured for 512 rows",
        schedule=schedule,
        storage="sparse, 0.50 kept",
        storage_why="bytes: 0.56 of dense",
    )
    dense = replace(stored, n=64, storage="dense", storage_why="")

    *table, told, why = uses_text([stored, dense]).splitlines()

    assert max(map(len, table)) <= 80
    assert "expert_gate_up" in "\n".join(table)
    assert (told, why) == ("iq4_xs 151936 x 18944: sparse, 0.50 kept", "  bytes: 0.56 of dense")
