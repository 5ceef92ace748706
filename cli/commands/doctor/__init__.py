"""`phasewise doctor`: what on this host keeps it from its limit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from phasewise.cli.options import DbOption, JsonOption
from phasewise.cli.present import note, print_json, say

EXIT_FINDINGS = 1


def doctor(
    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            metavar="DIR",
            help="examine a snapshot: a folder with its /proc and /sys [default: this host]",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit with 1 if anything is found, for use in scripts")
    ] = False,
    bits: Annotated[
        bool,
        typer.Option(
            "--bits",
            help="compute known results on every core and with every instruction set, in place of all else",
        ),
    ] = False,
    decode: Annotated[
        str | None,
        typer.Option(
            "--decode",
            metavar="MODEL",
            help="time MODEL for some seconds and explain why decoding is not faster, in place of all else",
        ),
    ] = None,
    as_json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Find what keeps this host from its limit: quotas, clocks, pages, placement, unused instruction sets.

    $ phasewise doctor
    $ phasewise doctor --decode smollm2-135m-instruct

    Each finding has its evidence (file and value), what it means, and a remedy; the severest come first.
    Nothing is changed. The exit code is 0 whatever is found, unless --strict is given. With --bits, which
    takes a minute at most, it is 1 if any bit is wrong: the build is broken, or a core is.

    --decode reads the processor's counters where the host lets one, and says why where not.
    """
    if bits:
        _check_bits(as_json)
        return
    if decode is not None:
        _explain_decode(decode, db, as_json)
        return
    from phasewise.cli.commands.doctor.text import doctor_fields, doctor_lines
    from phasewise.tuner.doctor import examine
    from phasewise.workflows.doctor_host import snapshot_host, this_host

    host = this_host(db) if root is None else snapshot_host(root)
    findings = examine(host)
    if as_json:
        print_json(doctor_fields(host, findings))
    else:
        for line in doctor_lines(host, findings, sys.stdout.encoding):
            say(line)
    if strict and findings:
        sys.exit(EXIT_FINDINGS)


def _explain_decode(model: str, db: str | None, as_json: bool) -> None:
    from phasewise.cli.commands.doctor.text import decode_fields, decode_lines
    from phasewise.tuner.doctor.decode import explain_decode
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.doctor_decode import decode_figures

    with user_lock(note).turn():
        figures = decode_figures(model, db, note)
    findings = explain_decode(figures)
    if as_json:
        print_json(decode_fields(figures, findings))
    else:
        for line in decode_lines(figures, findings, sys.stdout.encoding):
            say(line)


def _check_bits(as_json: bool) -> None:
    from phasewise.cli.commands.doctor.text import bits_fields, bits_lines
    from phasewise.workflows.replay.bits_check import check_bits

    outcomes = check_bits(note)
    if as_json:
        print_json(bits_fields(outcomes))
    else:
        for line in bits_lines(outcomes):
            say(line)
    if any(outcome.problem for outcome in outcomes):
        sys.exit(EXIT_FINDINGS)
