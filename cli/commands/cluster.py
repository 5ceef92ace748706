"""`phasewise cluster`: the servers on a Ray cluster, and draining of their instances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from phasewise._options import REQUIRED, argument, named, option
from phasewise._words import NOTHING, counted, percent
from phasewise.cli.command_app import CommandApp
from phasewise.cli.options import JsonOption
from phasewise.cli.present import note, on_one_line, print_json, say_words
from phasewise.cli.tables import present

if TYPE_CHECKING:
    from phasewise.workflows.cluster_status import ClusterStatus

HELP = """Instances on a Ray cluster.

$ phasewise cluster status
$ phasewise cluster drain token-1"""

app = CommandApp(help=HELP)

CLUSTER = named("the Ray cluster: its address, or auto", metavar="auto|ADDRESS", envvar="PHASEWISE_CLUSTER")


@app.command("status")
def status(cluster: str = CLUSTER("auto"), as_json: JsonOption = False) -> None:
    """Show the cluster's nodes, and the servers on it with their instances.

    $ phasewise cluster status
    $ phasewise cluster status --cluster 10.0.0.1:6379
    """
    from phasewise.workflows.cluster_status import cluster_status

    state = cluster_status(cluster)
    if as_json:
        print_json(vars(state))
        return
    for line in _status_lines(state):
        say_words(on_one_line(line))


@app.command("drain")
def drain(
    name: str = argument(REQUIRED, "an instance as status names it, or a node's address or id", "NAME"),
    cluster: str = CLUSTER("auto"),
    undo: bool = option(False, "let it take requests again; start it anew where it has stopped"),
    wait: bool = option(True, "wait until it has stopped, or with --undo until it runs", "--wait/--no-wait"),
    as_json: JsonOption = False,
) -> None:
    """Drain an instance, or all instances of a node.

    $ phasewise cluster drain token-1
    $ phasewise cluster drain token-1 --undo

    It gets no new requests, and stops when those that it has are answered.
    Its place stays empty until --undo. The last instance that takes
    requests is not drained: stop its server. Ctrl-C ends the waiting alone.
    """
    from phasewise.workflows.cluster_status import drain as drain_instances

    instances = drain_instances(cluster, name, undo=undo, wait=wait, report=note)
    lines = [f"{_name(instance)}: {on_one_line(instance['state'])}" for instance in instances]
    present(as_json, {"instances": instances}, lines)


def _status_lines(state: ClusterStatus) -> Iterator[str]:
    for node in state.nodes:
        labels = "".join(f", {key}={value}" for key, value in node["labels"].items())
        yield f"node {node['node']}: {counted(node['cores'], 'core')}{labels}, {node['state']}"
    for server in state.servers:
        yield f"server {server['server']}: {server['model']}, {server['state']}"
        for instance in state.instances:
            if instance["server"] == server["server"]:
                yield from _instance_lines(instance)
    if not state.instances:
        yield "no instance runs on this cluster"


def _instance_lines(instance: dict[str, Any]) -> Iterator[str]:
    label = f" ({instance['label']})" if instance["label"] else ""
    yield f"{_name(instance)}: {instance['pool']}, {instance['state']}"
    yield f"  {counted(instance['cores'], 'core')}{label}, process {instance['pid'] or 'none'}"
    yield f"  node {instance['node']}"
    if instance["problem"]:
        yield f"  {instance['problem']}"
    if instance["format"]:
        mib = instance["kv_bytes"] / (1 << 20)
        yield f"  {instance['format']}, KV {instance['kv_format']} in {mib:.0f} MiB"
        yield f"  {_load(instance)}"
    yield from (f"  {plan}" for plan in instance["plans"])


def _load(instance: dict[str, Any]) -> str:
    used = percent(instance["kv_slots_used"] / instance["kv_slots"]) if instance["kv_slots"] else NOTHING
    counts = (f"{instance[name]} {name.replace('_', ' ')}" for name in ("running", "waiting", "handing_over"))
    return f"{', '.join(counts)}; KV {used} used; {counted(instance['restarts'], 'restart')}"


def _name(instance: dict[str, Any]) -> str:
    return on_one_line(f"{instance['name']}@{instance['server']}")
