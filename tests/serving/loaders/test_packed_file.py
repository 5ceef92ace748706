"""The packed file: whole or absent, mapped not read, rebuilt when anything it depends on changed."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from phasewise.cython_kernels.packing import unpack
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import (
    config_of_model,
    is_made_for_embedding,
    load_head,
    load_model,
    open_source,
)
from phasewise.serving.loaders.fetching.resolve import locate
from phasewise.serving.loaders.packed_file import PREFIX
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.storage_modes import SparseMode
from phasewise.workflows.pack import pack
from tests.support.models.encoder_models import write_encoder
from tests.support.models.tiny_models import TinyShape, tiny_gguf, write_tiny_gguf, write_tiny_hf
from tests.support.tiers import examples


def packed_path(cache: Path) -> Path:
    (path,) = (cache / "packed").iterdir()
    return path


def swap(path: Path, content: bytes) -> None:
    """Give the file other content; a process that has the old one mapped keeps it."""
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)


def assert_same(first: PackedModel, other: PackedModel) -> None:
    assert (first.config, first.content_hash, first.weight_bytes) == (
        other.config,
        other.content_hash,
        other.weight_bytes,
    )
    assert (first.tokenizer_json, first.chat_template) == (other.tokenizer_json, other.chat_template)
    assert list(first.weights) == list(other.weights)
    assert all(
        np.array_equal(unpack(first.weights[name]), unpack(other.weights[name])) for name in first.weights
    )
    assert all(np.array_equal(first.vectors[name], other.vectors[name]) for name in first.vectors)


@pytest.mark.parametrize("kind", ["tiny.gguf", "directory"])
def test_a_second_start_reads_only_the_packed_file(tmp_path: Path, kind: str) -> None:
    write_tiny_gguf(tmp_path / kind, types="Q4_1") if kind == "tiny.gguf" else write_tiny_hf(
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
    opened = [path for path in eval(result.stdout) if Path(path).exists()]  # other storages are looked for
    assert opened == [str(packed_path(tmp_path))]
    assert_same(first, load_model(str(tmp_path / kind), "native", tmp_path))


@pytest.mark.parametrize("kind", ["generates", "embeds"])
def test_what_a_model_is_made_for_is_known_before_and_after_it_is_packed(tmp_path: Path, kind: str) -> None:
    """By any choice of storage; asking packs nothing."""
    model, cache = tmp_path / "model", tmp_path / "cache"
    write_tiny_hf(model) if kind == "generates" else write_encoder(model, "bert")

    assert is_made_for_embedding(str(model), "native", cache) == (kind == "embeds")
    assert not list(cache.rglob("*.packed"))
    for mode in get_args(SparseMode):
        folder = cache / mode
        load_model(str(model), "native", folder, storage=StorageChoice(mode))
        assert is_made_for_embedding(str(model), "native", folder) == (kind == "embeds")
        assert len(list(folder.rglob("*.packed"))) == 1


def test_arrays_are_aligned_read_only_views(tmp_path: Path) -> None:
    shape = TinyShape(vocab_size=261, hidden=40)
    model = load_model(str(write_tiny_gguf(tmp_path / "tiny.gguf", shape=shape)), "int4", tmp_path)

    arrays = [
        array for weight in model.weights.values() for array in (weight.values, weight.scales, weight.mins)
    ]
    for array in [*arrays, *model.vectors.values()]:
        assert array is None or (array.ctypes.data % 64 == 0 and not array.flags.writeable)
    assert model.weight_bytes == sum(array.nbytes for array in arrays if array is not None)


def assert_rebuilt(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    source = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    first = load_model(source, "native", tmp_path)
    path = packed_path(tmp_path)
    whole = path.read_bytes()
    swap(path, change(whole))

    assert_same(first, load_model(source, "native", tmp_path))
    assert path.read_bytes() == whole


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_head_is_noticed_and_rebuilt(tmp_path: Path, data: st.DataObject) -> None:
    def damaged(whole: bytes) -> bytes:
        _, head, text, _, _ = PREFIX.unpack(whole[: PREFIX.size])
        offset = data.draw(st.integers(0, PREFIX.size + head + text - 1))
        changed = bytearray(whole)
        changed[offset] ^= 1 << data.draw(st.integers(0, 7))
        return bytes(changed)

    assert_rebuilt(tmp_path, damaged)


@pytest.mark.parametrize("keep", [0, 10, 100, 5000, -1])
def test_a_truncated_file_is_noticed_and_rebuilt(tmp_path: Path, keep: int) -> None:
    assert_rebuilt(tmp_path, lambda whole: whole[:keep])


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
    first, other = write_tiny_gguf(tmp_path / "one.gguf"), write_tiny_gguf(tmp_path / "other.gguf")

    hashes = {load_model(str(path), "native", tmp_path).content_hash for path in (first, other)}
    int8 = load_model(str(first), "int8", tmp_path).content_hash

    assert len(hashes) == 1
    assert int8 not in hashes


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q4_K", "Q6_K"])
def test_rows_that_are_packed_at_once_change_no_hash(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose scales are arrays of their own are packed in a number of rows that stays."""
    shape = TinyShape(hidden=256, ffn=256, n_heads=4, n_kv_heads=2, head_dim=64)
    ref, hashes = str(write_tiny_gguf(tmp_path / "m.gguf", types=kind, shape=shape)), set[str]()
    for values in (1, 1 << 14, 1 << 21):
        monkeypatch.setattr("phasewise.serving.loaders.chunks.CHUNK_VALUES", values)
        hashes.add(load_model(ref, "native", tmp_path, pack="memory").content_hash)

    assert len(hashes) == 1


