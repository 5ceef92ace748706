"""The packed model on disk: one file that a second start maps and does nothing else with.

    prefix (64 bytes): magic, bytes of head, bytes of text, bytes of the whole file, digest
    head: JSON: config, names, tables of arrays       text: tokenizer JSON, then the chat template
    arrays, each 64-byte aligned, in the order a forward pass reads them

The digest covers head and text. Each array must lie in the file and have the shape that the config asks for.
A checksum of all arrays is in the head too; to compare it takes as long as reading them (`checksum`). A file
is written beside its final name and renamed, so readers see all of it or none; a file of the cache that fails
a check counts as absent and is made anew, one that a user names is refused. Other users must not be able to
write to the file or its directory. A file that is cut short while it is mapped ends the process with one line
(`watch_mapping`). The same file may lie in memory instead (`pack_in_memory`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from phasewise._files import open_file
from phasewise._json import infinity_of, read_json
from phasewise._words import reason_of
from phasewise.cython_kernels import _native, packing, sparse
from phasewise.cython_kernels._native import watch_mapping
from phasewise.cython_kernels.division import columns
from phasewise.cython_kernels.packing import PACKING_VERSION, PANEL, Array, PackedWeight
from phasewise.serving.errors import ModelError, shortage_of
from phasewise.serving.loaders.chunks import made_ahead, packed_chunks, rows_at_once
from phasewise.serving.loaders.layout import VectorPlan, WeightPlan, check_packed, plan_vectors, plan_weights
from phasewise.serving.loaders.source import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    ModelSource,
    Rows,
    WeightForm,
    check_finite,
)
from phasewise.serving.loaders.storage import NEARLY_DENSE, StorageChoice, can_be_sparse
from phasewise.serving.models.config_json import config_from_json, config_to_json
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.mapped_file import MappedFile, MemoryFile
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.headroom import available_bytes
from phasewise.serving.processes.segments import prefer_huge_pages
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults

FILE_VERSION = 9  # change with anything in this module, or in how a loader reads a source
MAGIC = b"PHASWISE"
PREFIX = struct.Struct("<8sQQQ32s")
ALIGNMENT = 64
MOST_TEXT_BYTES = MAX_TOKENIZER_BYTES + MAX_JSON_BYTES  # of a tokenizer and a chat template
TELL_EVERY_S = 5.0
RUN_BYTES = 4 << 20  # written at once, whole large pages
MOST_ARRAYS = 4  # of a weight
STALE_S = 3600  # a temporary file this old belongs to a run that died

_NAME, _HASH = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,512}"), re.compile("[0-9a-f]{64}")
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
    kept_in: str,
    report: Report,
    choice: StorageChoice,
) -> None:
    """Pack `source` into the file `target`. On any failure, which may be an OSError, no file of that name
    appears or changes. `kept_in`: the place, for people. `choice`: the choice of weights that are stored
    sparse."""
    layout = _Layout.of(source, weight_format, identity, choice)
    report(f"packing {layout.about} into {kept_in}")
    with _renamed_when_done(target) as fd:
        os.posix_fallocate(fd, 0, layout.n_bytes)  # a full disk says so now, not after minutes
        layout.write(fd, report)


def pack_in_memory(
    source: ModelSource, weight_format: str, identity: str, report: Report, choice: StorageChoice
) -> MemoryFile:
    """Pack `source` into a file in memory. Arguments as for `write_packed`. Raises ModelError where it does
    not fit into free memory."""
    layout = _Layout.of(source, weight_format, identity, choice)
    left = available_bytes()
    if left is not None and layout.n_bytes > left:
        raise ModelError(
            f"--pack memory: {layout.about} does not fit into the {left / 1e6:.0f} MB that are free; without"
            " it the packed model is a file, of which memory holds what fits"
        )
    report(f"packing {layout.about} in memory, as every start with --pack memory does")
    try:
        file = MemoryFile.create(layout.n_bytes)
        layout.write(file.fd, report)
    except OSError as error:
        raise ModelError(
            f"the system refused {layout.n_bytes / 1e6:.0f} MB of memory for weights: {error.strerror}"
        ) from error
    return file


@dataclass(frozen=True)
class _Layout:
    """All that is known of a packed file before its arrays are written. `fields`: of its head, without what
    the arrays decide."""

    fields: dict[str, Any]
    text: bytes
    weights: list[WeightPlan]
    vectors: list[VectorPlan]
    slots: list[_Slot]
    n_bytes: int

    @classmethod
    def of(cls, source: ModelSource, weight_format: str, identity: str, choice: StorageChoice) -> _Layout:
        weights, vectors = plan_weights(source, weight_format), plan_vectors(source)
        stored = [_stored(plan, choice) for plan in weights]
        tokenizer, template = _text(source)
        fields = {
            "identity": identity,
            "format": weight_format,
            "name": source.name,
            "source": str(source.path),
            "config": config_to_json(source.config),
            "tokenizer_bytes": len(tokenizer),
            "has_template": source.chat_template is not None,
            "sampling": source.sampling.to_json(),
            "embedding": None if source.embedding is None else asdict(source.embedding),
            "content_hash": "0" * 64,
            "slots": [],
        }
        text = tokenizer + template
        return cls(fields, text, weights, vectors, *_placed(fields, len(text), stored, vectors))

    @property
    def about(self) -> str:
        """Model, format and size, for people."""
        return f"{self.fields['name']} as {self.fields['format']} ({self.n_bytes / 1e6:.0f} MB)"

    def write(self, fd: int, report: Report) -> None:
        """Write the file; its prefix comes last."""
        content_hash, tops = _write_arrays(fd, self.slots, self.weights, self.vectors, report)
        slots = [asdict(replace(slot, top_exponent=tops.get(slot.name, 0))) for slot in self.slots]
        head = json.dumps({**self.fields, "content_hash": content_hash, "slots": slots}).encode()
        digest = hashlib.sha256(head + self.text).digest()
        assert PREFIX.size + len(head) + len(self.text) <= self.slots[0].offsets[0]
        prefix = PREFIX.pack(MAGIC, len(head), len(self.text), self.n_bytes, digest)
        _write(fd, 0, prefix + head + self.text)


def read_packed(
    target: Path, identity: str, source: Path, *, choice: StorageChoice | None = None, checksum: bool = False
) -> PackedModel | None:
    """Map the packed file if it is whole and was made from what `identity` names; None otherwise. `choice`:
    the storage that weights must have; None: any. `checksum`: True to compare all arrays with their
    checksum."""
    try:
        return _mapped(target, lambda own: own == identity, source, choice, checksum)
    except Exception as error:  # a head may say anything, and be wrong in every way there is
        if shortage_of(error) is not None:
            raise  # the file may be whole
        return None


def open_packed(
    path: Path, weight_format: str, choice: StorageChoice | None = None, *, checksum: bool = False
) -> PackedModel:
    """Map a packed file that a user names. `weight_format`, `choice`, `checksum`: what it must have, as for
    `read_packed`. Raises ModelError, of one line, for any fault."""

    def is_right(identity: str) -> bool:
        version, own_format, *_ = f"{identity}\n".split("\n")
        if version != versions():
            raise _PackedError(f"it was packed by another version ({version!r:.60}): pack it again")
        if own_format != weight_format:
            raise _PackedError(
                f"it is packed as {own_format!r:.20}, not as {weight_format!r}: --format names it"
            )
        return True

    try:
        return _mapped(path, is_right, path, choice, checksum)
    except Exception as error:
        if shortage_of(error) is not None:
            raise
        is_told = isinstance(error, ModelError | OSError | _PackedError)
        reason = reason_of(error) if is_told else "its head makes no sense"
        raise ModelError(f"the packed model {path} cannot be used: {reason:.300}") from error


def read_in_memory(file: MemoryFile, identity: str, source: Path) -> PackedModel:
    """Map a file of `pack_in_memory`, which lives as long as the model."""
    model = _mapped(file.path, lambda own: own == identity, source, None, checksum=False)
    assert model.file is not None
    return replace(model, file=replace(model.file, memory=file))


def is_packed(path: Path) -> bool:
    """True if a file begins as packed ones do. A GGUF file is told by its name, without opening it."""
    try:
        if path.suffix == ".gguf" or path.is_dir():
            return False
        with open_file(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class _PackedError(ValueError):
    """The reason why a packed file cannot be used."""


def _mapped(
    path: Path, is_right: Callable[[str], bool], source: Path, choice: StorageChoice | None, checksum: bool
) -> PackedModel:
    """Map a packed file. Raises whatever a file raises that is not as written, or has an identity or storage
    that is not right."""
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        fields, text = _checked_head(file)
        if not is_right(fields["identity"]):
            raise _PackedError("it was made from something else")
        if not _is_ours_alone(status):
            mode = f"owner {status.st_uid}, mode {status.st_mode & 0o777:o}"
            raise _PackedError(f"others can write to it ({mode}): it must be yours or root's, and mode 644")
        if choice is not None and not all(_is_stored_so(slot, choice) for slot in _slots(fields)):
            raise _PackedError("its weights are stored otherwise: --sparse auto takes them as they are")
        mapped = mmap.mmap(file.fileno(), fields["file_bytes"], prot=mmap.PROT_READ)
        prefer_huge_pages(mapped)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    watch_mapping(address, fields["file_bytes"], _FAULT.format(path))
    mapping = MappedFile(path, address, fields["file_bytes"], (status.st_dev, status.st_ino))
    model = replace(_model(fields, text, mapped, source), file=mapping)
    weights = {name: (weight.n, weight.k) for name, weight in model.weights.items()}  # kernels trust it
    check_packed(model.config, weights, {name: len(vector) for name, vector in model.vectors.items()})
    if checksum and _checksum(_slots(fields), mapped) != fields["content_hash"]:
        raise _PackedError("its weights do not have their checksum: it is damaged")
    return model


def _is_stored_so(slot: _Slot, choice: StorageChoice) -> bool:
    if slot.form is None:
        return True
    return (slot.stream_bytes is not None) == choice.is_sparse(slot.form, slot.n, slot.k, slot.kept)


_FAULT = (
    "phasewise: the packed model {} was cut short, or cannot be read any more, while it is in use; start "
    "again: a file of the cache is made anew"
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
        raise _PackedError("it is no packed file, or cut short")
    if head_bytes > MAX_JSON_BYTES or text_bytes > MOST_TEXT_BYTES:
        raise _PackedError(f"its head and texts have {body_bytes} bytes")
    body = file.read(body_bytes)
    if hashlib.sha256(body).digest() != digest:
        raise _PackedError("its head is damaged")
    fields: dict[str, Any] = read_json(body[:head_bytes], constant_of=infinity_of)
    fields["file_bytes"] = total
    return fields, body[head_bytes:]


def _stored(plan: WeightPlan, choice: StorageChoice) -> _Slot:
    """The slot of a weight with its storage and, if sparse, its size; not yet a place. Where storage depends
    on the numbers, all rows are read once, and once more when they are written."""
    slot = _Slot(plan.name, plan.n, plan.k, plan.form, ())
    if not choice.wants_sparse or not can_be_sparse(plan.form):
        return slot
    kept, stream_bytes = 0, 0
    for packed in made_ahead(packed_chunks(plan)):
        stream, _, of_chunk = _sparse_chunk(packed, stream_bytes)
        if stream_bytes == 0 and choice.mode != "always" and of_chunk > NEARLY_DENSE * packed.n * packed.k:
            return slot
        kept += of_chunk
        stream_bytes += stream.nbytes
    slot = replace(slot, kept=kept)
    if not choice.is_sparse(plan.form, plan.n, plan.k, kept):
        return slot
    return replace(slot, stream_bytes=stream_bytes)


def _sparse_chunk(packed: PackedWeight, offset: int) -> tuple[Array, Array, int]:
    """Stream, offsets and kept numbers of panels, whose stream begins at byte `offset` of the weight's."""
    return _native.sparse_pack(packed.values, packed.kind, packed.zero_point, packed.k, offset)


