"""The `phasewise` command: one module per subcommand, wired here, and the one place that ends the process."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from typing import Annotated, Any

import typer

from phasewise._interrupts import came_of_interrupt
from phasewise._version import __version__
from phasewise.cli.command_app import CommandApp, GroupedCommands, LazyCommands
from phasewise.cli.config_file import defaults_of, read_config
from phasewise.cli.present import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_READER_LEFT, fail, note
from phasewise.serving.errors import shortage_of
from phasewise.workflows.config_file import config_path

COMMANDS: dict[str, dict[str, str]] = {
    "The first hour": {
        "pull": "models:pull",
        "chat": "chat:chat",
        "serve": "serve:serve",
        "embed": "embed:embed",
        "tune-kernels": "tune_kernels:tune_kernels",
        "tune-config": "tune_config:tune_config",
        "bench": "bench:app",
        "doctor": "doctor:doctor",
        "topo": "topo:topo",
        "help": "help_topic:help_topic",
    },
    "Models, texts and vectors": {
        "models": "models:app",
        "generate": "generate:generate",
        "eval": "evaluate:evaluate",
        "batch": "batch:batch",
        "replay": "replay:replay",
        "tune-embed": "tune_embed:tune_embed",
        "predict-len": "predict_len:app",
        "prune": "prune:prune",
        "quantise": "quantise:quantise",
    },
    "Planning": {
        "simulate": "capacity:simulate",
        "provision": "capacity:provision",
        "cluster": "cluster:app",
    },
    "What is kept, and sharing it": {"db": "db:app", "config": "config:app"},
    "Kernels of your own": {"kernels": "kernels:app"},
}
"""The module under `cli.commands` of each command, with the function or app in it, by heading of `phasewise
--help` and in the order of use."""
OTHER_NAMES = {"run": "chat:chat"}
"""Further names of commands, which no help lists."""


class Commands(GroupedCommands):
    """The root of the command line. A command's module is imported when the command runs, or for its help."""

    headings = COMMANDS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        places = {name: where for group in COMMANDS.values() for name, where in group.items()}
        self.commands: Any = LazyCommands("phasewise.cli.commands", places, OTHER_NAMES)


app = CommandApp(name="phasewise", cls=Commands)

STDOUT_ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)
"""Errors of writing to stdout where stdout is a file on a full disk."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phasewise {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=_print_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Serve LLMs on CPUs with two execution plans, one for prefill and one for decode.

    $ phasewise chat smollm2-135m-instruct
    $ phasewise serve model.gguf --port 8000

    Data goes to stdout, progress to stderr. Exit codes: 0 done, 1 failed (one line on stderr says why),
    2 wrong usage, 130 interrupted. Options come from the flag, then PHASEWISE_* variables, then
    the configuration file, then the default.
    """
    context.default_map = defaults_of(read_config(config_path(), context.command), context.command)


def main() -> None:
    """Run the command line. An expected failure carries `exit_code`; any other error keeps its traceback."""
    tell_shortages_in_one_line()
    try:
        _run_to_its_last_line()
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:  # how typer ends at Ctrl-C, without a word
            fail("interrupted", EXIT_INTERRUPTED)
        raise
    except KeyboardInterrupt:  # before typer looks for it, or after
        fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our stdout left (e.g. `| head`): point it elsewhere so that the exit flush is silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_READER_LEFT)
    except Exception as error:
        if came_of_interrupt(error):
            fail("interrupted", EXIT_INTERRUPTED)
        if isinstance(error, OSError) and error.errno in STDOUT_ERRNOS and error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            fail(f"the results cannot be written: {error.strerror}", EXIT_FAILURE)
        exit_code, shortage = getattr(error, "exit_code", None), shortage_of(error)
        if (absence := absence_of(error)) is not None:
            fail(absence, EXIT_FAILURE)
        if exit_code is not None:
            fail(str(error), exit_code)
        if shortage is not None:
            fail(shortage, EXIT_FAILURE)
        raise


def _run_to_its_last_line() -> None:
    """Run the command and flush stdout before it exits, so that errors of writing are raised here."""
    try:
        app(prog_name="phasewise")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer ends with 1 there
            raise end.__context__ from None
        sys.stdout.flush()
        raise


EXTRAS = {"tree_sitter": "kernels", "tree_sitter_c": "kernels", "ray": "ray", "gguf": "quantise"}
"""The extra of phasewise that installs a library, by the library's module."""


def absence_of(error: BaseException) -> str | None:
    """The message for a library that is not installed, with the extra to install; None for other errors."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if module not in EXTRAS:
        return None
    return f'{module} is not installed, which this needs: pip install "phasewise[{EXTRAS[module]}]"'


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler that writes to stderr, a shortage in one line without its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        shortage = shortage_of(record.exc_info[1]) if record.exc_info else None
        if shortage is None:
            return super().format(record)
        said = record.getMessage().splitlines() or [record.name]
        return f"phasewise: {said[0]}: {shortage}"

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    shortage = shortage_of(ended.exc_value)
    if shortage is None:
        threading.__excepthook__(ended)
    else:
        note(f"phasewise: {ended.thread.name if ended.thread else 'a thread'}: {shortage}")


def tell_shortages_in_one_line() -> None:
    """Report shortages in threads and logs of this process in one line each, from now on."""
    threading.excepthook = _thread_ended
    handler = _ToStderr()
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
