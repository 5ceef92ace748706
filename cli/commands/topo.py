"""`phasewise topo`: the machine as a tree, for people, for scripts and as a picture."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli.options import JsonOption
from phasewise.cli.present import fail, note, print_json

if TYPE_CHECKING:
    from phasewise.topology import Machine, Node


def topo(
    input_path: Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE", help="lstopo XML file, or folder with a sysfs snapshot"),
    ] = None,
    as_json: JsonOption = False,
    svg_path: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="write a picture of the machine here")
    ] = None,
) -> None:
    """Show the machine: packages, memory, caches, cores and PUs, and what of it may be used."""
    from phasewise.cli.topo_text import topo_lines
    from phasewise.topology.picture import draw_svg

    machine = _machine(input_path)
    if svg_path is not None:
        _write_atomically(svg_path, draw_svg(machine))
        note(f"picture written to {svg_path}")
    if as_json:
        print_json(machine_fields(machine))
    else:
        for line in topo_lines(machine, sys.stdout.encoding):
            print(line)


def machine_fields(machine: Machine) -> dict[str, Any]:
    """What `--json` prints."""
    from phasewise.topology import core_signature, placement_signature

    one_per_core = [core[0] for core in machine.allowed_cores()]
    cpu = machine.cpu
    return {
        "source": machine.source,
        "counts": asdict(machine.counts()),
        "signature": {
            "core": core_signature(machine),
            "placement": placement_signature(machine, one_per_core),
        },
        "cpu": {
            "architecture": cpu.architecture,
            "vendor": cpu.vendor,
            "family": cpu.family,
            "model": cpu.model,
            "name": cpu.name,
        },
        "isa_features": sorted(cpu.features),
        "allowed_pus": list(machine.allowed_pus),
        "cpu_quota": machine.cpu_quota,
        "kinds": [{"name": kind.name, "cpus": list(kind.cpus)} for kind in machine.kinds],
        "numa_distances": None if machine.distances is None else asdict(machine.distances),
        "memory_access": [asdict(access) for access in machine.memory],
        "tree": _node_fields(machine.tree),
    }


def _node_fields(node: Node) -> dict[str, Any]:
    """One part of the tree with what is known of it, and the parts inside."""
    fields: dict[str, Any] = {"kind": node.kind.value, "cpus": list(node.cpus)}
    for name in ("os_index", "size_bytes", "l1d_bytes", "l1i_bytes", "memory_cache_bytes"):
        value = getattr(node, name)
        if value is not None:
            fields[name] = value
    if node.children:
        fields["children"] = [_node_fields(child) for child in node.children]
    return fields


def _machine(input_path: Path | None) -> Machine:
    from phasewise.topology import read_lstopo, read_machine

    if input_path is None:
        return read_machine()
    return read_machine(input_path) if input_path.is_dir() else read_lstopo(input_path)


def _write_atomically(path: Path, text: str) -> None:
    """The whole file or none of it: written beside its place, then moved there."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        fail(f"picture {path} cannot be written: {error.strerror}", exit_code=1)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
