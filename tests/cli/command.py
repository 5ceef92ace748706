"""`phasewise` as tests call it: in this process, or as the process that a script starts.

Both give exit codes and lines as `phasewise.cli.main.main` has them. A process is for what depends on one:
signals, devices as stdout, two commands at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from phasewise.cli.command_app import GroupedCommand
from phasewise.cli.main import app
from tests.support.servers.warm import Forked


@dataclass(frozen=True)
class Done:
    """The end of a command: its exit code and what it wrote."""

    exit_code: int
    stdout_bytes: bytes
    stderr: str

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode()

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def usage_error(self) -> str:
        """The words of wrong usage without their frame; nothing is on stdout."""
        assert self.exit_code == 2, self
        assert self.stdout == ""
        return " ".join(self.stderr.replace("│", " ").split())

    @property
    def refusal(self) -> str:
        """The one line of an expected failure, behind those of packing a model; nothing is on stdout."""
        assert self.exit_code == 1, self
        assert self.stdout == ""
        *before, line = self.stderr.splitlines()
        assert line.startswith("phasewise: ")
        assert all(earlier.startswith("packing") for earlier in before), before
        return line


@cache
def tree() -> Any:
    """All commands; a run in a process of its own builds them anew, and that takes longer than most runs."""
    return typer.main.get_command(app)


def divided(words: list[str]) -> tuple[list[str], str]:
    """A command line without options that the configuration file alone has, and the file that has them."""
    node, path = tree(), list[str]()
    while words[len(path) :] and words[len(path)] in getattr(node, "commands", {}):
        node = node.commands[words[len(path)]]
        path.append(words[len(path)])
    alone = {
        flag: parameter.is_flag
        for parameter in node.params
        if getattr(parameter, "hidden", False)
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    left, lines, rest = list[str](), dict[str, str](), iter(words)
    for word in rest:
        if word in alone:
            value = True if alone[word] else next(rest)
            lines[word.lstrip("-").replace("-", "_")] = json.dumps(value)
        else:
            left.append(word)
    told = [f"[{'.'.join(path)}]", *(f"{name} = {value}" for name, value in lines.items()), ""]
    return left, "\n".join(told) if lines else ""


def run(*arguments: object, stdin: str | bytes | None = None, env: Mapping[str, str] | None = None) -> Done:
    """In this process. What is no expected failure is raised.

    An option that the configuration file alone has is written there, as if it were one of `arguments`.
    """
    exit_code, failure = 0, ""
    words, lines = divided([*map(str, arguments)])
    with contextlib.ExitStack() as stack:
        if lines:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".toml"))
            file.write(lines)
            file.flush()
            env = {**(env or {}), "PHASEWISE_CONFIG": file.name}
        stdout, stderr, _ = stack.enter_context(CliRunner().isolation(input=stdin, env=env))
        try:
            tree().main(words, prog_name="phasewise")
        except SystemExit as end:
            exit_code = int(end.code or 0)
        except Exception as error:
            if not hasattr(error, "exit_code"):
                raise
            exit_code, failure = error.exit_code, f"phasewise: {error}\n"
        sys.stdout.flush()
        sys.stderr.flush()
        return Done(exit_code, stdout.getvalue(), stderr.getvalue().decode() + failure)


def parsed(line: str) -> Any:
    """The context of a command line of the shell: its options are read, and nothing runs."""
    alone = line.replace("\\\n", "").rpartition("| ")[2]
    words = shlex.split(re.sub(r"( \d?[<>]&? ?\S+| &)+$", "", alone))
    begun: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupedCommand, "invoke", lambda _self, context: begun.append(context))
        done = run(*words[words.index("phasewise") + 1 :], env={"PHASEWISE_CONFIG": "/dev/null"})
    assert done.exit_code == 0, done
    (context,) = begun
    return context


def text_of(*arguments: object, exit_code: int = 0, **options: Any) -> str:
    """stdout of a command that ends with `exit_code`."""
    done = run(*arguments, **options)
    assert done.exit_code == exit_code, done
    return done.stdout


def fields_of(*arguments: object, **options: Any) -> dict[str, Any]:
    """The JSON object of a command, in version 1 of its schema."""
    fields = dict(json.loads(text_of(*arguments, "--json", **options)))
    assert fields.pop("schema_version") == 1
    return fields


def run_process(
    *arguments: object,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Done:
    """As a script runs it; `env` comes on top of this process's environment."""
    reads, feeds = os.pipe()
    out, writes = os.pipe()
    feeding = threading.Thread(target=_feed, args=(feeds, stdin))
    with tempfile.TemporaryFile() as stderr, open(out, "rb") as written:
        streams = (reads, writes if stdout == subprocess.PIPE else stdout, stderr.fileno())
        process = Forked([*map(str, arguments)], os.environ | (env or {}), streams, folder=cwd)
        os.close(reads)
        os.close(writes)
        feeding.start()
        too_late = threading.Timer(120, process.kill)
        too_late.start()
        read = written.read()
        exit_code = process.wait()
        too_late.cancel()
        feeding.join()
        stderr.seek(0)
        return Done(exit_code, read, stderr.read().decode())


def _feed(pipe: int, stdin: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as fed:
        fed.write(stdin)


def start(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A process that goes on, with pipes for all that it reads and writes."""
    return subprocess.Popen(
        [sys.executable, "-m", "phasewise", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )
