"""The packed model on disk: one file that a second start maps and does nothing else with.

    prefix (64 bytes): magic, bytes of head, bytes of text, bytes of the whole file, digest
    head: JSON: config, names, tables of arrays       text: tokenizer JSON, then the chat template
    arrays, each 64-byte aligned, in the order a forward pass reads them

The digest covers head and text. Each array must lie in the file and have the shape that the config asks for.
A checksum of all arrays is in the head too; to compare it takes as long as reading them (`checksum`). A file
is written beside its final name and renamed, so readers see all of it or none; a file that fails a check
counts as absent and is made anew. Other users must not be able to write to the file or its directory. A file
that is cut short while it is mapped ends the process with one line (`watch_mapping`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import stat
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from phasewise._files import open_file
from phasewise._json import infinity_of, read_json
from phasewise.cython_kernels import _native, packing, sparse
from phasewise.cython_kernels._native import watch_mapping
from phasewise.cython_kernels.division import columns
from phasewise.cython_kernels.packing import PACKING_VERSION, PANEL, Array, PackedWeight
from phasewise.serving.errors import ModelError, shortage_of
from phasewise.serving.loaders.layout import VectorPlan, WeightPlan, check_packed, plan_vectors, plan_weights
from phasewise.serving.loaders.source import (
    ModelSource,
    Rows,
    WeightForm,
    check_finite,
    convert_rows,
    pack_rows,
)
from phasewise.serving.loaders.storage import NEARLY_DENSE, StorageChoice, can_be_sparse
from phasewise.serving.models.config_json import config_from_json, config_to_json
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.mapped_file import MappedFile
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.segments import prefer_huge_pages
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults

FILE_VERSION = 9  # change with anything in this module, or in how a loader reads a source
MAGIC = b"PHASWISE"
PREFIX = struct.Struct("<8sQQQ32s")
ALIGNMENT = 64
CHUNK_VALUES = 2 << 20  # weights decoded at a time by a thread: 8 MiB in float32
MOST_THREADS = 16
STALE_S = 3600  # a temporary file this old belongs to a run that died

_DIRECTORY_MODE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

Report = Callable[[str], None]


_ArrayForm = tuple[tuple[int, ...], np.dtype[np.generic], int]


@dataclass(frozen=True)
class _Slot:
    """The place of one weight or vector: offset of each of its arrays from the start of the file."""

    name: str
    n: int
    k: int
    form: WeightForm | None  # None: a float32 vector of n numbers
    offsets: tuple[int, ...]
    top_exponent: int = 0  # PackedWeight.top_exponent
    kept: int | None = None  # numbers that are not zero; None: nearly all, not counted
    stream_bytes: int | None = None  # of a sparse weight, without the tail; None: it is stored dense

    @property
    def arrays(self) -> list[_ArrayForm]:
        """Shape, dtype and bytes of each of a weight's arrays, in the order of `PackedWeight.arrays`."""
        assert self.form is not None
        dense = self.form.arrays(self.n, self.k)
        if self.stream_bytes is None:
            return dense
        stream, offsets = self.stream_bytes + packing.SPARSE_TAIL, packing.offsets_shape(self.n, self.k)
        offset_bytes = offsets[0] * offsets[1] * 4
        values: _ArrayForm = ((stream,), np.dtype(np.uint8), stream)
        return [values, *dense[1:], (offsets, np.dtype(np.uint32), offset_bytes)]

    @property
    def sizes(self) -> list[int]:
        """Size of each of its arrays, in bytes."""
        return [4 * self.n] if self.form is None else [size for _, _, size in self.arrays]