@pytest.mark.parametrize("run_bytes", [1, 64, 4096, 40960])
def test_the_length_of_runs_changes_no_byte_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_bytes: int
) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", types="Q4_1")
    pack(str(source), "native", "never", tmp_path / "whole")
    monkeypatch.setattr("phasewise.serving.loaders.packed_file.RUN_BYTES", run_bytes)
    pack(str(source), "native", "never", tmp_path / "cut")
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


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


def test_a_file_that_cannot_be_mapped_for_want_of_memory_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is whole: making it anew, or blaming the disk, would help nobody."""
    model = str(write_tiny_gguf(tmp_path / "m.gguf"))
    load_model(model, "native", tmp_path)
    before = packed_path(tmp_path).stat()

    def no_memory(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patched:
        patched.setattr("phasewise.serving.loaders.packed_file.mmap.mmap", no_memory)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            load_model(model, "native", tmp_path)

    load_model(model, "native", tmp_path)
    assert packed_path(tmp_path).stat().st_ino == before.st_ino


def test_progress_is_told_only_while_packing(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    first: list[str] = []
    second: list[str] = []

    load_model(str(source), "native", tmp_path, first.append)
    load_model(str(source), "native", tmp_path, second.append)

    assert first
    assert not second
    assert not any("\n" in line for line in first)


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "encoder"])
def test_memory_holds_the_bits_of_the_file_and_the_disk_nothing(tmp_path: Path, kind: str) -> None:
    source, said = tmp_path / (kind if kind == "encoder" else "tiny.gguf"), list[str]()
    write_encoder(source, "bert") if kind == "encoder" else write_tiny_gguf(source, types=kind)
    kept = load_model(str(source), "native", tmp_path / "kept")

    model = load_model(str(source), "native", tmp_path / "none", said.append, pack="memory")

    assert_same(kept, model)
    assert not (tmp_path / "none").exists()
    (line,) = said
    assert re.fullmatch(rf"packing {model.name} as native \(\d+ MB\) in memory, .*", line)


def open_files() -> set[tuple[int, int]]:
    """Devices and inodes of this process' open files."""
    identities = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself is closed
            status = os.fstat(int(descriptor))
            identities.add((status.st_dev, status.st_ino))
    return identities


def test_a_model_in_memory_is_shared_and_goes_with_its_last_user(tmp_path: Path) -> None:
    """Other processes, and ranks, map the same pages; giving back a file's pages loses none of them."""
    ref = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    model = load_model(ref, "native", tmp_path, pack="memory")
    bits = {name: unpack(weight).tobytes() for name, weight in model.weights.items()}
    assert model.file is not None
    model.file.release()
    other = load_model(model.ref_here(ref), "native", tmp_path)

    assert (other.name, other.file.identity) == ("tiny", model.file.identity)  # type: ignore[union-attr]
    assert {name: unpack(weight).tobytes() for name, weight in other.weights.items()} == bits
    fd = model.file.open_again()
    assert fd is not None
    os.close(fd)
    assert load_model(ref, "native", tmp_path).ref_here(ref) == ref
    identity = model.file.identity
    assert identity in open_files()
    del model, other
    gc.collect()
    assert identity not in open_files()


