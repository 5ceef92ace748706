"""llama-bench's habits on `phasewise bench run`: flags given several times, or that say what holds anyway.

What llama-bench has and this program has not is refused by its name, never ignored.
"""

from __future__ import annotations

from typing import Any

import typer

from phasewise.cli.command_app import GroupedCommand
from phasewise.workflows.bench.run_settings import LIST, PAIR

_NO_GPU = "everything is computed on CPUs"
_MEANT = "--threads and `taskset` say which cores are used"

FOREIGN: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {
    ("-ub", "--ubatch-size"): (("512",), "a step computes 512 rows at once"),
    ("-ngl", "--n-gpu-layers"): (("0",), _NO_GPU),
    ("-ncmoe", "--n-cpu-moe"): (("0",), _NO_GPU),
    ("-sm", "--split-mode"): (("none",), _NO_GPU),
    ("-mg", "--main-gpu"): (("0",), _NO_GPU),
    ("-nkvo", "--no-kv-offload"): (("0",), _NO_GPU),
    ("-dev", "--device"): (("none", "CPU"), _NO_GPU),
    ("-ts", "--tensor-split"): (("0", "0.00"), _NO_GPU),
    ("-ot", "--override-tensor", "--override-tensors"): ((), "weights have one kind of memory"),
    ("-nopo", "--no-op-offload"): (("0",), _NO_GPU),
    ("-rpc", "--rpc"): ((), "a model runs on one machine"),
    ("-fa", "--flash-attn"): (("1", "on", "auto"), "attention is always computed block by block"),
    ("-mmp", "--mmap"): (("1",), "weights are always mapped"),
    ("-embd", "--embeddings"): (("0",), "`phasewise bench embed` measures embeddings"),
    ("-C", "--cpu-mask"): (("0x0",), _MEANT),
    ("--cpu-strict",): (("1",), "threads are always pinned"),
    ("--poll",): (("0", "50", "100"), "threads always spin first, then sleep"),
    ("--numa",): (("distribute", "isolate"), "threads are always pinned; for numactl, start it before"),
    ("--prio",): (("0",), "use `nice` or `chrt`"),
    ("--delay",): (("0",), "tests follow each other at once"),
    ("-oe", "--output-err"): (("none",), "-o says the form on stdout; stderr has the progress"),
    ("-hf", "-hfr", "--hf-repo"): ((), "give the hub name as -m, e.g. -m org/name-GGUF:Q4_K_M"),
}
"""By flag: the values that say what holds here anyway, and why others cannot be followed."""

TOLD_ANYWAY = ("-v", "--verbose", "--progress")
"""Flags without a value that ask for what stderr always has."""

_BY_FLAG = {flag: meaning for flags, meaning in FOREIGN.items() for flag in flags}
_JOINED_BY = {LIST: ",", PAIR: ";"}


class LlamaBenchCommand(GroupedCommand):
    """`bench run`, whose lists may also be given flag by flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {
            flag: (parameter.opts[0], _JOINED_BY[parameter.metavar])
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "option" and parameter.metavar in _JOINED_BY
            for flag in parameter.opts
        }
        return super().parse_args(ctx, _joined(_without_foreign(args), lists))


def _without_foreign(args: list[str]) -> list[str]:
    """`args` without flags of llama-bench that say what holds here anyway; wrong usage for its others."""
    kept: list[str] = []
    index = 0
    while index < len(args):
        flag, has_value, value = args[index].partition("=")
        index += 1
        if flag not in _BY_FLAG:
            kept += [] if args[index - 1] in TOLD_ANYWAY else [args[index - 1]]
            continue
        if not has_value:
            value = args[index] if index < len(args) else ""
            index += 1
        holding, why = _BY_FLAG[flag]
        if not set(value.split(",")) <= set(holding):
            leave = f" or give {holding[0]}" if holding else ""
            raise typer.BadParameter(f"{flag} {value}: {why}; leave it out{leave}")
    return kept


def _joined(args: list[str], lists: dict[str, tuple[str, str]]) -> list[str]:
    """`-p 128 -p 512` as `-p 128,512`."""
    kept: list[str] = []
    values: dict[tuple[str, str], list[str]] = {}
    index = 0
    while index < len(args):
        flag, has_value, value = args[index].partition("=")
        index += 1
        if flag not in lists or (not has_value and index >= len(args)):
            kept.append(args[index - 1])
            continue
        if not has_value:
            value = args[index]
            index += 1
        values.setdefault(lists[flag], []).append(value)
    for (flag, between), given in values.items():
        kept += [flag, between.join(given)]
    return kept
