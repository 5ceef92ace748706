"""Files that commands write, by whatever name: devices, links, `-`, places that cannot be written."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phasewise.kerneldb.schema import HEAD
from tests.cli import command
from tests.support import ROOT

V2 = ROOT / "tests" / "data" / "topology" / "lstopo_v2.xml"
SVG = ("topo", "--input", str(V2), "--svg")


def phasewise(*arguments: str | Path, stdin: bytes = b"", **variables: str) -> command.Done:
    return command.run_process(*arguments, stdin=stdin, env=variables, cwd=ROOT)


def assert_refused(done: command.Done, *words: str) -> None:
    assert all(word in done.refusal for word in words)


WRITERS = {"topo --svg": SVG}
KINDS = ("device", "full device", "link", "dangling link", "directory", "absent directory")


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", WRITERS)
def test_a_target_keeps_its_kind_whatever_command_writes_it(tmp_path: Path, command: str, kind: str) -> None:
    where = tmp_path
    real = where / "real"
    target = {
        "device": Path("/dev/null"),
        "full device": Path("/dev/full"),
        "link": where / "link",
        "dangling link": where / "link",
        "directory": where / "directory",
        "absent directory": where / "absent" / "file",
    }[kind]
    if kind == "link":
        real.write_text("old")
        real.chmod(0o640)
    if "link" in kind:
        target.symlink_to(real)
    if kind == "directory":
        target.mkdir()
    before = os.stat(target).st_mode if target.exists() else None
    db = shutil.copy(ROOT / "tests" / "data" / "schemas" / f"{HEAD}.db", where / "x.db")
    done = phasewise(*WRITERS[command], target, PHASEWISE_DB=str(db))

    if kind in ("full device", "directory", "absent directory"):
        assert_refused(done, str(target), "cannot be written")
    else:
        assert done.exit_code == 0, done.stderr
    if before is not None:
        assert os.stat(target).st_mode == before
    if "link" in kind:
        assert target.is_symlink()
        assert "<svg" in real.read_text()
    assert not list(where.rglob(".*"))


def test_a_picture_on_stdout_is_alone_there() -> None:
    done = phasewise(*SVG, "-")

    assert ElementTree.fromstring(done.stdout_bytes).tag.endswith("svg")
    assert done.stderr == ""
    assert phasewise(*SVG, "/dev/stdout").stdout.startswith(done.stdout[:50])


def test_json_and_a_picture_do_not_share_stdout() -> None:
    done = phasewise(*SVG, "-", "--json")

    assert "both mean stdout" in done.usage_error


def test_a_machine_is_read_from_stdin() -> None:
    """Through a pipe; what it is called aside, as from the file."""
    from_file = phasewise("topo", "--input", V2)
    from_stdin = phasewise("topo", "--input", "-", stdin=V2.read_bytes())

    assert from_stdin.exit_code == 0, from_stdin.stderr
    assert from_stdin.stdout.replace("/dev/stdin", str(V2)) == from_file.stdout


class TestConfigSet:
    """A configuration file is often a link into a folder of such files."""

    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_link_stays_and_its_file_is_changed(self, tmp_path: Path, is_there: bool) -> None:
        real, link = tmp_path / "dotfiles.toml", tmp_path / "phasewise" / "config.toml"
        link.parent.mkdir()
        link.symlink_to(real)
        if is_there:
            real.write_text("# mine\n[serve]\nport = 1\n")
            real.chmod(0o600)
        done = phasewise("config", "set", "serve.port", "9000", XDG_CONFIG_HOME=str(tmp_path))

        assert done.exit_code == 0, done.stderr
        assert link.is_symlink()
        assert "port = 9000" in real.read_text()
        assert not is_there or real.read_text().startswith("# mine\n")
        assert not is_there or stat.S_IMODE(real.stat().st_mode) == 0o600

    def test_a_home_that_cannot_be_written_is_one_line(self) -> None:
        """Root too may make nothing in /proc."""
        done = phasewise("config", "set", "serve.port", "9000", XDG_CONFIG_HOME="/proc")

        assert_refused(done, "/proc/phasewise/config.toml", "cannot be written")

    def test_a_file_without_end_is_not_read(self) -> None:
        done = phasewise("config", "set", "serve.port", "9000", PHASEWISE_CONFIG="/dev/zero")

        assert_refused(done, "/dev/zero cannot be read", "larger than 1 MiB")
