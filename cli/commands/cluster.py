"""`phasewise cluster`: what runs on a Ray cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from phasewise._words import counted
from phasewise.cli.command_app import CommandApp
from phasewise.cli.options import JsonOption
from phasewise.cli.present import on_one_line, print_json, say

app = CommandApp(help="Instances on a Ray cluster.")


@app.callback()
def cluster() -> None:
    """Instances on a Ray cluster."""


@app.command("status")
def status(
    cluster: Annotated[
        str,
        typer.Option(
            envvar="PHASEWISE_CLUSTER", metavar="auto|ADDRESS", help="the Ray cluster: its address, or auto"
        ),
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show the cluster's nodes, and the instances of every server on it."""
    from phasewise.workflows.cluster_status import cluster_status

    found = cluster_status(cluster)
    if as_json:
        print_json({"nodes": found.nodes, "instances": found.instances})
        return
    for node in found.nodes:
        say(f"node {node['node']}: {counted(node['cores'], 'core')}, {node['state']}")
    for one in found.instances:
        say(_line(one))
    if not found.instances:
        say("no instance runs on this cluster")


def _line(one: dict[str, Any]) -> str:
    name, state = on_one_line(one["name"]), on_one_line(one["state"])
    cores = counted(one["cores"], "core")
    return f"{name}: {one['role']}, {cores} of {one['node']}, process {one['pid']}, {state}"
