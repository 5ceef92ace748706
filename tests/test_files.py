"""A file that a user names to write keeps its kind, and is written whole or not at all."""

from __future__ import annotations

import ast
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise import _files
from phasewise._files import (
    check_writable,
    cut_broken_line,
    open_file,
    open_input,
    open_output,
    open_regular,
    read_file,
    read_input,
    write_file,
)
from phasewise.serving.errors import ModelError, ServingError
from phasewise.serving.loaders.source import SourceFile
from phasewise.serving.processes.line_log import LineLog
from phasewise.tuner.errors import PredictorError
from phasewise.workflows.batch.run import open_answers
from phasewise.workflows.embed.run import lines_of
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.evaluate.run import read_text
from phasewise.workflows.predict_len.answer_prompts import AnswerLog
from phasewise.workflows.predict_len.settings import CollectWish
from tests.support.tiers import examples
from tests.test_architecture import SOURCES

CONTENTS = st.binary(max_size=100_000)
OLD = b"what was there\n" * 7
is_root = os.geteuid() == 0


@dataclass(frozen=True)
class Seen:
    """All that must not change about a name and the file behind it, its content apart."""

    kind: int
    link: str | None
    mode: int
    owner: tuple[int, int]
    inode: int | None


def seen(path: Path, *, is_same_inode: bool) -> Seen:
    status = path.stat()
    return Seen(
        stat.S_IFMT(status.st_mode),
        os.readlink(path) if path.is_symlink() else None,
        stat.S_IMODE(status.st_mode),
        (status.st_uid, status.st_gid),
        status.st_ino if is_same_inode else None,
    )


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def names(where: Path) -> list[str]:
    return sorted(path.name for path in where.rglob("*"))


@contextmanager
def full_disk(n_bytes: int) -> Iterator[None]:
    """Files may have so many bytes and no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@given(CONTENTS, st.sampled_from([0o644, 0o600, 0o640, 0o755, 0o666]), st.integers(0, 3), st.booleans())
@examples(100)
def test_a_file_that_exists_keeps_everything_but_its_content(
    content: bytes, mode: int, n_links: int, has_twin: bool
) -> None:
    """Mode, owner, the links that lead to it, and its other names."""
    with folder() as where:
        real = where / "real" / "file"
        real.parent.mkdir()
        real.write_bytes(OLD)
        real.chmod(mode)
        if is_root:
            os.chown(real, 12345, 54321)
            os.setxattr(real, "user.kept", b"yes")
        if has_twin:
            os.link(real, where / "twin")
        path = real
        for index in range(n_links):
            link = where / f"link{index}"
            link.symlink_to(os.path.relpath(path, where) if index % 2 else path)
            path = link
        before, there = seen(path, is_same_inode=has_twin), names(where)
        check_writable(path)
        write_file(path, content)

        assert real.read_bytes() == content
        assert seen(path, is_same_inode=has_twin) == before
        assert names(where) == there
        assert not has_twin or (where / "twin").read_bytes() == content
        assert not is_root or os.getxattr(real, "user.kept") == b"yes"


@given(CONTENTS, st.sampled_from([0, 0o022, 0o077]), st.booleans())
@examples(40)
def test_a_new_file_has_the_mode_that_the_umask_leaves(content: bytes, umask: int, is_link: bool) -> None:
    """A link to nothing stays, and its target is made."""
    with folder() as where:
        path = where / "file"
        if is_link:
            path = where / "link"
            path.symlink_to("file")
        before = os.umask(umask)
        try:
            write_file(path, content)
        finally:
            os.umask(before)

        assert (where / "file").read_bytes() == content
        assert path.is_symlink() == is_link
        assert stat.S_IMODE((where / "file").stat().st_mode) == 0o666 & ~umask
        assert names(where) == (["file", "link"] if is_link else ["file"])


@given(
    st.integers(0, 60_000),
    st.integers(1, 60_000),
    st.sampled_from(["absent", "file", "link", "dangling", "twin"]),
)
@examples(100)
def test_a_full_disk_leaves_what_was_there(n_before: int, n_more: int, kind: str) -> None:
    with folder() as where:
        file, path = where / "file", where / "file"
        if kind not in ("absent", "dangling"):
            file.write_bytes(b"o" * n_before)
        if kind in ("link", "dangling"):
            path = where / "link"
            path.symlink_to("file")
        if kind == "twin":
            os.link(file, where / "twin")
        there = names(where)
        with full_disk(max(n_before, 1)), pytest.raises(OSError, match="large"):
            write_file(path, b"n" * (max(n_before, 1) + n_more))

        assert names(where) == there
        assert not file.exists() or file.read_bytes() == b"o" * n_before


@given(CONTENTS)
@examples(20)
def test_a_fifo_and_a_device_are_written_and_stay(content: bytes) -> None:
    with folder() as where:
        fifo = where / "fifo"
        os.mkfifo(fifo)
        link = where / "link"
        link.symlink_to(fifo)
        for path in (fifo, link):
            read: list[bytes] = []
            reader = threading.Thread(target=lambda to=read: to.append(fifo.read_bytes()))
            reader.start()
            write_file(path, content)
            reader.join()
            assert read == [content]
        assert stat.S_ISFIFO(fifo.stat().st_mode)
        assert names(where) == ["fifo", "link"]
    before = seen(Path("/dev/null"), is_same_inode=True)
    write_file(Path("/dev/null"), content)
    assert seen(Path("/dev/null"), is_same_inode=True) == before


@pytest.mark.skipif(not is_root, reason="only root makes devices")
def test_a_device_node_stays_one(tmp_path: Path) -> None:
    """As root, who may replace it."""
    node = tmp_path / "full"
    os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    before = seen(node, is_same_inode=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            write_file(node, b"x")
    except PermissionError:  # a file system without devices
        pass

    assert seen(node, is_same_inode=True) == before


def test_what_cannot_be_written_is_refused_beforehand_and_untouched(tmp_path: Path) -> None:
    """A directory, a link to one, a loop, a place that is not there."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("directory")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lost").symlink_to("absent/file")
    (tmp_path / "file").write_bytes(OLD)
    for name in ("directory", "link", "loop", "lost", "absent/file", "file/below", "n" * 300):
        there = names(tmp_path)
        for call in (check_writable, lambda path: write_file(path, b"new")):
            with pytest.raises(OSError):
                call(tmp_path / name)
        assert names(tmp_path) == there


