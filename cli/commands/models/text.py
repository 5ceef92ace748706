"""Text of `phasewise models`: lists within 80 columns, and the line that a download shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasewise.cli.present import on_one_line

if TYPE_CHECKING:
    from phasewise.serving.loaders.fetching.cache import Removed

BAR_COLUMNS = 20
RATE_OVER_S = 10.0


def size_text(n_bytes: int) -> str:
    """Decimal units, as disks and bandwidths are counted."""
    if n_bytes < 1e9:
        return f"{n_bytes / 1e6:.1f} MB"
    return f"{n_bytes / 1e9:.2f} GB"


class DownloadBar:
    """The line of a download: a bar, bytes, the recent rate in bytes/s, the time left."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def saw(self, here: int, now_s: float) -> None:
        """Note that `here` bytes have arrived by `now_s`, from which the rate is derived."""
        self._seen.append((now_s, here))
        while now_s - self._seen[0][0] > RATE_OVER_S and len(self._seen) > 2:
            self._seen.popleft()

    def text(self, total: int) -> str:
        """By what was seen last. Before that, nothing may be asked."""
        (first_s, first), (now_s, here) = self._seen[0], self._seen[-1]
        share = here / total if total else 1.0
        bytes_per_s = (here - first) / max(now_s - first_s, 1e-3)
        full = round(BAR_COLUMNS * share)
        bar = "#" * full + "." * (BAR_COLUMNS - full)
        left = f", {_duration((total - here) / bytes_per_s)} left" if bytes_per_s else ""
        rate = f"{bytes_per_s / 1e6:.1f} MB/s{left}"
        return f"{bar} {100 * share:3.0f} %  {size_text(here)} of {size_text(total)}, {rate}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def list_text(
    fetchable: Sequence[Mapping[str, Any]],
    stored: Sequence[Mapping[str, Any]],
    packed: Sequence[Mapping[str, Any]],
) -> str:
    """Three parts: names that can be fetched, models that were, and packed files."""
    lines = ["known names"]
    for model in fetchable:
        about = "about " if model["is_rounded"] else ""
        lines.append(f"  {model['name']}  {about}{size_text(model['file_bytes'])}, {model['licence']}")
        lines.append(f"    {model['about']}")
        path = model["path"] or f"not here yet: phasewise models pull {model['name']}"
        lines.append(f"    {on_one_line(path)}")
    lines += ["", "models here"] if stored else []
    for model in stored:
        state = "" if model["is_whole"] else ", not whole: pull goes on"
        lines.append(
            f"  {size_text(model['n_bytes']):>9}  {model['format']:<11}  {on_one_line(model['name'])}{state}"
        )
    lines += ["", "packed from models (made anew when they are missing)"] if packed else []
    for file in packed:
        state = "  (its model is gone)" if file["is_orphan"] else ""
        lines.append(
            f"  {size_text(file['file_bytes']):>9}  {file['format']:<11}  {on_one_line(file['name'])}{state}"
        )
    return "\n".join(lines) + "\n"


def removed_text(removed: Sequence[Removed], dry_run: bool) -> str:
    """A line for each, then the sum."""
    verb = "would remove" if dry_run else "removed"
    lines = [
        f"{verb} {size_text(removal.n_bytes):>9}  {removal.why}: {on_one_line(removal.path)}"
        for removal in removed
    ]
    total = size_text(sum(removal.n_bytes for removal in removed))
    return "\n".join([*lines, f"{verb} {total} in all"]) + "\n"
