"""The packed file: whole or absent, mapped not read, rebuilt when anything it depends on changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from phasewise.cython_kernels.packing import unpack
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.packed_file import PREFIX
from phasewise.serving.model import PackedModel
from tests.support.tiers import examples
from tests.support.tiny_models import TinyShape, tiny_gguf, write_tiny_gguf, write_tiny_hf


def packed_path(cache: Path) -> Path:
    (path,) = (cache / "packed").iterdir()
    return path


def swap(path: Path, content: bytes) -> None:
    """Give the file other content; whoever has the old one mapped keeps it."""
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)


def assert_same(one: PackedModel, other: PackedModel) -> None:
    assert (one.config, one.content_hash, one.weight_bytes) == (
        other.config,
        other.content_hash,
        other.weight_bytes,
    )
    assert (one.tokenizer_json, one.chat_template) == (other.tokenizer_json, other.chat_template)
    assert list(one.weights) == list(other.weights)
    assert all(np.array_equal(unpack(one.weights[name]), unpack(other.weights[name])) for name in one.weights)
    assert all(np.array_equal(one.vectors[name], other.vectors[name]) for name in one.vectors)


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_a_second_start_reads_only_the_packed_file(tmp_path: Path, kind: str) -> None:
    write_tiny_gguf(tmp_path / "gguf", types="Q4_1") if kind == "gguf" else write_tiny_hf(
        tmp_path / "directory"
    )
    first = load_model(str(tmp_path / kind), "native", tmp_path)
    script = (
        "import sys; from pathlib import Path; from phasewise.serving.loaders import load_model;"
        "opened = [];"
        "sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == 'open' else None);"
        f"load_model({str(tmp_path / kind)!r}, 'native', Path({str(tmp_path)!r}));"
        "loaded = {'gguf', 'safetensors', 'huggingface_hub', 'tokenizers'} & set(sys.modules);"
        f"assert not loaded, loaded; print([path for path in opened if path.startswith({str(tmp_path)!r})])"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert eval(result.stdout) == [str(packed_path(tmp_path))]
    assert_same(first, load_model(str(tmp_path / kind), "native", tmp_path))


def test_arrays_are_aligned_read_only_views(tmp_path: Path) -> None:
    shape = TinyShape(vocab_size=261, hidden=40)
    model = load_model(str(write_tiny_gguf(tmp_path / "tiny.gguf", shape=shape)), "int4", tmp_path)

    arrays = [
        array for weight in model.weights.values() for array in (weight.values, weight.scales, weight.mins)
    ]
    for array in [*arrays, *model.vectors.values()]:
        assert array is None or (array.ctypes.data % 64 == 0 and not array.flags.writeable)
    assert model.weight_bytes == sum(array.nbytes for array in arrays if array is not None)


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_head_is_noticed_and_rebuilt(tmp_path: Path, data: st.DataObject) -> None:
    source = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    first = load_model(source, "native", tmp_path)
    path = packed_path(tmp_path)
    whole = path.read_bytes()
    _, head, text, _, _ = PREFIX.unpack(whole[: PREFIX.size])
    at = data.draw(st.integers(0, PREFIX.size + head + text - 1))
    damaged = bytearray(whole)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    swap(path, bytes(damaged))

    again = load_model(source, "native", tmp_path)

    assert_same(first, again)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("keep", [0, 10, 100, 5000, -1])
def test_a_truncated_file_is_noticed_and_rebuilt(tmp_path: Path, keep: int) -> None:
    source = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    first = load_model(source, "native", tmp_path)
    path = packed_path(tmp_path)
    whole = path.read_bytes()
    swap(path, whole[:keep])

    again = load_model(source, "native", tmp_path)

    assert_same(first, again)
    assert path.read_bytes() == whole


def test_a_changed_source_is_packed_again_in_the_same_place(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    first = load_model(str(source), "native", tmp_path)
    write_tiny_gguf(source, seed=2)
    os.utime(source, ns=(0, 0))

    second = load_model(str(source), "native", tmp_path)

    assert first.content_hash != second.content_hash
    assert packed_path(tmp_path).is_file()


def test_a_new_shard_or_template_in_a_directory_is_noticed(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "tiny")
    assert load_model(str(directory), "native", tmp_path).chat_template != "new"
    (directory / "chat_template.jinja").write_text("new")

    assert load_model(str(directory), "native", tmp_path).chat_template == "new"


def test_the_content_hash_names_content_and_format_not_place(tmp_path: Path) -> None:
    one, other = write_tiny_gguf(tmp_path / "one.gguf"), write_tiny_gguf(tmp_path / "other.gguf")

    hashes = {load_model(str(path), "native", tmp_path).content_hash for path in (one, other)}
    int8 = load_model(str(one), "int8", tmp_path).content_hash

    assert len(hashes) == 1
    assert int8 not in hashes


def test_a_failed_packing_leaves_nothing_and_the_old_file_alone(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    load_model(str(source), "native", tmp_path)
    before = packed_path(tmp_path).read_bytes()
    writer = tiny_gguf()
    name, shape, kind, raw = writer.tensors[-1]
    writer.tensors[-1] = (name, shape, kind, b"\xff" * len(raw))
    source.write_bytes(writer.to_bytes())

    with pytest.raises(ModelError, match="NaN"):
        load_model(str(source), "native", tmp_path)

    assert packed_path(tmp_path).read_bytes() == before


def test_what_a_killed_run_left_is_swept_up_later(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    load_model(str(source), "native", tmp_path)
    path = packed_path(tmp_path)
    old, new = (path.with_name(f".{path.name}.{name}") for name in ("old", "new"))
    for left_over in (old, new):
        left_over.write_bytes(b"x")
    os.utime(old, (0, 0))
    path.unlink()

    load_model(str(source), "native", tmp_path)

    assert not old.exists()
    assert new.exists()


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "cache").write_text("a file, not a directory")

    with pytest.raises(ModelError, match="PHASEWISE_CACHE"):
        load_model(str(source), "native", tmp_path / "cache")


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(ModelError, match="No space left"):
        load_model(str(source), "native", tmp_path / "cache")
    assert not list((tmp_path / "cache" / "packed").iterdir())


def test_progress_is_told_only_while_packing(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    first: list[str] = []
    second: list[str] = []

    load_model(str(source), "native", tmp_path, first.append)
    load_model(str(source), "native", tmp_path, second.append)

    assert first
    assert not second
    assert not any("\n" in line for line in first)
