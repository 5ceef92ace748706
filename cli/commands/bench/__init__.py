"""`phasewise bench`: speeds, always beside the machine's measured limits."""

from __future__ import annotations

from phasewise.cli.command_app import CommandApp
from phasewise.cli.commands.bench.embed import embed
from phasewise.cli.commands.bench.kernels import kernels
from phasewise.cli.commands.bench.kv import kv
from phasewise.cli.commands.bench.machine import machine
from phasewise.cli.commands.bench.run import run
from phasewise.cli.commands.bench.serve import serve

HELP = """Measure speeds and the machine's limits.

$ phasewise bench run smollm2-135m-instruct
$ phasewise bench serve http://127.0.0.1:8000 --concurrency 8"""

app = CommandApp(help=HELP)
for command in (run, serve, embed, machine, kv, kernels):
    app.command(command.__name__)(command)
