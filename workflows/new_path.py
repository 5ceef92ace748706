"""A file or a directory that is new: written beside its name, and renamed when it is whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from phasewise.workflows.errors import WorkflowError


@contextlib.contextmanager
def new_path(out: Path, file_name: str | None = None) -> Iterator[Path]:
    """A path that takes the name `out` if the block ends well, and vanishes if it does not.

    file_name: of the file while it is written; None for a directory.
    """
    if out.exists():
        kind = "directory" if file_name is None else "file"
        raise WorkflowError(f"{out} exists already: name a {kind} that does not")
    prefix = f".{out.name}.new-"
    try:
        for left_over in out.parent.glob(prefix + "*"):
            shutil.rmtree(left_over, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    except OSError as error:
        raise WorkflowError(f"{out} cannot be made: {error.strerror}") from error
    written = temporary if file_name is None else temporary / file_name
    umask = os.umask(0o022)
    os.umask(umask)
    try:
        yield written
        written.chmod((0o777 if file_name is None else 0o666) & ~umask)
        written.rename(out)
    except OSError as error:
        raise WorkflowError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