def test_memory_that_is_too_short_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    monkeypatch.setattr("phasewise.serving.loaders.packed_file.available_bytes", lambda: 1000)

    with pytest.raises(ModelError, match=r"--pack memory: tiny as native .* does not fit into the 0 MB"):
        load_model(ref, "native", tmp_path, pack="memory")


without_asan = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="under AddressSanitizer: its memory, its signals",
)
PACK_AND_MEASURE = """
import sys
from pathlib import Path
from phasewise.serving.loaders import load_model

def most_mib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

def packed(path):
    return load_model(path, "native", Path("/nowhere"), pack="memory")

packed(sys.argv[1])
before = most_mib()
model = packed(sys.argv[2])
assert sum(int(weight.values.view("u1").sum()) for weight in model.weights.values())  # all pages are there
print(most_mib() - before, model.file.n_bytes / 2**20)
"""


@pytest.mark.slow
@without_asan
def test_packing_in_memory_takes_little_more_than_the_file(tmp_path: Path) -> None:
    small = write_tiny_gguf(tmp_path / "tiny.gguf", types="F32")
    shape = TinyShape(n_layers=10, hidden=512, ffn=8192, n_heads=4, n_kv_heads=2, head_dim=128)
    large = write_tiny_gguf(tmp_path / "large.gguf", types="F32", shape=shape)

    result = subprocess.run(
        [sys.executable, "-c", PACK_AND_MEASURE, str(small), str(large)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    taken, file = map(float, result.stdout.split())
    assert file > 500
    assert taken <= 1.15 * file, (taken, file)


PACK_AND_COUNT = """
import sys, tracemalloc
from pathlib import Path
from phasewise.serving.loaders import load_model

def packed(path):
    tracemalloc.reset_peak()
    load_model(path, "native", Path(sys.argv[1]))
    return tracemalloc.get_traced_memory()[1]

tracemalloc.start()
print(*[packed(path) for path in sys.argv[2:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", [2, 6])
def test_packing_takes_a_few_rows_of_memory_at_a_time(tmp_path: Path, n_layers: int) -> None:
    """What Python and numpy have allocated at most does not grow with the file, 50 MB a layer; two threads
    pack, and the pieces of both may meet."""
    files = [write_tiny_gguf(tmp_path / "tiny.gguf")]  # after it, all is imported
    for n in (1, n_layers):
        shape = TinyShape(n_layers=n, hidden=512, ffn=8192, n_heads=4, n_kv_heads=2, head_dim=128)
        files.append(write_tiny_gguf(tmp_path / f"{n}.gguf", types="F32", shape=shape))

    result = subprocess.run(
        [sys.executable, "-c", PACK_AND_COUNT, str(tmp_path), *map(str, files)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert files[2].stat().st_size > n_layers * 50_000_000
    _, single, several = map(int, result.stdout.split())
    assert several <= single + 25_000_000, (single, several)


def rewrite_head(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another head with a digest that is right, as an attacker or a bug would write it."""
    content = path.read_bytes()
    magic, head_bytes, text_bytes, total, _ = PREFIX.unpack(content[: PREFIX.size])
    fields = json.loads(content[PREFIX.size : PREFIX.size + head_bytes])
    text = content[PREFIX.size + head_bytes :][:text_bytes]
    changed = change(fields)
    head = json.dumps(fields if changed is None else changed).encode()
    body = head + text
    digest = hashlib.sha256(body).digest()
    start = PREFIX.pack(magic, len(head), text_bytes, total, digest) + body
    first = min(slot["offsets"][0] for slot in json.loads(content[PREFIX.size :][:head_bytes])["slots"])
    assert len(start) <= first
    swap(path, start.ljust(first, b"\0") + content[first:])


HEADS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a list": lambda fields: [fields["identity"]],
    "no slots": lambda fields: fields.update(slots=[]),
    "slots of no kind": lambda fields: fields.update(slots=[1, None, "a"]),
    "a slot less": lambda fields: fields["slots"].pop(),
    "an array past the end": lambda fields: fields["slots"][0].update(offsets=[1 << 40] * 3),
    "an array before the start": lambda fields: fields["slots"][0]["offsets"].__setitem__(0, -64),
    "an array between lines": lambda fields: fields["slots"][0]["offsets"].__setitem__(0, 4097),
    "fewer rows": lambda fields: fields["slots"][1].update(n=fields["slots"][1]["n"] - 16),
    "no columns": lambda fields: fields["slots"][1].update(k=0),
    "a longer vector": lambda fields: fields["slots"][-1].update(n=fields["slots"][-1]["n"] + 1),
    "another name": lambda fields: fields["slots"][1].update(name="layers.99.o"),
    "a larger model": lambda fields: fields["config"].update(hidden=1 << 20),
    "no head at all in a head": lambda fields: fields["config"].update(n_heads=0),
    "a config of no kind": lambda fields: fields.update(config="none"),
    "more layers": lambda fields: fields["config"]["layers"].append(0),
    "another exponent": lambda fields: fields["slots"][0].pop("top_exponent"),
    "a kind that no kernel reads": lambda fields: fields["slots"][1]["form"].update(kind="q9"),
    "scales that no kernel reads": lambda fields: fields["slots"][1]["form"].update(scale_dtype="float64"),
    "a group that no kernel reads": lambda fields: fields["slots"][1]["form"].update(group=48),
    "rows that are no number": lambda fields: fields["slots"][1].update(n=16.5),
    "a text for a number": lambda fields: fields["config"].update(embed_scale="1"),
    "no activation": lambda fields: fields["config"].update(activation=None),
    "a name that is code for a terminal": lambda fields: fields.update(name="\x1b[2J"),
    "a hash that is a path": lambda fields: fields.update(content_hash="../" * 16 + "x" * 16),
    "a temperature that is a text": lambda fields: fields["sampling"].update(temperature="hot"),
    "a head twice": lambda fields: {**fields, "identity": [fields["identity"]]},
    "an endless tokenizer": lambda fields: fields.update(tokenizer_bytes=-1, has_template=1),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_makes_no_sense_is_made_anew(tmp_path: Path, kind: str) -> None:
    ref = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    first, said = load_model(ref, "native", tmp_path), list[str]()
    rewrite_head(packed_path(tmp_path), HEADS[kind])

    again = load_model(ref, "native", tmp_path, said.append)

    assert_same(first, again)
    assert any(line.startswith("packing tiny") for line in said)


def packed_elsewhere(tmp_path: Path) -> Path:
    """A packed file that a user names, from a model that is not there any more."""
    source, packed = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny.packed"
    pack(str(source), "native", "auto", packed)
    source.unlink()
    return packed


def one_line(path: Path, **more: Any) -> str:
    with pytest.raises(ModelError) as refused:
        load_model(str(path), "native", path.parent, **more)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"the packed model {path} cannot be used: ")
    return line.partition("used: ")[2]


def test_a_packed_file_is_opened_without_its_source_and_has_its_bits(tmp_path: Path) -> None:
    kept = load_model(str(write_tiny_gguf(tmp_path / "tiny.gguf")), "native", tmp_path / "cache")
    packed, said = packed_elsewhere(tmp_path), list[str]()

    model = load_model(str(packed), "native", tmp_path / "none", said.append, pack="check")

    assert_same(kept, model)
    assert (model.name, model.source) == ("tiny", packed)
    assert not said
    assert not (tmp_path / "none").exists()
    assert config_of_model(str(packed), "native", tmp_path) == kept.config
    assert load_head(model, "native", tmp_path) is None
    with pytest.raises(ModelError, match="give the model it was made from"):
        open_source(locate(str(packed), tmp_path, said.append))


@pytest.mark.parametrize("kind", HEADS)
def test_a_named_file_whose_head_makes_no_sense_is_refused(tmp_path: Path, kind: str) -> None:
    packed = packed_elsewhere(tmp_path)
    rewrite_head(packed, HEADS[kind])

    assert one_line(packed)
    assert packed.exists()


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_named_file_with_a_flipped_bit_in_its_head_or_cut_short_is_refused(
    tmp_path: Path, data: st.DataObject
) -> None:
    packed = tmp_path / "tiny.packed"
    whole = packed.read_bytes() if packed.exists() else packed_elsewhere(tmp_path).read_bytes()
    _, head, text, _, _ = PREFIX.unpack(whole[: PREFIX.size])
    damaged, other = bytearray(whole), tmp_path / "other.packed"
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(8, len(whole) - 1))]
    else:
        offset = data.draw(st.integers(8, PREFIX.size + head + text - 1))
        damaged[offset] ^= 1 << data.draw(st.integers(0, 7))
    swap(other, bytes(damaged))

    assert one_line(other)


