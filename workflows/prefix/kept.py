"""Folders that keep beginnings of prompts: what is in them, whether it is whole, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise._files import read_file
from phasewise._json import read_json
from phasewise.workflows.errors import UsageError, WorkflowError

if TYPE_CHECKING:
    from phasewise.serving.prefix_store.folder import PrefixFolder

_MOST_DESCRIBED = 1 << 16


@dataclass(frozen=True)
class KeptPrefixes:
    """The part of a folder that is of one model under one arithmetic. id: the identity's digest."""

    path: str
    id: str
    model: str | None
    kv_format: str | None
    arithmetic: str | None
    n_blocks: int
    n_tokens: int
    n_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CheckedPrefixes:
    """A folder whose records were read. damaged: names of files."""

    path: str
    n_records: int
    damaged: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "records": self.n_records, "damaged": list(self.damaged)}


def list_prefixes(paths: Sequence[Path]) -> list[KeptPrefixes]:
    """The contents of folders. WorkflowError, ServingError for what is none."""
    return [prefix for path in paths for prefix in _in_folder(path)]


def verify_prefixes(paths: Sequence[Path]) -> list[CheckedPrefixes]:
    """Read all records and compare their digests. Raises as `list_prefixes`."""
    return [_check_folder(path) for path in paths]


def remove_prefixes(path: Path, identity: str | None = None) -> int:
    """Remove the records of a folder; where `identity` begins an id, those of that one alone. The number of
    files. UsageError for an empty `identity`; else as `list_prefixes`.
    """
    if identity == "":
        raise UsageError("--id is empty: name what `phasewise prefix list` shows, or leave it out")
    folder, n_removed = _folder(path), 0
    for name, _ in folder.kept():
        head = None
        with suppress(OSError):
            head = folder.head(name)
        if identity is None or (head is not None and head.identity.hex().startswith(identity)):
            folder.remove(name)
            n_removed += 1
    return n_removed


def _folder(path: Path) -> PrefixFolder:
    from phasewise.serving.prefix_store.folder import KEY_FILE, PrefixFolder

    if not (path / KEY_FILE).exists():
        raise WorkflowError(f"{path} is no prefix cache: serve --prefix-cache makes one")
    return PrefixFolder.open(path, 0)


def _in_folder(path: Path) -> list[KeptPrefixes]:
    folder = _folder(path)
    blocks: dict[str, list[tuple[int, int]]] = {}
    for name, kept in folder.kept():
        with suppress(OSError):
            head = folder.head(name)
            if head is not None:
                blocks.setdefault(head.identity.hex(), []).append((head.n_tokens, kept.n_bytes))
    prefixes = []
    for identity, sizes in sorted(blocks.items()):
        model, parts = _described(path, identity)
        prefixes.append(
            KeptPrefixes(
                str(path),
                identity[:16],
                model,
                _told(parts, "kv_format"),
                _told(parts, "arithmetic"),
                len(sizes),
                sum(n_tokens for n_tokens, _ in sizes),
                sum(n_bytes for _, n_bytes in sizes),
            )
        )
    return prefixes


def _described(path: Path, identity: str) -> tuple[str | None, dict[str, Any]]:
    """The model and the components of an identity, as far as the folder says."""
    from phasewise.serving.prefix_store.folder import IDENTITY_SUFFIX

    place = path / f"{identity}{IDENTITY_SUFFIX}"
    if place.is_symlink():  # the folder's servers make none
        return None, {}
    try:
        told = read_json(read_file(place, _MOST_DESCRIBED))
        model, parts = told["model"], told["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, {}
    return (model if isinstance(model, str) else None), (parts if isinstance(parts, dict) else {})


def _told(parts: Any, name: str) -> str | None:
    value = parts.get(name)
    return value if isinstance(value, str) else None


def _check_folder(path: Path) -> CheckedPrefixes:
    from phasewise.serving.prefix_store.blocks import BadRecord, check_record

    folder, n_records, damaged = _folder(path), 0, []
    for name, kept in folder.kept():
        n_records += 1
        try:
            buffer = memoryview(bytearray(kept.n_bytes))
            check_record(folder.key, name, buffer[: folder.read_into(name, buffer)])
        except FileNotFoundError:
            n_records -= 1  # evicted meanwhile
        except (BadRecord, OSError, MemoryError) as error:
            damaged.append(f"{name.hex()}: {error}")
    return CheckedPrefixes(str(path), n_records, damaged)
