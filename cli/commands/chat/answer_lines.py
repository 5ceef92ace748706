"""An answer as a terminal shows it: broken between words, and a line of its speed behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

from phasewise._words import counted, number

if TYPE_CHECKING:
    from phasewise.serving.engine.one_answer import OneAnswer

_FENCE = "```"


class WordWrap:
    """Text that comes in pieces, with line ends between words. Code between fences keeps its lines.

    A word is held back until it has ended, so that it moves to the next line whole. One that is wider than
    the terminal is broken by it.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._line = ""
        """The line of the text itself, which may fill several of the terminal."""
        self._is_code = False
        self._is_wide = False
        """Within a word that is wider than the terminal: it is shown as it comes."""

    def shown(self, piece: str) -> str:
        """The part of the text so far that can be shown now."""
        return "".join(map(self._after, piece))

    def rest(self) -> str:
        """The last word."""
        return self._placed()

    def _after(self, sign: str) -> str:
        if sign == "\n":
            placed = self._placed() + sign
            self._is_code ^= self._line.lstrip().startswith(_FENCE)
            self._column, self._spaces, self._line, self._is_wide = 0, "", "", False
            return placed
        self._line += sign
        if self._is_code:
            return sign
        if sign in " \t":
            placed = self._placed()
            self._spaces += sign
            self._is_wide = False
            return placed
        if self._is_wide:
            self._column += cell_len(sign)
            return sign
        self._word += sign
        self._is_wide = cell_len(self._word) >= self._columns
        return self._placed() if self._is_wide else ""

    def _placed(self) -> str:
        """The word that was held back, with what stands before it."""
        word, spaces = self._word, self._spaces
        if not word:
            return ""
        self._word = self._spaces = ""
        width = cell_len(word)
        if self._column and self._column + len(spaces) + width > self._columns:
            self._column = width
            return f"\n{word}"
        self._column += len(spaces) + width
        return spaces + word


def speed_line(answer: OneAnswer) -> str:
    """`48 tokens, the first after 120 ms, then 31.2 tokens/s`."""
    line = f"{counted(answer.n_generated, 'token')}, the first after {number(round(answer.ttft_ms))} ms"
    rate = answer.tokens_per_second
    return line if rate is None else f"{line}, then {rate:.1f} tokens/s"
