"""The `phasewise` command: one module per subcommand, wired here, and the one place that ends the process."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from phasewise._version import __version__
from phasewise.cli.command_app import CommandApp
from phasewise.cli.commands import (
    bench,
    chat,
    cluster,
    config,
    db,
    doctor,
    embed,
    generate,
    kernels,
    models,
    predict_len,
    provision,
    prune,
    replay,
    report,
    serve,
    simulate,
    topo,
    tune_config,
    tune_embed,
    tune_kernels,
)
from phasewise.cli.config_file import defaults_of, read_config
from phasewise.cli.present import EXIT_INTERRUPTED, fail
from phasewise.cli.shortages import tell_shortages_in_one_line
from phasewise.serving.errors import shortage_of
from phasewise.workflows.config_file import config_path

app = CommandApp(name="phasewise")
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("run", hidden=True)(chat.chat)
app.command("embed")(embed.embed)
app.command("serve")(serve.serve)
app.command("topo")(topo.topo)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.command("replay")(replay.replay)
app.command("tune-config")(tune_config.tune_config)
app.command("tune-embed")(tune_embed.tune_embed)
app.command("tune-kernels")(tune_kernels.tune_kernels)
app.command("simulate")(simulate.simulate)
app.command("provision")(provision.provision)
app.command("prune")(prune.prune)
app.add_typer(bench.app, name="bench")
app.add_typer(kernels.app, name="kernels")
app.add_typer(models.app, name="models")
app.add_typer(predict_len.app, name="predict-len")
app.add_typer(db.app, name="db")
app.add_typer(config.app, name="config")
app.add_typer(cluster.app, name="cluster")

EXIT_FAILURE = 1
STDOUT_ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)
"""The errors of writing to stdout, where stdout is a file on a full disk."""


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

    Data goes to stdout, progress to stderr. Exit codes: 0 done, 1 failed (one line on stderr says why),
    2 wrong usage, 130 interrupted. Options come from the flag, then PHASEWISE_* variables, then
    the configuration file, then the default.
    """
    context.default_map = defaults_of(read_config(config_path(), context.command), context.command)


def main() -> None:
    """Run the command line. An expected failure carries `exit_code`; anything else keeps its traceback."""
    tell_shortages_in_one_line()
    try:
        app(prog_name="phasewise")
        sys.stdout.flush()
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:  # how typer ends at Ctrl-C, without a word
            fail("interrupted", EXIT_INTERRUPTED)
        raise
    except KeyboardInterrupt:  # before typer looks for it, or after
        fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our stdout left (e.g. `| head`): point it elsewhere so that the exit flush is silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)
    except OSError as error:
        if error.errno not in STDOUT_ERRNOS or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"the results cannot be written: {error.strerror}", EXIT_FAILURE)
    except Exception as error:
        exit_code, shortage = getattr(error, "exit_code", None), shortage_of(error)
        if exit_code is not None:
            fail(str(error), exit_code)
        if shortage is not None:
            fail(shortage, EXIT_FAILURE)
        raise
