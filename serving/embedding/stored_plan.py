"""Plans of embedding as the tuning database keeps them: by places of the topology, which like machines share.

They lie beside service plans, as those of a phase of their own.
"""

from __future__ import annotations

import json
from typing import Any

from phasewise._json import read_json
from phasewise.serving.embedding.plan import EmbeddingPlan, fields_of, plan_of
from phasewise.serving.errors import ServingError
from phasewise.topology import Machine, TopologyError, places_of, pus_at

PHASE = "embed"
"""The word by which the database tells these plans from those of prefill and decode."""

FORMAT = 1


def placed_json(plan: EmbeddingPlan, machine: Machine) -> str:
    """The plan by its places. ServingError where this process may not use a core of it."""
    fields = fields_of(plan)
    try:
        for instance_fields, instance in zip(fields["instances"], plan.instances, strict=True):
            instance_fields["places"] = [*places_of(machine, instance.cores)]
            del instance_fields["cores"]
    except TopologyError as error:
        raise ServingError(f"the embedding plan cannot be kept: {error}") from None
    kept = {"format": FORMAT, "pus": len(machine.allowed_pus), "slo_s": plan.slo_s}
    return json.dumps({**kept, "instances": fields["instances"]})


def stored_plan(text: str, machine: Machine, source: str = "database") -> EmbeddingPlan:
    """A plan of the database in this machine's own numbers. ServingError, saying why, for what is none."""
    fields = _fields(text)
    if fields["pus"] != len(machine.allowed_pus):
        n_pus = len(machine.allowed_pus)
        raise ServingError(f"it is for a process with {fields['pus']!r:.20} PUs; this one may use {n_pus}")
    try:
        instances = [
            {**instance, "cores": [*pus_at(machine, own)]}
            for instance, own in zip(fields["instances"], stored_places(text), strict=True)
        ]
        return plan_of({**fields, "instances": instances}, source)
    except (TopologyError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServingError(f"it is no plan of embedding: {error!s:.100}") from None


def stored_places(text: str) -> list[list[int]]:
    """The places of each instance. ServingError for what is no plan."""
    try:
        places = [[*instance["places"]] for instance in _fields(text)["instances"]]
    except (KeyError, TypeError) as error:
        raise ServingError(f"it is no plan of embedding: {error!s:.100}") from None
    if not all(type(place) is int for own in places for place in own):
        raise ServingError("it is no plan of embedding: places are whole numbers")
    return places


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = read_json(text)
    except ValueError:
        raise ServingError("it is no plan of embedding: not JSON") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT or "pus" not in fields:
        raise ServingError("it is no plan of embedding that this phasewise reads")
    return fields
