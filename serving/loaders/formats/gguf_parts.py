"""A model in several GGUF files (`llama-gguf-split`) as one: any of its files names them all."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.gguf_file import GgufHeader, TensorInfo, read_header
from phasewise.serving.loaders.source import SourceFile

MOST_PARTS = 512
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COUNT, _NUMBER, _N_TENSORS = "split.count", "split.no", "split.tensors.count"


def part_paths(path: Path) -> list[Path]:
    """The paths that all parts of the model at `path` must have, in their order; `path` if it is no part."""
    match = _PART.fullmatch(path.name)
    count = int(match["count"]) if match else 0
    if match is None or not 1 <= int(match["number"]) <= count <= MOST_PARTS:
        return [path]
    return [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
    ]


def stem_of(file_name: str) -> str:
    """The name of a model, by that of its file or of a part of it; bytes that are not UTF-8 as `\\xe9`."""
    match = _PART.fullmatch(file_name)
    stem = match["stem"] if match else file_name.removesuffix(".gguf")
    return os.fsencode(stem).decode(errors="backslashreplace")


class GgufFiles:
    """One or several open files as one range of bytes: those of a part follow those of the part before."""

    def __init__(self, files: list[SourceFile]) -> None:
        self._files = files
        self._ends = list(accumulate(file.size for file in files))
        self.path = files[0].path
        self.size = self._ends[-1]

    def start_of(self, part: int) -> int:
        """The offset of a part's first byte."""
        return self._ends[part] - self._files[part].size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes, of one part."""
        part = bisect_right(self._ends, offset)
        return self._files[part].read(offset - self.start_of(part), length)

    def close(self) -> None:
        for file in self._files:
            file.close()


def open_gguf(path: Path) -> tuple[GgufFiles, GgufHeader]:
    """The file, or all parts of the model that it is part of, open, and the checked header: the metadata of
    the first part and the tensors of all. The caller closes the files.
    """
    with ExitStack() as stack:
        named = SourceFile(path)
        stack.callback(named.close)
        header = read_header(named)
        count = _whole_number(header.metadata, _COUNT, path, 1)
        if count == 1:
            stack.pop_all()
            return GgufFiles([named]), header
        paths = part_paths(path)
        if len(paths) != count:
            raise ModelError(
                f"{path} is one of {counted(count, 'part')} of a model: its name must end in "
                f"-00001-of-{count:05}.gguf, with its own number, and the others must lie beside it"
            )
        files = [stack.enter_context(SourceFile(part_path)) for part_path in paths]
        headers = [read_header(file) for file in files]
        stack.pop_all()
    named.close()
    whole = GgufFiles(files)
    try:
        return whole, _joined(whole, paths, headers)
    except BaseException:
        whole.close()
        raise


def _joined(whole: GgufFiles, paths: list[Path], headers: list[GgufHeader]) -> GgufHeader:
    tensors: dict[str, TensorInfo] = {}
    for part, (path, header) in enumerate(zip(paths, headers, strict=True)):
        number = _whole_number(header.metadata, _NUMBER, path)
        count = _whole_number(header.metadata, _COUNT, path)
        if (number, count) != (part, len(paths)):
            raise ModelError(
                f"{path} says that it is part {number + 1} of {count}: it must be the one that its name says"
            )
        for name, info in header.tensors.items():
            if name in tensors:
                raise ModelError(f"{path} has tensor {name!r:.80}, which an earlier part has too")
            tensors[name] = replace(info, offset=whole.start_of(part) + info.offset)
    n_promised = _whole_number(headers[0].metadata, _N_TENSORS, paths[0], len(tensors))
    if n_promised != len(tensors):
        raise ModelError(
            f"{paths[0]} promises {counted(n_promised, 'tensor')}, and its parts have {len(tensors)}"
        )
    return GgufHeader(headers[0].metadata, tensors)


def _whole_number(metadata: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= 1 << 20:
        raise ModelError(f"{path} has {key} = {value!r:.60}: a whole number expected")
    return max(1, value) if key == _COUNT else value
