"""Print the lowest allowed version of every dependency in setup.cfg, for pip: `numpy==1.26`."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

EXTRAS = ("postgres", "kernels")
SETUP = Path(__file__).resolve().parent.parent / "setup.cfg"


def main() -> None:
    settings = configparser.ConfigParser()
    settings.read(SETUP)
    extras = settings["options.extras_require"]
    needed = [
        *settings["options"]["install_requires"].split(),
        *(requirement for name in EXTRAS for requirement in extras[name].split()),
    ]
    for requirement in needed:
        parsed = re.fullmatch(r"([\w\[\]-]+)>=([\d.]+)(,<[\d.]+)?", requirement)
        if parsed is None:
            raise SystemExit(f"setup.cfg: {requirement!r} names no lowest version as NAME>=VERSION")
        print(f"{parsed[1]}=={parsed[2]}")


if __name__ == "__main__":
    main()