def _placed(
    fields: dict[str, Any], text_bytes: int, weights: list[_Slot], vectors: list[VectorPlan]
) -> tuple[list[_Slot], int]:
    """Slots and the size of the file. Offsets lengthen the head that they follow, so its size is a guess."""
    unplaced = [*weights, *(_Slot(vector.name, vector.length, 1, None, ()) for vector in vectors)]
    room = len(json.dumps(fields)) + 500 * (len(unplaced) + 1)
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
    buffers = [memoryview(bytearray(RUN_BYTES)) for _ in range(MOST_ARRAYS)]
    total, done, begun_s = sum(plan.nbytes for plan in weights), 0, time.monotonic()
    told_s = begun_s
    chunks = made_ahead(chain.from_iterable(map(packed_chunks, weights)))
    for slot, weight in zip(slots, weights, strict=False):  # the vectors' slots come after
        tops[slot.name] = _write_weight(fd, slot, chunks, content.update, buffers)
        done += weight.nbytes
        now_s = time.monotonic()
        if now_s >= told_s + TELL_EVERY_S:
            told_s, left_s = now_s, (now_s - begun_s) * (total - done) / done
            report(f"packing: {100 * done // total} % of {total / 1e6:.0f} MB, {left_s:.0f} s left")
    for slot, vector in zip(slots[len(weights) :], vectors, strict=True):
        numbers = np.concatenate([_vector(part.rows(0, 1), slot.name) for part in vector.parts])
        content.update(_label(slot))
        content.update(_bytes_of(numbers))
        _write(fd, slot.offsets[0], _bytes_of(numbers))
    return content.hexdigest(), tops


