"""No loader opens a file that lies outside the model's directory, whatever the directory's links say."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model, open_source
from phasewise.serving.loaders.fetching.resolve import Located
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.workflows.opening.model_shape import shape_of_reference
from phasewise.workflows.prune.directory import COPIED
from tests.support.models.encoder_models import write_encoder
from tests.support.models.tiny_models import write_tiny_hf

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def decoder(directory: Path) -> Path:
    write_tiny_hf(directory, shards=2)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def encoder(directory: Path) -> Path:
    return write_encoder(directory, "bert-cls")


MAKERS: dict[str, Callable[[Path], Path]] = {"decoder": decoder, "encoder": encoder}


def files_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def moved_out(directory: Path, name: str, outside: Path) -> Path:
    """The file lies elsewhere now, and a link in its place."""
    outside.mkdir()
    target = outside / Path(name).name
    (directory / name).rename(target)
    (directory / name).symlink_to(target)
    return target


@pytest.mark.parametrize("kind", MAKERS)
def test_a_link_in_the_place_of_any_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    names = files_of(MAKERS[kind](tmp_path / "counted"))
    assert len(names) >= 6

    for number, name in enumerate(names):
        directory = MAKERS[kind](tmp_path / f"{number}")
        target = moved_out(directory, name, tmp_path / f"outside-{number}")

        with pytest.raises(ModelError) as refused:
            load_model(str(directory), "native", tmp_path / "cache")
        assert str(directory / name) in str(refused.value)
        assert str(target) in str(refused.value)
        with pytest.raises(ModelError, match="leads out of"), open_source(Located("m", directory)) as source:
            source.tokenizer_json()


def test_a_model_that_was_packed_before_the_link_was_put_there_is_refused_too(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "m")
    load_model(str(directory), "native", tmp_path / "cache")
    moved_out(directory, "chat_template.jinja", tmp_path / "outside")

    with pytest.raises(ModelError, match=r"chat_template\.jinja leads out"):
        load_model(str(directory), "native", tmp_path / "cache")


def test_a_folder_that_is_a_link_out_is_refused(tmp_path: Path) -> None:
    directory = encoder(tmp_path / "m")
    shutil.move(directory / "1_Pooling", tmp_path / "elsewhere")
    (directory / "1_Pooling").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ModelError, match=r"1_Pooling/config\.json leads out"):
        load_model(str(directory), "native", tmp_path / "cache")


def test_links_within_the_directory_and_a_link_to_it_are_followed(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "m")
    (directory / "data").mkdir()
    for name in files_of(directory):
        (directory / name).rename(directory / "data" / name)
        (directory / name).symlink_to(Path("data") / name)
    (tmp_path / "by-link").symlink_to(directory)

    assert load_model(str(tmp_path / "by-link"), "native", tmp_path / "cache").chat_template


def in_the_hubs_cache(root: Path, kind: str) -> Path:
    """A snapshot as the hub's client keeps it."""
    plain = MAKERS[kind](root / "plain")
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    for number, name in enumerate(files_of(plain)):
        blob = repository / "blobs" / f"{number:040x}"
        (plain / name).rename(blob)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    return snapshot


@pytest.mark.parametrize("kind", MAKERS)
def test_the_hubs_cache_is_read(tmp_path: Path, kind: str) -> None:
    snapshot = in_the_hubs_cache(tmp_path, kind)

    assert load_model(str(snapshot), "native", tmp_path / "cache").tokenizer_json
    ModelDirectory(snapshot).refuse_links_out()


def test_what_only_looks_like_the_hubs_cache_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    snapshot = in_the_hubs_cache(tmp_path, "decoder")
    link = snapshot / "chat_template.jinja"
    blob = link.resolve()

    blob.unlink()
    blob.symlink_to(secret)  # a blob that is a link itself
    with pytest.raises(ModelError, match="leads out"):
        load_model(str(snapshot), "native", tmp_path / "cache")

    blobs = blob.parent
    shutil.move(blobs, tmp_path / "moved")
    blobs.symlink_to(tmp_path / "moved")  # blobs that lie elsewhere
    with pytest.raises(ModelError, match="leads out"):
        load_model(str(snapshot), "native", tmp_path / "cache")

    other = tmp_path / "models--other" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_text("another model's")
    blobs.unlink()
    shutil.move(tmp_path / "moved", blobs)
    link.unlink()
    link.symlink_to(other / "x")  # another repository's blob
    with pytest.raises(ModelError, match="leads out"):
        load_model(str(snapshot), "native", tmp_path / "cache")


def test_a_config_alone_is_no_way_round(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "m")
    for path in directory.glob("*.safetensors"):
        path.unlink()
    assert shape_of_reference(str(directory), "native").n_layers
    moved_out(directory, "config.json", tmp_path / "outside")

    with pytest.raises(ModelError, match=r"config\.json leads out"):
        shape_of_reference(str(directory), "native")


def test_what_is_no_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "m")
    (directory / "chat_template.jinja").unlink()
    os.mkfifo(directory / "chat_template.jinja")

    with pytest.raises(ModelError, match="not a regular file"):
        ModelDirectory(directory).text("chat_template.jinja")


# ---- every loader goes through the door --------------------------------------------------------------------

OWN_FILES = {
    "inspection.py", "hub.py", "packed_file.py", "registry.py",  # files that this program wrote
    "source.py",  # the file itself, for the door
    "gguf_file.py",  # a file that the user has named, and its other parts
    "model_directory.py",
}  # fmt: skip
OUTSIDE_OF_LOADERS = ("serving/embedding/torch_worker.py", "workflows/prune/directory.py")
READS = {"SourceFile", "open", "read_text", "read_bytes", "copyfile", "copy", "loads", "load", "from_file"}


def reads_in(path: Path) -> set[str]:
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = {
        call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "") for call in calls
    }
    return names & READS


def test_no_other_loader_reads_a_file_by_its_path() -> None:
    """They ask a ModelDirectory; its `open` is the one word of these that they may say."""
    loaders = (ROOT / "serving" / "loaders").rglob("*.py")
    modules = [path for path in loaders if path.name not in OWN_FILES]
    modules += [ROOT / name for name in OUTSIDE_OF_LOADERS]
    reads_by_file = {path.name: reads_in(path) for path in modules}
    allowed = {"directory.py": {"open"}}

    assert {name: reads - allowed.get(name, set()) for name, reads in reads_by_file.items() if reads} == {
        name: set() for name in allowed
    }


def test_pruning_copies_nothing_by_a_link(tmp_path: Path) -> None:
    """It writes out what it reads, by the same door."""
    directory = decoder(tmp_path / "m")
    (directory / "special_tokens_map.json").write_text("{}")
    for number, name in enumerate(name for name in COPIED if (directory / name).exists()):
        moved_out(directory, name, tmp_path / f"outside-{number}")
        with pytest.raises(ModelError, match="leads out"):
            ModelDirectory(directory).text(name)
