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

    cluster_state = cluster_status(cluster)
    if as_json:
        print_json({"nodes": cluster_state.nodes, "instances": cluster_state.instances})
        return
    for node in cluster_state.nodes:
        say(f"node {node['node']}: {counted(node['cores'], 'core')}, {node['state']}")
    for instance in cluster_state.instances:
        say(_line(instance))
    if not cluster_state.instances:
        say("no instance runs on this cluster")


def _line(instance: dict[str, Any]) -> str:
    name, state = on_one_line(instance["name"]), on_one_line(instance["state"])
    cores = counted(instance["cores"], "core")
    return f"{name}: {instance['role']}, {cores} of {instance['node']}, process {instance['pid']}, {state}"
