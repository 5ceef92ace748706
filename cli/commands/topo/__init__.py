"""`phasewise topo`: the machine as a tree and as a picture, its TopoTrees, and plans on it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise._options import argument, changed, option, refuse_unused
from phasewise.cli.options import JsonOption
from phasewise.cli.present import note, owns_stdout, write_target
from phasewise.cli.tables import present
from phasewise.workflows.errors import UsageError
from phasewise.workflows.options import DB, FORMAT

if TYPE_CHECKING:
    from phasewise.topology import Machine, Node
    from phasewise.topology.picture import PuGroup
    from phasewise.tuner.plans import Phase, ServicePlan


@dataclass(frozen=True)
class TopoView:
    """Options that choose a view of a machine: the machine itself, its TopoTrees, or plans on it."""

    input_path: Path | None = option(
        None, "lstopo XML file (-: stdin), or folder with a sysfs snapshot", "--input", metavar="FILE"
    )
    svg_path: Path | None = option(
        None, "write a picture of the machine here; -: stdout", "--svg", metavar="FILE"
    )
    trees: bool = option(False, "count and draw the TopoTrees that tune-config searches", "--trees")
    notation: str | None = option(
        None, "draw this TopoTree, as --trees and tune-config write it", "--tree", metavar="NOTATION"
    )
    plan: bool = option(
        False, "draw the plans of MODEL on the cores; without MODEL the default ones", "--plan"
    )
    plan_file: Path | None = option(None, "draw the plans that tune-config --json printed", metavar="FILE")
    weight_format: str = FORMAT("native")
    db: str | None = DB(None)

    def __post_init__(self) -> None:
        views = ("trees", "notation", "plan", "plan_file")
        chosen = [name for name in views if getattr(self, name) not in (False, None)]
        if len(chosen) > 1:
            flags = [{"notation": "--tree"}.get(name, f"--{name.replace('_', '-')}") for name in chosen]
            raise UsageError(f"{' and '.join(flags)} show different things: give one")
        if self.trees or self.notation is not None:
            refuse_unused("with --trees and --tree", changed(self, "svg_path"))


def topo(
    view: TopoView,
    model: str | None = argument(None, "with --plan: the model whose plans to draw", "MODEL"),
    as_json: JsonOption = False,
) -> None:
    """Show the machine: packages, memory, caches, cores and PUs, and what of it may be used.

    $ phasewise topo
    $ phasewise topo --plan smollm2-135m-instruct

    Other views: --trees, --tree, --plan, --plan-file.
    """
    if not view.plan:
        refuse_unused("without --plan", [] if model is None else ["model"], "add --plan to draw its plans")
    if model is None:
        refuse_unused("without --plan MODEL", changed(view, "weight_format", "db"))
    owns_stdout(view.svg_path, as_json)
    machine = _machine(view.input_path)
    if view.trees or view.notation is not None:
        fields, lines = _trees(machine, view.notation, as_json)
        present(as_json, {"source": machine.source, **fields}, lines)
    elif view.plan or view.plan_file is not None:
        from phasewise.cli.commands.topo.text import plan_lines
        from phasewise.workflows.topo.plan_json import picture_groups, plan_fields

        plans = _plans(machine, model, view)
        fields = {"source": machine.source, "plans": plan_fields(plans)}
        _show(machine, view.svg_path, as_json, fields, plan_lines(machine, plans), picture_groups(plans))
    else:
        from phasewise.cli.commands.topo.text import topo_lines

        lines = topo_lines(machine, sys.stdout.encoding)
        _show(machine, view.svg_path, as_json, machine_fields(machine), lines)


def _trees(machine: Machine, notation: str | None, as_json: bool) -> tuple[dict[str, Any], Iterable[str]]:
    """JSON fields and lines of all TopoTrees, counted, or of the tree that `notation` writes."""
    from phasewise.cli.commands.topo.text import one_tree_fields, one_tree_lines, trees_fields, trees_lines
    from phasewise.tuner.topotree import fundamental, parse

    if notation is not None:
        tree = parse(notation, machine)
        return one_tree_fields(tree), one_tree_lines(tree, sys.stdout.encoding)
    whole = fundamental(machine)
    return trees_fields(whole) if as_json else {}, trees_lines(whole, sys.stdout.encoding)


def _plans(machine: Machine, model: str | None, view: TopoView) -> Mapping[Phase, ServicePlan]:
    """Read the plans of the file, or those that `serve` would use, with a remark where nothing was tuned."""
    from phasewise.tuner.plans import model_key, plans_for, resolve_plans
    from phasewise.workflows.opening.open_model import suited_default
    from phasewise.workflows.topo.plan_json import model_name, read_plans

    if view.plan_file is not None:
        return read_plans(view.plan_file, machine)
    if model is None:
        return resolve_plans(None, machine, "")
    key = model_key(model_name(model), view.weight_format)
    default = suited_default(model, view.weight_format, note)
    plans = plans_for(view.db, machine, key, None, note, default=default)
    if all(plan.source == "default" for plan in plans.values()):
        note(f"no plan of {key} for this machine is stored: the default is drawn; tune-config finds others")
    return plans


def _show(
    machine: Machine,
    svg_path: Path | None,
    as_json: bool,
    fields: Mapping[str, Any],
    lines: Iterable[str],
    groups: tuple[PuGroup, ...] | None = None,
) -> None:
    """Write the picture, where one was asked for; print fields or lines unless stdout has the picture."""
    if svg_path is not None:
        from phasewise.topology.picture import draw_svg

        write_target(svg_path, draw_svg(machine, groups))
        if owns_stdout(svg_path):
            return
        note(f"picture written to {svg_path}")
    present(as_json, fields, lines)


def _machine(input_path: Path | None) -> Machine:
    from phasewise.topology import read_lstopo, read_machine

    if input_path is None:
        return read_machine()
    if str(input_path) == "-":
        return read_lstopo(Path("/dev/stdin"))
    return read_machine(input_path) if input_path.is_dir() else read_lstopo(input_path)


def machine_fields(machine: Machine) -> dict[str, Any]:
    from phasewise.topology import core_signature, placement_signature

    one_per_core = [core[0] for core in machine.allowed_cores()]
    cpu = machine.cpu
    return {
        "source": machine.source,
        "counts": machine.counts(),
        "signature": {
            "core": core_signature(machine),
            "placement": placement_signature(machine, one_per_core),
        },
        "cpu": {name: getattr(cpu, name) for name in ("architecture", "vendor", "family", "model", "name")},
        "isa_features": sorted(cpu.features),
        "allowed_pus": list(machine.allowed_pus),
        "cpu_quota": machine.cpu_quota,
        "kinds": [{"name": kind.name, "cpus": list(kind.cpus)} for kind in machine.kinds],
        "numa_distances": machine.distances,
        "memory_access": machine.memory,
        "tree": _node_fields(machine.tree),
    }


def _node_fields(node: Node) -> dict[str, Any]:
    """JSON fields of a node of the machine's tree, and of the nodes inside."""
    fields: dict[str, Any] = {"kind": node.kind.value, "cpus": list(node.cpus)}
    for name in ("os_index", "size_bytes", "l1d_bytes", "l1i_bytes", "memory_cache_bytes"):
        value = getattr(node, name)
        if value is not None:
            fields[name] = value
    if node.children:
        fields["children"] = [_node_fields(child) for child in node.children]
    return fields
