"""Blocks of tokens that one machine can take over: those that it reported, and those that it will compute.

Reports are changes (`serving.scheduling.held_prefixes`) and are checked as a stranger's: one that cannot be
true ends the trust in that machine until it is started anew. It is routed to by its load alone then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from phasewise._words import counted
from phasewise.cluster.errors import ClusterError
from phasewise.serving.scheduling.held_prefixes import KEY_BYTES, MOST_KEYS, HeldReport


class ReportRefused(ClusterError):
    """A report of held prefixes that cannot be true."""


class HeldBlocks:
    """The blocks of one machine, which can hold `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: set[int] = set()
        self._coming: Counter[int] = Counter()
        self._n_reports = 0
        self._is_believed = True

    def __len__(self) -> int:
        return len(self._held)

    def hear(self, report: HeldReport) -> None:
        """Take note of a report; the first of a life replaces all before. ReportRefused for one that cannot
        be true: nothing that the machine reports counts from then on, until it begins anew."""
        if report.number == 1:
            self._held.clear()
            self._n_reports, self._is_believed = 0, True
        if not self._is_believed:
            return
        mistake = self._mistake(report)
        if mistake is not None:
            self._held.clear()
            self._is_believed = False
            raise ReportRefused(mistake)
        self._n_reports = report.number
        self._held.difference_update(report.removed)
        self._held.update(report.added)

    def _mistake(self, report: HeldReport) -> str | None:
        """The reason, in one line, why a report cannot be true; None: it can."""
        added, removed = set(report.added), set(report.removed)
        if max(len(report.added), len(report.removed)) > MOST_KEYS:
            return f"a report of held prefixes has more than {MOST_KEYS} keys"
        if any(not 0 <= key < 1 << 8 * KEY_BYTES for key in added):
            return "it reports a key that is none"
        if report.number != self._n_reports + 1:
            return f"report {report.number} of held prefixes came after report {self._n_reports}"
        if len(added) != len(report.added) or added & self._held:
            return "it reports a prefix twice"
        if len(removed) != len(report.removed) or not removed <= self._held:
            return "it has forgotten a prefix that it did not report"
        n_held = len(self._held) + len(added) - len(removed)
        if n_held > self.most:
            return f"it reports {counted(n_held, 'block')} of prefixes, but has room for {self.most}"
        return None

    def expect(self, keys: Sequence[int]) -> None:
        """Count the blocks of a request that is on its way to the machine, and begins with them."""
        self._coming.update(keys)

    def ended(self, keys: Sequence[int]) -> None:
        """Take back what `expect` counted for a request that has ended: what is left of it the machine
        reports itself."""
        self._coming.subtract(keys)
        for key in keys:
            if self._coming[key] <= 0:
                del self._coming[key]

    def n_first(self, keys: Sequence[int]) -> int:
        """The number of the first of these blocks that are there, or will be."""
        n_first = 0
        for key in keys:
            if key not in self._held and key not in self._coming:
                break
            n_first += 1
        return n_first
