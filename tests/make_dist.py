"""Make what a release publishes: wheels, an sdist, pinned dependencies, an SBOM, and the digests of all.

    python3 tests/make_dist.py DIST_DIR SCRATCH_DIR [MACHINE ...]

The wheels are those of check_manylinux.py, checked as it does. The same commit gives the same bytes: times in
archives are the commit's (or SOURCE_DATE_EPOCH), names are sorted, modes and owners are fixed;
check_reproducible.py builds twice and compares. `constraints.txt` pins every dependency with its hashes, as
the index has them on the day; the SBOM (CycloneDX, JSON) lists what an installation of this machine's wheel
has. Both depend on that day, the archives do not.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from check_wheel import ROOT, run

TOOLS = ("uv>=0.5", "cyclonedx-bom>=7")
SDIST = "from setuptools.build_meta import build_sdist; import sys; build_sdist(sys.argv[1])"
OLDEST_PYTHON = "3.11"


def epoch_s() -> int:
    """The time that archives carry: SOURCE_DATE_EPOCH, else that of the last commit."""
    if asked := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(asked)
    shown = subprocess.run(
        ("git", "log", "-1", "--format=%ct"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if shown.returncode:
        sys.exit("no commit to take the time from: set SOURCE_DATE_EPOCH")
    return int(shown.stdout)


def with_fixed_modes(tree: Path) -> None:
    """Every file of a copied tree, and every one that a build makes later, gets the mode that a release has,
    whatever the umask of the checkout.
    """
    os.umask(0o022)
    for path in tree.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)


def reproducible_sdist(python: Path, tree: Path, out: Path) -> Path:
    """An sdist of `tree` whose members are sorted, of one time and owner."""
    out.mkdir(parents=True, exist_ok=True)
    run(python, "-c", SDIST, out, cwd=tree)
    (path,) = out.glob("*.tar.gz")
    plain = io.BytesIO()
    with (
        tarfile.open(path) as built,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as again,
    ):
        for member in sorted(built.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch_s(), 0, 0, "", ""
            member.pax_headers = {}
            again.addfile(member, built.extractfile(member) if member.isfile() else None)
    path.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch_s()))
    return path


def constraints(tools: Path, dist: Path) -> None:
    """Every dependency, direct or not, on every supported Python: a version, with the hashes of its files."""
    compiled = ("pip", "compile", "-q", "--universal", "--generate-hashes", "--no-header", "--no-annotate")
    asked = ("--python-version", OLDEST_PYTHON, "setup.cfg", "-o", dist / "constraints.txt")
    run(tools / "uv", *compiled, *asked, cwd=ROOT)


def sbom(tools: Path, installed: Path, dist: Path) -> None:
    """The components of the environment `installed`, with their licences."""
    where = ("--of", "JSON", "-o", dist / "sbom.cdx.json")
    run(tools / "cyclonedx-py", "environment", "--output-reproducible", *where, installed, cwd=dist)


def digests(dist: Path) -> str:
    """A line for each file, as `sha256sum --check` reads them."""
    files = sorted(path for path in dist.iterdir() if path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def main() -> None:
    dist, scratch = (Path(word).resolve() for word in sys.argv[1:3])
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch_s())
    if any(dist.glob("*")):
        sys.exit(f"{dist} is not empty: the digests would name what another release left there")
    wheels = Path(__file__).parent / "check_manylinux.py"
    subprocess.run([sys.executable, wheels, dist, scratch, *sys.argv[3:]], check=True)
    reproducible_sdist(scratch / "venv" / "bin" / "python", scratch / "checkout", dist)
    tools = scratch / "tools"
    run(sys.executable, "-m", "venv", tools, cwd=scratch)
    run(tools / "bin" / "pip", "install", "-q", *TOOLS, cwd=scratch)
    constraints(tools / "bin", dist)
    sbom(tools / "bin", scratch / platform.machine() / "bare" / "bin" / "python", dist)
    (dist / "SHA256SUMS").write_text(digests(dist))
    print(f"{dist}, of {time.strftime('%Y-%m-%d', time.gmtime(epoch_s()))}:\n{digests(dist)}", end="")


if __name__ == "__main__":
    main()
