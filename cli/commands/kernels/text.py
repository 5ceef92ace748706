"""Results about users' kernels as text and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phasewise._words import counted, multiple
from phasewise.cli.present import goes_on
from phasewise.ir.original import is_original
from phasewise.kerneldb.user_kernels import UserPromotion

if TYPE_CHECKING:
    from phasewise.workflows.user_kernels.files import Checked
    from phasewise.workflows.user_kernels.tune import ShapeOutcome


def checked_text(found: Sequence[Checked]) -> str:
    """One line for each instruction set."""
    return "\n".join(f"{one.target:14} {_verdict(one)}" for one in found)


def _verdict(one: Checked) -> str:
    if one.verdict is None:
        return f"not run: {one.missing}"
    if one.verdict.is_exact:
        return f"{counted(one.verdict.cases, 'call')}, all bits equal"
    return f"{counted(one.verdict.cases, 'call')}, at most {one.verdict.worst:.2e} from the original"


def checked_fields(one: Checked) -> dict[str, Any]:
    """One target's verdict."""
    if one.verdict is None:
        return {"target": one.target, "missing": one.missing}
    verdict = one.verdict
    return {"target": one.target, "cases": verdict.cases, "worst": verdict.worst, "exact": verdict.is_exact}


def listed_fields(promotions: Sequence[UserPromotion]) -> list[dict[str, Any]]:
    """Kernels with the number of their tuned shapes."""
    shapes: dict[tuple[str, str], set[object]] = {}
    for one in promotions:
        key = (one.problem.name, one.problem.kernel_abi)
        shapes.setdefault(key, set()).add((one.problem.shape, one.origin.machine.core_sig))
    return [{"name": name, "key": key, "shapes": len(found)} for (name, key), found in shapes.items()]


def listed_text(promotions: Sequence[UserPromotion]) -> str:
    """One line for each kernel and build."""
    rows = listed_fields(promotions)
    if not rows:
        return "no kernels; tune one: phasewise tune-kernels --kernel KERNEL.kir --shapes .."
    return "\n".join(f"{one['name']:20} {one['shapes']:3} shapes  {one['key']}" for one in rows)


def newest(promotions: Sequence[UserPromotion]) -> list[UserPromotion]:
    """The choice in use: the last promotion of each build, shape and kind of core."""
    return list({(one.problem, one.origin.machine): one for one in promotions}.values())


def shown_fields(promotions: Sequence[UserPromotion]) -> list[dict[str, Any]]:
    """The choice in use for each shape."""
    return [
        {
            "key": one.problem.kernel_abi,
            "core": one.origin.machine.core_sig,
            "shape": dict(one.problem.shape),
            "parameters": dict(one.choice),
            "compared_with": dict(one.incumbent),
            "gain": one.comparison.gain,
            "gain_low": one.comparison.gain_low,
            "gain_high": one.comparison.gain_high,
        }
        for one in newest(promotions)
    ]


def shown_text(promotions: Sequence[UserPromotion]) -> str:
    """One line for each shape."""
    return "\n".join(
        f"{one.problem.describe():28} {_numbers(one.choice):32} {one.comparison.gain:6.2f} times as fast as "
        f"{_numbers(one.incumbent)}"
        for one in newest(promotions)
    )


def tuned_text(outcomes: Sequence[ShapeOutcome], *, resume: bool = True) -> str:
    """One line for each shape that was tuned; and how to go on where time was short."""
    lines = []
    for one in outcomes:
        state = "" if one.is_complete else "  (out of time)"
        lines.append(
            f"{one.problem.describe():28} {_numbers(one.choice):32} {_gain(one)}  "
            f"{one.timed} timed, {one.replayed} from the database{state}"
        )
    if not all(one.is_complete for one in outcomes):
        lines.append(goes_on(resume))
    return "\n".join(lines)


def _gain(one: ShapeOutcome) -> str:
    """E.g. `2.40x the author's C (1.14x the choice before)`."""
    baseline = "the author's C" if is_original(dict(one.baseline)) else "the first parameters"
    if one.choice == one.baseline:
        return f"{baseline}: nothing proven faster"
    before = "" if one.before_gain is None else f" ({multiple(one.before_gain)} the choice before)"
    return f"{multiple(one.baseline_gain)} {baseline}{'' if one.before == one.baseline else before}"


def tuned_fields(one: ShapeOutcome) -> dict[str, Any]:
    """One shape's outcome."""
    return {
        "key": one.problem.kernel_abi,
        "shape": dict(one.problem.shape),
        "parameters": dict(one.choice),
        "gain": one.gain,
        "gain_low": one.gain_low,
        "baseline": dict(one.baseline),
        "baseline_gain": one.baseline_gain,
        "before": dict(one.before),
        "before_gain": one.before_gain,
        "default_ns": one.default_ns,
        "best_ns": one.best_ns,
        "timed": one.timed,
        "replayed": one.replayed,
        "complete": one.is_complete,
    }


def _numbers(choice: Sequence[tuple[str, int]]) -> str:
    if is_original(dict(choice)):
        return "the original"
    return " ".join(f"{name}={value}" for name, value in choice) or "no parameters"
