"""Schemas of the objects of Kubernetes in deploy/kubernetes, as one JSON schema without descriptions.

    python tests/data/kubernetes/make_schemas.py > tests/data/kubernetes/schemas.json

Needs kubernetes-validate (108 MB, of which this takes what six kinds reach). A field that no schema has is an
error (its `strict` schemas). Kinds of volumes that we do not use are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-not-found]

VERSION = "v1.37.0"
KINDS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Service": "io.k8s.api.core.v1.Service",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
    "HorizontalPodAutoscaler": "io.k8s.api.autoscaling.v2.HorizontalPodAutoscaler",
}
VOLUMES = ("name", "emptyDir", "secret", "configMap", "persistentVolumeClaim", "hostPath")


def bare(value: Any) -> Any:
    """Without descriptions, and without what an object's controller fills in."""
    if isinstance(value, dict):
        kept = {key: bare(part) for key, part in value.items() if key not in ("status", "managedFields")}
        return {
            key: part
            for key, part in kept.items()
            if not (key == "description" and isinstance(part, str)) and not key.startswith("x-")
        }
    if isinstance(value, list):
        return [bare(part) for part in value]
    return value.replace("/api/_definitions.json#", "#") if isinstance(value, str) else value


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"].rsplit("/", 1)[1]
        for part in value.values():
            yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)


def main() -> None:
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"{VERSION}-local-strict"
    schemas = json.loads((folder / "_definitions.json").read_text())["$defs"]
    reached: dict[str, Any] = {}
    left = list(KINDS.values())
    while left:
        name = left.pop()
        if name in reached:
            continue
        reached[name] = bare(schemas[name])
        if name == "io.k8s.api.core.v1.Volume":
            properties = reached[name]["properties"]
            reached[name]["properties"] = {key: properties[key] for key in VOLUMES}
        left += references(reached[name])
    document = {"kubernetes": VERSION, "kinds": KINDS, "$defs": dict(sorted(reached.items()))}
    json.dump(document, sys.stdout, indent=None, separators=(",", ":"), sort_keys=False)
    print()


if __name__ == "__main__":
    main()
