"""The output of `predict-len eval` and `predict-len train --verbose`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from phasewise._words import counted, number, percent
from phasewise.cli.present import on_one_line

if TYPE_CHECKING:
    from phasewise.tuner.predictor.encoded import KernelFit
    from phasewise.tuner.predictor.evaluate import Calibration
    from phasewise.tuner.predictor.train import Epoch
    from phasewise.workflows.predict_len.compare import LogReport


def epoch_line(epoch: Epoch) -> str:
    """One network's loss after one epoch."""
    return (
        f"network {epoch.member + 1}, epoch {epoch.number}: "
        f"loss {epoch.loss:.3f}, unseen {epoch.unseen_loss:.3f}"
    )


def fit_line(fit: KernelFit) -> str:
    """The error of one width and ridge of the kernel over an encoder's vectors."""
    return (
        f"width {number(fit.width)}, ridge {number(fit.ridge)}: "
        f"mean error {fit.error_tokens:.1f} tokens on unseen prompts"
    )


def report_text(report: LogReport) -> str:
    """One log's figures, to read."""
    lines = [f"{on_one_line(report.name)}: {counted(report.n_answers, 'answer')}"]
    headers = ["accuracy", "overflow", "exact", "block", "used", "at limit"]
    for point, scores in report.scores.items():
        rows = [
            [score.method, percent(score.accuracy, 2), percent(score.overflow, 2), _share(score.exact_bucket),
             f"{score.block_tokens:.0f}", percent(score.utilisation, 1), percent(score.whole_limit, 1)]
            for score in scores
        ]  # fmt: skip
        table = tabulate(rows, [point, *headers], tablefmt="simple", disable_numparse=True)
        lines += ["", table, f"ours above S3: {report.points_gained(point):+.2f} points"]
    if report.calibration is not None:
        lines += ["", _calibration_text(report.calibration)]
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "" if value is None else percent(value, 1)


def _calibration_text(calibration: Calibration) -> str:
    rows = [
        [
            f"{decile.uncertainty:.2f}",
            percent(decile.held, 1),
            f"{decile.room_tokens:.0f}",
            f"{decile.mean_error_tokens:.0f}",
        ]
        for decile in calibration.deciles
    ]
    coverage = ", ".join(percent(share) for share in calibration.coverage)
    return "\n".join(
        [
            tabulate(rows, ["uncertainty, by deciles", "held", "room", "mean error"], disable_numparse=True),
            "answers within the forecast's 10 %, 20 %, .. 90 %:",
            f"  {coverage}",
            f"mean error {calibration.mean_error_tokens:.0f} tokens; "
            f"of a constant {calibration.constant_error_tokens:.0f}",
        ]
    )