AS_NOBODY = """
import os, sys
from pathlib import Path
from phasewise._files import write_file
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    write_file(Path(sys.argv[1]), b"new")
except PermissionError:
    sys.exit(3)
"""


@pytest.mark.skipif(not is_root, reason="only root becomes another user")
@pytest.mark.parametrize(
    ("mode", "folder_mode", "exit_code"),
    [(0o444, 0o777, 3), (0o666, 0o755, 0), (0o666, 0o777, 0), (None, 0o755, 3), (0o600, 0o777, 3)],
)
def test_rights_are_those_of_the_file_and_its_owner_stays(
    mode: int | None, folder_mode: int, exit_code: int
) -> None:
    """A read-only file is not replaced in a directory that is writable, and a file of another user, or in a
    read-only directory, is written in its place."""
    with folder() as where:
        where.chmod(folder_mode)
        file = where / "file"
        if mode is not None:
            file.write_bytes(OLD)
            file.chmod(mode)
        there = names(where)
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, file], check=False)

        assert done.returncode == exit_code
        assert names(where) == there
        if mode is not None:
            assert file.read_bytes() == (b"new" if exit_code == 0 else OLD)
            assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (0, mode)


def test_stdout_is_written_where_it_stands(tmp_path: Path) -> None:
    """By its name and as `-`, after what was printed before, whatever stdout is."""
    code = (
        "import sys; from pathlib import Path; from phasewise._files import write_file\n"
        "print('first'); write_file(Path(sys.argv[1]), 'picture\\n'); print('last')"
    )
    for name in ("-", "/dev/stdout"):
        for kind in ("file", "pipe"):
            out = tmp_path / "out"
            with out.open("wb") as file:
                done = subprocess.run(
                    [sys.executable, "-c", code, name],
                    stdout=file if kind == "file" else subprocess.PIPE,
                    check=True,
                )
            text = out.read_bytes() if kind == "file" else done.stdout
            assert text == b"first\npicture\nlast\n", (name, kind)


@given(st.binary(max_size=200))
def test_only_whole_lines_of_a_log_are_kept(content: bytes) -> None:
    with folder() as where:
        log = where / "log"
        log.write_bytes(content)
        was_cut = cut_broken_line(log)

        assert log.read_bytes() == content[: content.rfind(b"\n") + 1]
        assert was_cut == (log.read_bytes() != content)
        assert not cut_broken_line(log)