def write_packed(
    source: ModelSource,
    weight_format: str,
    identity: str,
    target: Path,
    report: Report,
    choice: StorageChoice = StorageChoice("never"),  # noqa: B008  (frozen)
) -> None:
    """Pack `source` into the file `target`. On any failure no file of that name appears or changes. `choice`:
    the choice of weights that are stored sparse."""
    weights, vectors = plan_weights(source, weight_format), plan_vectors(source)
    stored = [_stored(plan, choice) for plan in weights]
    text = _text(source)
    fields = {
        "identity": identity,
        "format": weight_format,
        "name": source.name,
        "source": str(source.path),
        "config": config_to_json(source.config),
        "tokenizer_bytes": len(text[0]),
        "has_template": source.chat_template is not None,
        "sampling": source.sampling.to_json(),
        "embedding": None if source.embedding is None else asdict(source.embedding),
        "content_hash": "0" * 64,
        "slots": [],
    }
    slots, total = _placed(fields, sum(map(len, text)), stored, vectors)
    try:
        with _renamed_when_done(target) as fd:
            os.posix_fallocate(fd, 0, total)  # a full disk says so now, not after minutes
            fields["content_hash"], tops = _write_arrays(fd, slots, weights, vectors, report)
            fields["slots"] = [asdict(replace(slot, top_exponent=tops.get(slot.name, 0))) for slot in slots]
            head = _head(fields)
            digest = hashlib.sha256(head + b"".join(text)).digest()
            assert PREFIX.size + len(head) + sum(map(len, text)) <= slots[0].offsets[0]
            prefix = PREFIX.pack(MAGIC, len(head), sum(map(len, text)), total, digest)
            _write(fd, 0, prefix + head + b"".join(text))
    except OSError as error:
        raise ModelError(
            f"the packed model of {total} bytes cannot be kept in {target.parent}: {error.strerror};"
            " PHASEWISE_CACHE names another directory"
        ) from error


def read_packed(
    target: Path, identity: str, source: Path, *, choice: StorageChoice | None = None, checksum: bool = False
) -> PackedModel | None:
    """Map the packed file if it is whole and was made from what `identity` names; None otherwise. `choice`:
    the storage that weights must have; None: any. `checksum`: True to compare all arrays with their
    checksum."""
    try:
        with open_file(target) as file:
            status = os.fstat(file.fileno())
            fields, text = _checked_head(file)
            if fields["identity"] != identity or not _is_ours_alone(status):
                return None
            if choice is not None and not all(_is_stored_so(slot, choice) for slot in _slots(fields)):
                return None
            mapped = mmap.mmap(file.fileno(), fields["file_bytes"], prot=mmap.PROT_READ)
            prefer_huge_pages(mapped)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        watch_mapping(address, fields["file_bytes"], _FAULT.format(target))
        mapping = MappedFile(target, address, fields["file_bytes"], (status.st_dev, status.st_ino))
        model = replace(_model(fields, text, mapped, source), file=mapping)
        weights = {name: (weight.n, weight.k) for name, weight in model.weights.items()}  # kernels trust it
        check_packed(model.config, weights, {name: len(vector) for name, vector in model.vectors.items()})
        if checksum and _checksum(_slots(fields), mapped) != fields["content_hash"]:
            return None
        return model
    except Exception as error:  # a head may say anything, and be wrong in every way there is
        if shortage_of(error) is not None:
            raise  # the file may be whole
        return None


def _is_stored_so(slot: _Slot, choice: StorageChoice) -> bool:
    if slot.form is None:
        return True
    return (slot.stream_bytes is not None) == choice.is_sparse(slot.form, slot.n, slot.k, slot.kept)


_FAULT = (
    "phasewise: the packed model {} was cut short, or cannot be read any more, while it is in use; start "
    "again, which makes it anew"
)


