"""Build a wheel and an sdist twice, and compare them byte by byte.

    python3 tests/check_reproducible.py SCRATCH_DIR

The two builds differ in what must not matter: the folder, the umask, the times of the files, the time zone,
the order of the environment's variables. The kernels of this machine's instruction set are compiled twice
(PHASEWISE_ISA_BUILD=all for all), without ccache.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from check_wheel import BUILD_NEEDS, NOT_COPIED, ROOT, run
from make_dist import epoch_s, reproducible_sdist, with_fixed_modes

BUILDS = {"first": (0o022, "UTC"), "the-second-one": (0o002, "Asia/Kolkata")}
OPTIONS = ("--no-deps", "--no-build-isolation")


def build(python: Path, folder: Path, umask: int, zone: str) -> dict[str, bytes]:
    """The content of each file that one build makes, by name."""
    tree = folder / "checkout"
    os.umask(umask)
    shutil.copytree(
        ROOT, tree, symlinks=True, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns(*NOT_COPIED)
    )
    with_fixed_modes(tree)
    settings = {
        "TZ": zone,
        "SOURCE_DATE_EPOCH": str(epoch_s()),
        "PHASEWISE_ISA_BUILD": os.environ.get("PHASEWISE_ISA_BUILD", "native"),
        "CCACHE_DISABLE": "1",
    }
    os.environ.update(settings)
    run(python, "-m", "pip", "wheel", "-q", *OPTIONS, "-w", folder, tree, cwd=folder)
    reproducible_sdist(python, tree, folder)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def main() -> None:
    scratch = Path(sys.argv[1]).resolve()
    scratch.mkdir(parents=True)
    run(sys.executable, "-m", "venv", scratch / "venv", cwd=scratch)
    python = scratch / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", *BUILD_NEEDS, cwd=scratch)
    first, second = (build(python, scratch / name, *how) for name, how in BUILDS.items())
    assert set(first) == set(second), (sorted(first), sorted(second))
    differing = [name for name in first if first[name] != second[name]]
    if differing:
        sys.exit(f"two builds differ in {', '.join(differing)}: see {scratch}")
    for name in sorted(first):
        print(f"{name}: the same {len(first[name])} bytes twice")


if __name__ == "__main__":
    main()