def _write_weight(
    fd: int,
    slot: _Slot,
    chunks: Iterator[PackedWeight],
    digest: Callable[[bytes | memoryview], None],
    buffers: list[memoryview],
) -> int:
    """Take the chunks of a weight, and write them; returns its top exponent. The digest is over the dense
    weight, whatever its storage. `buffers`: one of RUN_BYTES for each array."""
    digest(_label(slot))
    top, stream_bytes, rows = 0, 0, 0
    runs = [_Run(fd, offset, buffer) for offset, buffer in zip(slot.offsets, buffers, strict=False)]
    while rows < slot.n:
        packed = next(chunks)
        rows += packed.n
        for array in packed.arrays:
            digest(_bytes_of(array))
        arrays = packed.arrays
        if slot.stream_bytes is not None:
            stream, offsets, _ = _sparse_chunk(packed, stream_bytes)
            stream_bytes += stream.nbytes
            arrays = replace(packed, values=stream, offsets=offsets).arrays
        for run, array in zip(runs, arrays, strict=True):
            run.add(_bytes_of(array))
        top = max(top, packed.top_exponent)
    for run in runs:
        run.write_out()
    if stream_bytes != (slot.stream_bytes or 0):
        raise ModelError(f"{slot.name} changed while it was read: pack it again")
    return top