def _is_ours_alone(status: os.stat_result) -> bool:
    """True if no user but this one and root can have written the file or can write to it now."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE


def read_head(target: Path) -> dict[str, Any] | None:
    """The head of a packed file, without its arrays; None if it is not whole."""
    try:
        with open_file(target) as file:
            return _checked_head(file)[0]
    except Exception:  # as in `read_packed`
        return None


def versions() -> str:
    """The versions of file and packing, a part of every identity: a file of other versions is not used."""
    return f"file {FILE_VERSION}, packing {PACKING_VERSION}"


def _text(source: ModelSource) -> tuple[bytes, bytes]:
    """Tokenizer and chat template as UTF-8. Raises ModelError for half characters, which JSON can hold."""
    try:
        return source.tokenizer_json().encode(), (source.chat_template or "").encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"{source.path} has a tokenizer or chat template that is not Unicode text"
        ) from error


def _checked_head(file: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """The head's fields, with `file_bytes` added, and the text; ValueError if anything is not as written."""
    magic, head_bytes, text_bytes, total, digest = PREFIX.unpack(file.read(PREFIX.size))
    body_bytes = head_bytes + text_bytes
    if magic != MAGIC or os.fstat(file.fileno()).st_size != total or body_bytes > total:
        raise ValueError("not a packed file, or cut short")
    body = file.read(body_bytes)
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("a damaged head")
    fields: dict[str, Any] = read_json(body[:head_bytes], constant_of=infinity_of)
    fields["file_bytes"] = total
    return fields, body[head_bytes:]