def test_what_a_named_file_must_be_is_said(tmp_path: Path) -> None:
    packed = packed_elsewhere(tmp_path)
    whole = packed.read_bytes()
    with pytest.raises(ModelError, match="packed as 'native', not as 'int8': --format"):
        load_model(str(packed), "int8", tmp_path)
    damaged = bytearray(whole)
    damaged[-1] ^= 1  # of the last vector
    swap(packed, bytes(damaged))
    load_model(str(packed), "native", tmp_path)
    assert "checksum" in one_line(packed, pack="check")
    swap(packed, whole)
    rewrite_head(packed, lambda fields: fields.update(identity=fields["identity"].replace("file", "fail")))
    assert "another version" in one_line(packed)
    swap(packed, PREFIX.pack(b"PHASWISE", 1 << 40, 0, 1 << 41, bytes(32)))
    with packed.open("r+b") as file:
        file.truncate(1 << 41)  # sparse: a head that would fill memory
    assert "head and texts" in one_line(packed)
    swap(packed, whole)
    packed.chmod(0o664)
    assert "others can write to it" in one_line(packed)


@pytest.mark.parametrize("format", ["native", "int8", "int4"])
def test_a_damaged_array_is_noticed_by_the_checksum_alone(tmp_path: Path, format: str) -> None:
    shape = TinyShape(vocab_size=261, hidden=64)
    ref = str(write_tiny_gguf(tmp_path / "tiny.gguf", shape=shape))
    first, said = load_model(ref, format, tmp_path), list[str]()
    load_model(ref, format, tmp_path, said.append, pack="check")
    assert said == []  # what was written has the checksum that it was written with
    content = bytearray(packed_path(tmp_path).read_bytes())
    content[first.weights["embed"].values.ctypes.data - first.file.address] ^= 64  # type: ignore[union-attr]
    swap(packed_path(tmp_path), bytes(content))

    load_model(ref, format, tmp_path, said.append)
    assert said == []
    assert_same(first, load_model(ref, format, tmp_path, said.append, pack="check"))
    assert said


