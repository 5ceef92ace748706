"""Models by hub name, through huggingface_hub; where they went is remembered so that it is asked once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from phasewise.serving.errors import ModelError

WANTED_FILES = ("*.safetensors", "*.json", "*.jinja")
UNWANTED_FILES = ("consolidated*", "*/*.safetensors", "*/*.jinja")  # the same weights in other forms


def remembered(name: str, root: Path) -> Path | None:
    """The directory that `download` put `org/name` in, if it is still there."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        path = Path(_note(name, root).read_text(encoding="utf-8"))
        return path if path.is_dir() else None
    return None


def download(name: str, root: Path, report: Callable[[str], None]) -> Path:
    """Fetch `org/name`, as far as it is not in the hub's own cache, and remember where it went."""
    report(f"fetching {name} from the hub")
    path = _snapshot(name)
    with contextlib.suppress(OSError):  # only a shortcut
        note = _note(name, root)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(str(path), encoding="utf-8")
    return path


def _note(name: str, root: Path) -> Path:
    return root / "hub" / name.replace("/", "--")


def _snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted: list[str] = list(WANTED_FILES)
    unwanted: list[str] = list(UNWANTED_FILES)
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=unwanted, etag_timeout=10))
    except HfHubHTTPError as error:
        # Old versions of the library count LocalEntryNotFoundError as one, without a response.
        if isinstance(error, LocalEntryNotFoundError):
            raise _out_of_reach(name) from error
        status = error.response.status_code
        why = "does not exist or needs a login" if status in (401, 403, 404) else f"HTTP status {status}"
        raise ModelError(f"{name} cannot be fetched from the hub: {why}") from error
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise _out_of_reach(name) from error


def _out_of_reach(name: str) -> ModelError:
    return ModelError(
        f"{name} cannot be fetched: the hub is out of reach; give a GGUF file or a directory instead"
    )