class _Run:
    """Writes an array in runs that end at multiples of RUN_BYTES of the file: the page cache then holds them
    in large pages, as a file written in small pieces is not."""

    def __init__(self, fd: int, place: int, buffer: memoryview) -> None:
        self._fd, self._place, self._buffer, self._filled = fd, place, buffer, 0

    def add(self, data: memoryview) -> None:
        while data:
            n = min(len(data), RUN_BYTES - (self._place + self._filled) % RUN_BYTES)
            self._buffer[self._filled : self._filled + n] = data[:n]
            self._filled, data = self._filled + n, data[n:]
            if (self._place + self._filled) % RUN_BYTES == 0:
                self.write_out()

    def write_out(self) -> None:
        self._place += _write(self._fd, self._place, self._buffer[: self._filled])
        self._filled = 0


def _label(slot: _Slot) -> bytes:
    return f"{slot.name} {slot.n} {slot.k} {slot.form}".encode()


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
        step, weight = rows_at_once(slot.form, slot.k) // PANEL, _weight(slot, mapped)
        for start in range(0, weight.panels, step):
            chunk = columns(weight, start, min(start + step, weight.panels))
            assert chunk is not None
            for array in packing.to_dense(chunk).arrays:
                content.update(_bytes_of(array))
    return content.hexdigest()


def _model(fields: dict[str, Any], text: bytes, mapped: mmap.mmap, source: Path) -> PackedModel:
    weights: dict[str, PackedWeight] = {}
    vectors: dict[str, Any] = {}
    for slot in _slots(fields):
        if slot.form is None:
            vectors[slot.name] = np.frombuffer(mapped, np.float32, slot.n, slot.offsets[0])
        else:
            weight = weights[slot.name] = _weight(slot, mapped)
            _native.prepared_row_bytes(weight)  # raises WeightError for what no kernel reads
            if weight.is_sparse and sparse.kept(weight) != slot.kept:  # by offsets, masks and length
                raise ValueError(f"{slot.name} keeps other weights than the head says")
    if not (_NAME.fullmatch(fields["name"]) and _HASH.fullmatch(fields["content_hash"])):
        raise ValueError("a name or a hash that no model has")
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
        sampling=SamplingDefaults.from_json(fields["sampling"]),
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