def test_only_this_user_writes_to_what_is_packed(tmp_path: Path) -> None:
    ref = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    (tmp_path / "packed").mkdir(mode=0o777)
    load_model(ref, "native", tmp_path)
    assert (tmp_path / "packed").stat().st_mode & 0o777 == 0o700
    said: list[str] = []
    packed_path(tmp_path).chmod(0o622)

    load_model(ref, "native", tmp_path, said.append)

    assert said
    assert packed_path(tmp_path).stat().st_mode & 0o777 == 0o600


USE = """
import sys; from pathlib import Path
from phasewise.serving.loaders import load_model
model = load_model(sys.argv[1], "native", Path(sys.argv[2]))
print("mapped", flush=True); sys.stdin.readline()
print(sum(float(weight.values.view("u1").sum()) for weight in model.weights.values()))
"""


def test_a_file_that_is_cut_short_while_it_is_mapped_ends_in_one_line(tmp_path: Path) -> None:
    ref = str(write_tiny_gguf(tmp_path / "tiny.gguf", shape=TinyShape(vocab_size=5000, hidden=64)))
    load_model(ref, "native", tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", USE, ref, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    os.truncate(packed_path(tmp_path), 8192)

    _, said = process.communicate("\n", timeout=60)

    assert process.returncode == 70
    assert len(said.splitlines()) == 1
    assert str(packed_path(tmp_path)) in said


@without_asan
def test_a_bus_error_elsewhere_is_none_of_ours(tmp_path: Path) -> None:
    """The handler hands on what it does not know, and so the process dies of the signal."""
    other = tmp_path / "other"
    other.write_bytes(b"x" * 8192)
    ref = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    script = (
        "import mmap, os, sys; from pathlib import Path; from phasewise.serving.loaders import load_model;"
        f"model = load_model({ref!r}, 'native', Path({str(tmp_path)!r}));"
        f"file = open({str(other)!r}, 'r+b'); mapped = mmap.mmap(file.fileno(), 8192);"
        "os.truncate(file.fileno(), 0); print(mapped[5000])"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert result.returncode == -signal.SIGBUS
    assert "packed" not in result.stderr


def test_how_a_model_wants_to_be_sampled_is_kept(tmp_path: Path) -> None:
    write_tiny_gguf(
        tmp_path / "one.gguf", metadata={"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    )
    write_tiny_hf(tmp_path / "two")
    (tmp_path / "two" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "temperature": 0.6, "top_k": 20})
    )
    for ref in ("one.gguf", "two"):
        for _ in range(2):  # packed, and mapped
            stated = load_model(str(tmp_path / ref), "native", tmp_path).sampling
            assert (stated.temperature, stated.top_k, stated.top_p, stated.source) == (0.6, 20, 1.0, "model")
