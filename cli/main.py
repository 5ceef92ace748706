"""The `phasewise` command: one module per subcommand, wired here, and the one place that ends the process."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from phasewise._version import __version__
from phasewise.cli.command_app import CommandApp
from phasewise.cli.commands import (
    bench,
    chat,
    db,
    doctor,
    embed,
    generate,
    kernels,
    models,
    predict_len,
    provision,
    serve,
    simulate,
    topo,
    tune_config,
    tune_kernels,
)
from phasewise.cli.present import EXIT_INTERRUPTED, fail

app = CommandApp(name="phasewise")
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("run", hidden=True)(chat.chat)
app.command("embed")(embed.embed)
app.command("serve")(serve.serve)
app.command("topo")(topo.topo)
app.command("doctor")(doctor.doctor)
app.command("tune-config")(tune_config.tune_config)
app.command("tune-kernels")(tune_kernels.tune_kernels)
app.command("simulate")(simulate.simulate)
app.command("provision")(provision.provision)
app.add_typer(bench.app, name="bench")
app.add_typer(kernels.app, name="kernels")
app.add_typer(models.app, name="models")
app.add_typer(predict_len.app, name="predict-len")
app.add_typer(db.app, name="db")

EXIT_FAILURE = 1


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phasewise {__version__}")
        raise typer.Exit


def config_path() -> Path:
    """`$PHASEWISE_CONFIG`, or `phasewise/config.toml` in the XDG configuration directory."""
    import platformdirs

    return Path(
        os.environ.get("PHASEWISE_CONFIG") or platformdirs.user_config_path("phasewise") / "config.toml"
    )


def read_config(path: Path) -> dict[str, Any]:
    """Defaults by command and option, e.g. `[serve]` then `port = 9000`. Empty where there is no file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        fail(f"config file {path} cannot be read: {error}", EXIT_FAILURE)


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
    context.default_map = read_config(config_path())


def main() -> None:
    """Run the command line. An expected failure carries `exit_code`; anything else keeps its traceback."""
    try:
        app(prog_name="phasewise")
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:  # how typer ends at Ctrl-C, without a word
            fail("interrupted", EXIT_INTERRUPTED)
        raise
    except BrokenPipeError:
        # The reader of our stdout left (e.g. `| head`): point it elsewhere so that the exit flush is silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)
    except Exception as error:
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None:
            raise
        fail(str(error), exit_code)