# ---- no other writer --------------------------------------------------------------------------------------

OTHER_WRITERS = {
    "phasewise._files": "the one writer",
    "cli.command_app": "lines of help, in memory",
    "cli.present": "stderr is pointed at /dev/null when its terminal has gone",
    "cli.main": "stdout is pointed at /dev/null when its reader has gone",
    "cli.commands.db.sharing": "as cli.main",
    "serving.batches.store": "files that clients send, which a transaction makes known or a start removes",
    "serving.http.transport.listening": "a file in memory",
    "ir.raising.preprocess": "files in a temporary directory",
    "ir.running.checking": "files in a temporary directory",
    "workflows.batch.run": "appends answers to a file that it goes on with",
    "workflows.database.remote": "files in a temporary directory",
    "workflows.database.remote_files": "a remote's bundles, each copied beside its place and renamed",
    "workflows.user_kernels.files": "files in a temporary directory",
    "workflows.user_kernels.tune": "files in a temporary directory",
    "phasewise.torch.distributed": "memory of a group, which has no name",
    "kerneldb.connect": "a copy of a database, which SQLite makes",
    "serving.processes.line_log": "appends lines to a log, and follows no link",
    "serving.sandbox.confined_process": "pipes, and the process's own figures in /proc",
    "serving.prefix_store.folder": "records, each written beside its place and renamed",
    "serving.ranks.kv_share": "a segment of shared memory, by its path in /proc",
    "serving.processes.behind_others": "stderr is pointed at /dev/null while a library is asked",
    "serving.processes.children": "a file in memory, for a child",
    "serving.loaders.packed_file": "the cache of packed models",
    "serving.loaders.fetching.hub": "the cache of fetched models",
    "serving.loaders.fetching.registry": "the cache of fetched models",
    "tuner.measurement_lock": "a lock in the user's own directory",
    "workflows.prune.directory": "a directory that is new",
    "workflows.new_path": "a file or directory that is new, of any size, renamed when it is whole",
}
"""Modules that write, or rename, files in a way of their own, and what those are."""


OTHER_READERS = {
    "cli.commands.help_topic": "a file of the package",
    "cluster.simulated.spec_file": "a file of the package",
    "cython_kernels.abi": "a file of the package",
    "ir.running.checking": "files in a temporary directory",
    "kerneldb.connect": "a copy of a database, once SQLite has made it",
    "kerneldb.shipped": "a file of the package",
    "phasewise._files": "the readers",
    "serving.http.routes.openapi": "a file of the package",
    "serving.loaders.formats.model_directory": "names alone: nothing is opened",
    "serving.prefix_store.folder": "records; follows no link and waits for no pipe",
    "serving.processes.headroom": "the machine's own figures, in /proc and /sys",
    "serving.text.gguf_vocab": "a file of the package",
    "topology.energy": "the machine's own figures, in /proc and /sys",
    "topology.places": "the machine's own figures, in /proc and /sys",
    "tuner.conditions": "the machine's own figures, in /proc and /sys",
    "workflows.database.remote": "files in a temporary directory",
    "workflows.database.remote_files": "fetched bundles",
}
"""Modules that read files in a way of their own, and what those are."""

MAY_WRITE = re.compile(
    r"\b(open|fdopen|write_text|write_bytes|mkstemp|NamedTemporaryFile|copyfile|copy2?|renames?|replace|move)\("
)
MAY_READ = re.compile(r"\b(open|read_text|read_bytes|load|fromfile|memmap)\(")
"""In every file with such a call: walking through the others would take seconds."""


def _is_writing(call: ast.Call) -> bool:
    if MAY_WRITE.match(f"{getattr(call.func, 'attr', '') or getattr(call.func, 'id', '')}(") is None:
        return False
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if isinstance(call.func, ast.Name) and last != "open":
        return False  # of ours
    if last in ("write_text", "write_bytes", "mkstemp", "NamedTemporaryFile", "copyfile", "copy", "copy2"):
        return last not in ("copy", "copy2") or name.startswith("shutil.")
    if last in ("rename", "renames") or name in ("os.replace", "shutil.move"):
        return True
    if name == "os.open":
        return any(
            flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "flags")
        )
    if last in ("open", "fdopen"):
        given = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [
            argument.value
            for argument in given
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        ]
        return any(set(mode) <= set("rwabtx+") and set(mode) & set("wax+") for mode in modes)
    return False


