"""`phasewise doctor`: findings about what keeps this host from its limit."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise._options import option, refuse_unused
from phasewise._words import counted
from phasewise.cli.options import JsonOption
from phasewise.cli.present import EXIT_FAILURE, note
from phasewise.cli.tables import WIDTH, present
from phasewise.topology.outline import count_words
from phasewise.tuner.doctor import CHECKS, not_examined
from phasewise.tuner.doctor.memory import computing_processes
from phasewise.workflows.options import DB

if TYPE_CHECKING:
    from phasewise.tuner.doctor import Finding, Host
    from phasewise.tuner.doctor.decode import DecodeFigures
    from phasewise.workflows.replay.bits_check import BitsOutcome


def doctor(
    root: Path | None = option(
        None, "examine a snapshot: a folder with its /proc and /sys [default: this host]", metavar="DIR"
    ),
    strict: bool = option(False, "exit with 1 if anything is found, for use in scripts"),
    bits: bool = option(
        False, "compute known results on every core and with every instruction set, in place of all else"
    ),
    decode: str | None = option(
        None,
        "time MODEL for some seconds and explain why decoding is not faster, in place of all else",
        metavar="MODEL",
    ),
    as_json: JsonOption = False,
    db: str | None = DB(None),
) -> None:
    """Find what keeps this host from its limit: quotas, clocks, pages, placement, unused instruction sets.

    $ phasewise doctor
    $ phasewise doctor --decode smollm2-135m-instruct

    Each finding has its evidence (file and value), what it means, and a remedy; the severest come first.
    Nothing is changed. The exit code is 0 whatever is found, unless --strict is given. With --bits, which
    takes a minute at most, it is 1 if any bit is wrong: the build is broken, or a core is.
    """
    given = [name for name, value in (("root", root), ("strict", strict)) if value]
    kept = [] if db is None else ["db"]
    if bits:
        refuse_unused("with --bits", [*given, *kept, *([] if decode is None else ["decode"])])
        _check_bits(as_json)
        return
    if decode is not None:
        refuse_unused("with --decode", given)
        _explain_decode(decode, db, as_json)
        return
    from phasewise.tuner.doctor import examine
    from phasewise.workflows.doctor import snapshot_host, this_host

    if root is not None:
        refuse_unused("with --root", kept)
    host = this_host(db) if root is None else snapshot_host(root)
    findings = examine(host)
    present(as_json, doctor_fields(host, findings), doctor_lines(host, findings, sys.stdout.encoding))
    if strict and findings:
        sys.exit(EXIT_FAILURE)


def _explain_decode(model: str, db: str | None, as_json: bool) -> None:
    from phasewise.tuner.doctor.decode import explain_decode
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.doctor import decode_figures

    with user_lock(note).turn():
        figures = decode_figures(model, db, note)
    findings = [explain_decode(figures)]
    fields = {"figures": figures, "findings": _findings_fields(findings)}
    present(as_json, fields, decode_lines(figures, findings, sys.stdout.encoding))


def _check_bits(as_json: bool) -> None:
    from phasewise.workflows.replay.bits_check import check_bits

    outcomes = check_bits(note)
    n_wrong = sum(outcome.problem is not None for outcome in outcomes)
    present(as_json, {"outcomes": outcomes, "problems": n_wrong}, bits_lines(outcomes))
    if n_wrong:
        sys.exit(EXIT_FAILURE)


LABEL_WIDTH = 10


def doctor_fields(host: Host, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "source": host.machine.source,
        "findings": _findings_fields(findings),
        "checks": list(CHECKS),
        "not_examined": list(not_examined(host)),
        "processes": [
            {"pid": own.pid, "bytes_by_node": own.bytes_by_node, "local_reads": own.local_reads}
            for own in computing_processes(host)
        ],
        "products": None if host.tuned is None else host.tuned.products.by_state(),
        "shipped": None if host.tuned is None else host.tuned.shipped,
        "shipped_kinds": None if host.tuned is None else list(host.tuned.shipped_kinds),
    }


def doctor_lines(host: Host, findings: Sequence[Finding], encoding: str) -> list[str]:
    """Text of the findings in lines of at most 80 characters, all of which `encoding` can write."""
    lines = _wrap("", f"{host.machine.source}: {count_words(host.machine)}")
    for fact in _facts(host):
        lines += _wrap("", fact)
    lines += _finding_lines(findings)
    if findings:
        lines += ["", f"{counted(len(findings), 'finding')} by {counted(len(CHECKS), 'check')}."]
    else:
        lines += [f"Nothing found that keeps it from its limit ({counted(len(CHECKS), 'check')})."]
    missing = not_examined(host)
    if missing:
        lines += _wrap("", f"Not told here, so not examined: {', '.join(missing)}.")
    return [line.encode(encoding, "replace").decode(encoding) for line in lines]


def decode_lines(figures: DecodeFigures, findings: Sequence[Finding], encoding: str) -> list[str]:
    """Text of `--decode` in lines of at most 80 characters, all of which `encoding` can write."""
    lines = _wrap("", f"{figures.model} on {counted(figures.n_cores, 'core')}")
    for fact in figures.describe():
        lines += _wrap("", fact)
    return [line.encode(encoding, "replace").decode(encoding) for line in [*lines, *_finding_lines(findings)]]


def _findings_fields(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [vars(finding) | {"severity": finding.severity.name} for finding in findings]


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    lines: list[str] = []
    for number, finding in enumerate(findings, start=1):
        lines += ["", *_wrap(f"{number}. {finding.severity.name}: ", finding.title)]
        for evidence in finding.evidence:
            lines += _wrap("   seen in ", f"{evidence.source}: {evidence.value}")
        lines += [*_wrap("   means ", finding.meaning), *_wrap("   remedy ", finding.remedy)]
    return lines


def _facts(host: Host) -> Iterator[str]:
    """Yield facts from which no finding follows: the state of tuning, and the memory of processes."""
    if host.tuned is not None:
        yield f"Products of these cores: {host.tuned.products.describe()}."
        if host.tuned.shipped:
            yield (
                f"The package brings {counted(host.tuned.shipped, 'schedule')} for such cores: "
                "lowest in trust, timed here before any is used."
            )
        elif host.tuned.shipped_kinds:
            kinds = "; ".join(host.tuned.shipped_kinds)
            yield f"The package brings schedules for {kinds}, but none for such cores."
    for process in computing_processes(host):
        yield f"Memory of phasewise's process {process.pid}: {process.describe()}."


def bits_lines(outcomes: Sequence[BitsOutcome]) -> list[str]:
    """A line for each wrong outcome, and a line about what was checked."""
    lines = [
        f"wrong: {outcome.isa} on core {outcome.core}, weights in {outcome.weights}, "
        f"keys and values in {outcome.kv_format}: {outcome.problem}"
        for outcome in outcomes
        if outcome.problem is not None
    ]
    names = list(dict.fromkeys(outcome.isa for outcome in outcomes))
    unknown = [
        f"{outcome.weights} by {outcome.arithmetic} on {outcome.isa}"
        for outcome in outcomes
        if not outcome.is_known
    ]
    if unknown:
        lines += [f"no results are known for weights in {', '.join(unknown)}: only compared with each other"]
    cores = len({outcome.core for outcome in outcomes})
    return [
        *lines,
        f"{counted(len(outcomes), 'computation')} with {', '.join(names)}; {counted(cores, 'core')}",
        f"{len(lines) - bool(unknown)} wrong" if len(lines) > bool(unknown) else "all bits are right",
    ]


def _wrap(label: str, text: str) -> list[str]:
    """Wrap a paragraph after its label, below the text's beginning; a path longer than a line is cut."""
    label = label.ljust(LABEL_WIDTH + 1) if label.startswith(" ") else label
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label) if label.startswith(" ") else "   " if label else "  ",
        break_on_hyphens=False,
    )
