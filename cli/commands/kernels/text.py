"""Results about users' kernels as text and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phasewise._words import NO_VERDICT, counted, proven
from phasewise.cli.present import goes_on
from phasewise.ir.printing import is_original
from phasewise.kerneldb.records import UserPromotion

if TYPE_CHECKING:
    from phasewise.kerneldb.records import Comparison
    from phasewise.workflows.user_kernels.files import Checked
    from phasewise.workflows.user_kernels.tune import ShapeOutcome


def checked_text(outcome: Checked) -> str:
    """Text of a check's verdict for one target."""
    verdict = outcome.verdict
    if verdict is None:
        return f"{outcome.target:14} not run: {outcome.missing}"
    bits = "all bits equal" if verdict.is_exact else f"at most {verdict.worst:.2e} from the original"
    return f"{outcome.target:14} {counted(verdict.cases, 'call')}, {bits}"


def checked_fields(outcome: Checked) -> dict[str, Any]:
    """JSON fields of a check's verdict for one target."""
    verdict, target = outcome.verdict, outcome.target
    if verdict is None:
        return {"target": target, "missing": outcome.missing}
    return {"target": target, "cases": verdict.cases, "worst": verdict.worst, "exact": verdict.is_exact}


def listed_fields(promotions: Sequence[UserPromotion]) -> list[dict[str, Any]]:
    """JSON fields of kernels, with the number of tuned shapes of each."""
    shapes: dict[tuple[str, str], set[object]] = {}
    for promotion in promotions:
        key = (promotion.problem.name, promotion.problem.kernel_abi)
        shapes.setdefault(key, set()).add((promotion.problem.shape, promotion.origin.machine.core_sig))
    return [{"name": name, "key": key, "shapes": len(tuned)} for (name, key), tuned in shapes.items()]


def listed_text(rows: Sequence[dict[str, Any]]) -> str:
    """Text of `listed_fields`: one line for each kernel and build."""
    if not rows:
        return "no kernels; tune one: phasewise tune-kernels --kernel KERNEL.kir --shapes .."
    return "\n".join(f"{row['name']:20} {counted(row['shapes'], 'shape'):>10}  {row['key']}" for row in rows)


def newest(promotions: Sequence[UserPromotion]) -> list[UserPromotion]:
    """The choices in use: the last promotion of each build, shape and kind of core."""
    by_shape = {(promotion.problem, promotion.origin.machine): promotion for promotion in promotions}
    return list(by_shape.values())


def shown_fields(promotions: Sequence[UserPromotion]) -> list[dict[str, Any]]:
    """JSON fields of the choice in use for each shape."""
    return [
        {
            "key": promotion.problem.kernel_abi,
            "core": promotion.origin.machine.core_sig,
            "shape": dict(promotion.problem.shape),
            "parameters": dict(promotion.choice),
            "compared_with": dict(promotion.incumbent),
            "gain": promotion.comparison.gain,
            "gain_low": promotion.comparison.gain_low,
            "gain_high": promotion.comparison.gain_high,
        }
        for promotion in newest(promotions)
    ]


def shown_text(promotions: Sequence[UserPromotion]) -> str:
    """Text of the choices in use: one line for each shape."""
    return "\n".join(
        f"{promotion.problem.describe():28} {_numbers(promotion.choice):32} "
        f"{_ratio(promotion.comparison)} over {_numbers(promotion.incumbent)}"
        for promotion in newest(promotions)
    )


def tuned_text(outcomes: Sequence[ShapeOutcome], *, resume: bool = True) -> str:
    """Text of a tuning run: one line for each tuned shape, and the way to go on if time ran out."""
    lines = []
    for outcome in outcomes:
        state = "" if outcome.is_complete else "  (out of time)"
        lines.append(
            f"{outcome.problem.describe():28} {_numbers(outcome.choice):32} {_gain(outcome)}  "
            f"{outcome.timed} timed, {outcome.replayed} from the database{state}"
        )
    if not all(outcome.is_complete for outcome in outcomes):
        lines.append(goes_on(resume))
    return "\n".join(lines)


def _gain(outcome: ShapeOutcome) -> str:
    """Gain of a shape in words, e.g. `2.40x over the author's C (1.14x over the choice before)`."""
    baseline = "the author's C" if is_original(dict(outcome.baseline)) else "the first parameters"
    if outcome.choice == outcome.baseline:
        return f"{baseline}: nothing proven faster"
    before = "" if outcome.over_before is None else f" ({_ratio(outcome.over_before)} over the choice before)"
    ratio = NO_VERDICT if outcome.over_baseline is None else _ratio(outcome.over_baseline)
    return f"{ratio} over {baseline}{'' if outcome.before == outcome.baseline else before}"


def _ratio(comparison: Comparison) -> str:
    return proven(comparison.gain, comparison.gain_low, comparison.gain_high)


def tuned_fields(outcome: ShapeOutcome) -> dict[str, Any]:
    """JSON fields of one shape's outcome."""
    return {
        "key": outcome.problem.kernel_abi,
        "shape": dict(outcome.problem.shape),
        "parameters": dict(outcome.choice),
        "gain": outcome.gain,
        "gain_low": outcome.gain_low,
        "baseline": dict(outcome.baseline),
        "baseline_gain": 1.0 if outcome.over_baseline is None else outcome.over_baseline.gain,
        "before": dict(outcome.before),
        "before_gain": None if outcome.over_before is None else outcome.over_before.gain,
        "default_ns": outcome.default_ns,
        "best_ns": outcome.best_ns,
        "timed": outcome.timed,
        "replayed": outcome.replayed,
        "complete": outcome.is_complete,
    }


def _numbers(choice: Sequence[tuple[str, int]]) -> str:
    if is_original(dict(choice)):
        return "the original"
    return " ".join(f"{name}={value}" for name, value in choice) or "no parameters"