@cache
def _calls(path: Path) -> list[ast.Call]:
    """Those of a file that may write or read one: its tree is walked through once."""
    source = path.read_text(encoding="utf-8")
    if not (MAY_WRITE.search(source) or MAY_READ.search(source)):
        return []
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def test_no_module_writes_files_in_another_way() -> None:
    writers = {module for module, path in SOURCES if any(map(_is_writing, _calls(path)))}

    assert writers == set(OTHER_WRITERS)


def _is_reading(call: ast.Call) -> bool:
    if MAY_READ.match(f"{getattr(call.func, 'attr', '') or getattr(call.func, 'id', '')}(") is None:
        return False
    name, whole = ast.unparse(call.func), ast.unparse(call)
    last = name.rpartition(".")[2]
    if _is_writing(call) or "'/proc/" in whole or "os.devnull" in whole:
        return False
    if last in ("read_text", "read_bytes"):
        return isinstance(call.func, ast.Attribute)
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return name in ("open", "os.open", "np.load", "np.fromfile", "np.memmap") or (
        last == "open" and any(mode in ("r", "rb", "rt") for mode in modes)
    )


def test_no_module_reads_files_in_another_way() -> None:
    """A pipe or the like that a stranger put in a file's place is refused before it is waited for."""
    readers = {module for module, path in SOURCES if any(map(_is_reading, _calls(path)))}

    assert readers == set(OTHER_READERS)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def _loop(path: Path) -> None:
    path.symlink_to(path)


PLACED: dict[str, Callable[[Path], None]] = {
    "a FIFO": _fifo,
    "a link to a FIFO": lambda path: (_fifo(path.with_name("pipe")), path.symlink_to("pipe"))[1],
    "a socket": _socket,
    "a directory": Path.mkdir,
    "a link to itself": _loop,
    "a link to a terminal": lambda path: path.symlink_to("/dev/tty"),
}
"""All that a stranger can put in the place of a file."""


def _append_answers(path: Path) -> None:
    with open_answers(path):
        pass


def _append_line(path: Path) -> None:
    with LineLog("log", path, lambda _line: None):
        pass


OPENERS: dict[str, Callable[[Path], object]] = {
    "open_regular": lambda path: os.close(open_regular(path)),
    "open_file": lambda path: open_file(path).close(),
    "read_file": lambda path: read_file(path, 100),
    "open_input": lambda path: open_input(path).close(),
    "read_input": lambda path: read_input(path, 100),
    "open_output": lambda path: os.close(open_output(path, os.O_APPEND)),
    "write_file": lambda path: write_file(path, b"new"),
    "cut_broken_line": cut_broken_line,
    "batch -o": _append_answers,
    "predict-len collect": lambda path: AnswerLog(path, "model", CollectWish()).close(),
    "serve --access-log": _append_line,
}
"""The openers of files whose places a user or a stranger names."""


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("placed", PLACED)
def test_no_open_waits_for_what_a_stranger_has_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: str, placed: str
) -> None:
    """It ends, with an OSError or an error in one line where the place is no file."""
    monkeypatch.setattr(_files, "FIRST_BYTE_S", 0.05)
    path = tmp_path / "file"
    PLACED[placed](path)
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            OPENERS[opener](path)
        except (OSError, WorkflowError, PredictorError, ServingError) as error:
            ended.append(error)
        else:
            ended.append(None)

    opening = threading.Thread(target=run, daemon=True)
    opening.start()
    opening.join(60)
    assert ended, "it waits for good"
    assert "\n" not in str(ended[0])


@pytest.mark.parametrize("read", [SourceFile, read_text, lines_of], ids=lambda read: read.__name__)
@pytest.mark.parametrize(
    ("name", "reason"), [("none", "No such file or directory"), ("", "directory|regular")]
)
def test_what_cannot_be_read_is_told_in_the_systems_words(
    tmp_path: Path, read: Callable[[Path], object], name: str, reason: str
) -> None:
    with pytest.raises((ModelError, WorkflowError), match=reason) as caught:
        read(tmp_path / name)

    assert str(tmp_path / name) in str(caught.value)
    assert "Errno" not in str(caught.value)