def _head(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def _stored(plan: WeightPlan, choice: StorageChoice) -> _Slot:
    """The slot of a weight with its storage and, if sparse, its size; not yet a place. Where storage depends
    on the numbers, all rows are read once, and once more when they are written."""
    slot = _Slot(plan.name, plan.n, plan.k, plan.form, ())
    if not choice.wants_sparse or not can_be_sparse(plan.form):
        return slot
    kept, stream_bytes = 0, 0
    for packed in _made_ahead(_packed_chunks(plan)):
        stream, _, of_chunk = _sparse_chunk(packed, stream_bytes)
        if stream_bytes == 0 and choice.mode != "always" and of_chunk > NEARLY_DENSE * packed.n * packed.k:
            return slot
        kept += of_chunk
        stream_bytes += stream.nbytes
    slot = replace(slot, kept=kept)
    if not choice.is_sparse(plan.form, plan.n, plan.k, kept):
        return slot
    return replace(slot, stream_bytes=stream_bytes)


def kept_numbers(plan: WeightPlan) -> int:
    """Count the numbers that are not zero of a weight that can be sparse; reads all of it."""
    return sum(sparse.kept(packed) for packed in _made_ahead(_packed_chunks(plan)))


def _sparse_chunk(packed: PackedWeight, offset: int) -> tuple[Array, Array, int]:
    """Stream, offsets and kept numbers of panels, whose stream begins at byte `offset` of the weight's."""
    return _native.sparse_pack(packed.values, packed.kind, packed.zero_point, packed.k, offset)


def _placed(
    fields: dict[str, Any], text_bytes: int, weights: list[_Slot], vectors: list[VectorPlan]
) -> tuple[list[_Slot], int]:
    """Slots and the size of the file. Offsets lengthen the head that they follow, so its size is a guess."""
    unplaced = [*weights, *(_Slot(vector.name, vector.length, 1, None, ()) for vector in vectors)]
    room = len(_head(fields)) + 500 * (len(unplaced) + 1)
    end = -(-(PREFIX.size + room + text_bytes) // 4096) * 4096
    slots = []
    for slot in unplaced:
        offsets = []
        for size in slot.sizes:
            offsets.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        slots.append(replace(slot, offsets=tuple(offsets)))
    return slots, end


@contextlib.contextmanager
def _renamed_when_done(target: Path) -> Iterator[int]:
    """A descriptor of a new file that takes the name `target` if the block ends well, and vanishes if not."""
    _make_directory(target.parent)
    for left_over in target.parent.glob(f".{target.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left_over.stat().st_mtime > STALE_S:
                left_over.unlink()
    fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        yield fd
        os.fsync(fd)
        # Written bit by bit, it lies in small pages; a process that maps it reads it anew into large ones.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def _make_directory(path: Path) -> None:
    """Make a directory for this user alone, since a writer could replace a packed file in it."""
    path.mkdir(parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != _DIRECTORY_MODE:
        path.chmod(_DIRECTORY_MODE)


def _write_arrays(
    fd: int, slots: list[_Slot], weights: list[WeightPlan], vectors: list[VectorPlan], report: Report
) -> tuple[str, dict[str, int]]:
    """Fill every slot, in order.

    Returns the SHA-256 over names, shapes and arrays, and top exponents by the names of weights."""
    content, tops = hashlib.sha256(), {}
    total, done, told, begun_s = sum(plan.nbytes for plan in weights), 0, 0, time.monotonic()
    for slot, weight in zip(slots, weights, strict=False):  # the vectors' slots come after
        tops[slot.name] = _write_weight(fd, slot, weight, content.update)
        done += weight.nbytes
        if 100 * done // total >= told + 10:
            told = 100 * done // total
            left_s = (time.monotonic() - begun_s) * (total - done) / done
            report(f"packing: {told} % of {total / 1e6:.0f} MB, {left_s:.0f} s left")
    for slot, vector in zip(slots[len(weights) :], vectors, strict=True):
        numbers = np.concatenate([_vector(part.rows(0, 1), slot.name) for part in vector.parts])
        content.update(_label(slot))
        content.update(_bytes_of(numbers))
        _write(fd, slot.offsets[0], _bytes_of(numbers))
    return content.hexdigest(), tops


def _write_weight(
    fd: int, slot: _Slot, plan: WeightPlan, digest: Callable[[bytes | memoryview], None]
) -> int:
    """Write a weight a few rows at a time, so that memory stays small; returns its top exponent. The digest
    is over the dense weight, whatever its storage."""
    digest(_label(slot))
    places, top, stream_bytes = list(slot.offsets), 0, 0
    for packed in _made_ahead(_packed_chunks(plan)):
        for array in packed.arrays:
            digest(_bytes_of(array))
        arrays = packed.arrays
        if slot.stream_bytes is not None:
            stream, offsets, _ = _sparse_chunk(packed, stream_bytes)
            stream_bytes += stream.nbytes
            arrays = replace(packed, values=stream, offsets=offsets).arrays
        for i, array in enumerate(arrays):
            places[i] += _write(fd, places[i], _bytes_of(array))
        top = max(top, packed.top_exponent)
    if stream_bytes != (slot.stream_bytes or 0):
        raise ModelError(f"{plan.name} changed while it was read: pack it again")
    return top


def _label(slot: _Slot) -> bytes:
    return f"{slot.name} {slot.n} {slot.k} {slot.form}".encode()


def _packed_chunks(plan: WeightPlan) -> Iterator[Callable[[], PackedWeight]]:
    """Yield calls that pack the weight in runs of whole panels, in order."""
    step = _rows_at_once(plan.k)
    for start in range(0, plan.n, step):
        yield partial(_packed_chunk, plan, start, min(start + step, plan.n))


def _packed_chunk(plan: WeightPlan, start: int, stop: int) -> PackedWeight:
    pieces, base = [], 0
    for part in plan.parts:
        low, high = max(start - base, 0), min(stop - base, part.shape[0])
        if low < high:
            pieces.append(convert_rows(part.rows(low, high), plan.form, plan.name))
        base += part.shape[0]
    return pack_rows(pieces, plan.form, plan.name)


def _made_ahead(calls: Iterator[Callable[[], PackedWeight]]) -> Iterator[PackedWeight]:
    """Yield results in order, made by as many threads as there are cores: numpy runs without the GIL."""
    threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    waiting: deque[Future[PackedWeight]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _vector(rows: Rows, what: str) -> Array:
    assert isinstance(rows, np.ndarray)
    check_finite(rows, what)
    return np.ascontiguousarray(rows, dtype=np.float32).reshape(-1)


def _bytes_of(array: Array) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _write(fd: int, offset: int, data: bytes | memoryview) -> int:
    view, written = memoryview(data), 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], offset + written)
    return written


def _slots(fields: dict[str, Any]) -> list[_Slot]:
    """The slots that a head names. Raises ValueError where an array is not aligned or not in the file."""
    slots = []
    for slot_fields in fields["slots"]:
        form = None if slot_fields["form"] is None else WeightForm(**slot_fields["form"])
        slot = _Slot(**{**slot_fields, "form": form, "offsets": tuple(slot_fields["offsets"])})
        if slot.stream_bytes is not None and (
            form is None or not can_be_sparse(form) or slot.stream_bytes < 0
        ):
            raise ValueError(f"{slot.name} has a stream of {slot.stream_bytes} bytes")
        for offset, size in zip(slot.offsets, slot.sizes, strict=True):
            in_file = 0 <= offset <= fields["file_bytes"] - size
            if slot.n <= 0 or slot.k <= 0 or offset % ALIGNMENT or not in_file:
                raise ValueError(f"{slot.name} lies at byte {offset} of {fields['file_bytes']}")
        slots.append(slot)
    return slots


def _checksum(slots: list[_Slot], mapped: mmap.mmap) -> str:
    """The SHA-256 that `_write_arrays` computes, chunk by chunk of rows, in order."""
    content, memory = hashlib.sha256(), memoryview(mapped)  # of dense weights, whatever their storage
    for slot in slots:
        content.update(_label(slot))
        if slot.form is None:
            content.update(memory[slot.offsets[0] : slot.offsets[0] + 4 * slot.n])
            continue
        step, weight = _rows_at_once(slot.k) // PANEL, _weight(slot, mapped)
        for start in range(0, weight.panels, step):
            chunk = columns(weight, start, min(start + step, weight.panels))
            assert chunk is not None
            for array in packing.to_dense(chunk).arrays:
                content.update(_bytes_of(array))
    return content.hexdigest()


def _rows_at_once(k: int) -> int:
    """Rows of a weight that are read at once, in whole panels."""
    return max(CHUNK_VALUES // k // PANEL, 1) * PANEL


def _model(fields: dict[str, Any], text: bytes, mapped: mmap.mmap, source: Path) -> PackedModel:
    weights: dict[str, PackedWeight] = {}
    vectors: dict[str, Any] = {}
    for slot in _slots(fields):
        if slot.form is None:
            vectors[slot.name] = np.frombuffer(mapped, np.float32, slot.n, slot.offsets[0])
        else:
            weight = weights[slot.name] = _weight(slot, mapped)
            if weight.is_sparse and sparse.kept(weight) != slot.kept:  # by offsets, masks and length
                raise ValueError(f"{slot.name} keeps other weights than the head says")
    tokenizer_bytes = fields["tokenizer_bytes"]
    if not 0 <= tokenizer_bytes <= len(text):
        raise ValueError(f"a tokenizer of {tokenizer_bytes} bytes, of {len(text)}")
    return PackedModel(
        config=config_from_json(fields["config"]),
        format=fields["format"],
        name=fields["name"],
        source=source,
        content_hash=fields["content_hash"],
        weights=weights,
        vectors=vectors,
        tokenizer_json=text[:tokenizer_bytes].decode(),
        chat_template=text[tokenizer_bytes:].decode() if fields["has_template"] else None,
        weight_bytes=sum(weight.nbytes for weight in weights.values()),
        sampling=SamplingDefaults(**fields["sampling"]),
        embedding=None if fields["embedding"] is None else Embedding.from_json(fields["embedding"]),
    )


def _weight(slot: _Slot, mapped: mmap.mmap) -> PackedWeight:
    form = slot.form
    assert form is not None
    views: list[Array] = []
    for (shape, dtype, size), offset in zip(slot.arrays, slot.offsets, strict=True):
        views.append(np.frombuffer(mapped, dtype, size // dtype.itemsize, offset).reshape(shape))
    offsets = None if slot.stream_bytes is None else views.pop()
    values, scales, mins = [*views, None, None][:3]
    assert values is not None
    packed = PackedWeight(form.kind, slot.n, slot.k, form.group, form.zero_point, values, scales, mins)
    return replace(packed, top_exponent=slot.top_exponent, offsets=offsets)
