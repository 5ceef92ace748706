"""Parts that all SVG pictures share: the palette, the font, and the elements they are made of.

A picture brings its own background, so that it is legible in light and dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

PAPER, INK, FAINT_INK = "#fbfaf7", "#1f2933", "#52606d"
SERIES = ("#0072b2", "#d55e00", "#2e7d5b", "#a2488a", "#8a6d00", "#3b4cc0", "#b40426")
"""Colours of series: distinct to most colour-blind readers, and dark enough for white text."""

FONT = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',Arial,sans-serif"

MACHINE_STYLE = (
    f"text{{font-family:{FONT}}}"
    f".t{{font-size:12px;font-weight:600;fill:{INK}}}.s{{font-size:12px;fill:{FAINT_INK}}}"
    f".d{{font-size:10px;fill:{FAINT_INK}}}.p{{font-size:11px;text-anchor:middle}}"
)
"""Text classes of the pictures of a machine: title, subtitle, detail, number of a PU."""


_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may have, however they are written."""


def escaped(words: str) -> str:
    """Words from outside as text of a picture, without characters that XML forbids: with them a picture is
    not shown."""
    return escape(_NO_XML.sub("\ufffd", words))


def document(width: float, height: float, style: str, elements: Sequence[str]) -> str:
    """An SVG document of this size in pixels, with a rounded background."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>\n'
    )
    return head + "\n".join(elements) + "\n</svg>\n"


def rect(x: float, y: float, width: float, height: float, look: str) -> str:
    """An SVG rectangle. look: further attributes, e.g. `fill="none"`."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {look}/>'


def text(x: float, y: float, words: str, style: str, look: str | None = None) -> str:
    """An SVG line of text, of a class of the document's style. look: further attributes."""
    more = "" if look is None else f" {look}"
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{more}>{escaped(words)}</text>'
