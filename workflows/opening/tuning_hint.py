"""One remark, once for each machine, that tuning would make the model faster."""

from __future__ import annotations

from phasewise._places import user_folder
from phasewise.workflows.report import Report


def hint_at_tuning(model: str, db: str | None, report: Report) -> None:
    """Report how to tune where there is no tuning database yet and this was not said here before.

    A state file remembers that it was said; where the file cannot be written, nothing is said.
    """
    from phasewise.kerneldb.location import locate

    if not locate(db).is_absent:
        return
    said = user_folder("state") / "tuning-hint"
    try:
        said.parent.mkdir(parents=True, exist_ok=True)
        said.touch(exist_ok=False)
    except OSError:
        return
    report(f"not tuned for this machine: phasewise tune-kernels {model}, about 4 minutes")
