"""The front page of the docs' versions: a folder for each below SITE, and links to the newest.

    python3 docs/site_index.py SITE

SITE/index.html lists the versions, SITE/latest/ leads to the newest one: addresses that stay.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>phasewise: documentation</title>{head}</head>
<body><h1>phasewise: documentation</h1><ul>
{items}
</ul></body></html>
"""


def versions(site: Path) -> list[str]:
    """The versions that have a folder, the newest first."""
    names = [path.name for path in site.iterdir() if path.is_dir() and re.match(r"\d+\.\d+", path.name)]
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)


def write(site: Path) -> None:
    """Both pages, of the versions that are there."""
    newest, *_ = there = versions(site)
    items = [f'<li><a href="{name}/">{name}</a>{" (newest)" * (name == newest)}</li>' for name in there]
    (site / "index.html").write_text(PAGE.format(head="", items="\n".join(items)))
    leads = f'<meta http-equiv="refresh" content="0; url=../{newest}/">'
    (site / "latest").mkdir(exist_ok=True)
    item = f'<li><a href="../{newest}/">{newest}</a></li>'
    (site / "latest" / "index.html").write_text(PAGE.format(head=leads, items=item))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
