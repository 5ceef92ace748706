"""A copy of a model's weights near the cores of one rank, on machines with several NUMA nodes.

The pages of a packed file lie where they were read first, maybe by another process long ago. So they are
copied once, to the rank's node or to its nodes by turns, and the file's own are given back. On a machine of
one node there is no copy.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from phasewise.cython_kernels._native import place_on_nodes
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.memory import available_bytes
from phasewise.serving.processes.segments import Mapped
from phasewise.serving.ranks.rank_memory import Nodes, warn_of_refusals, warn_of_strays
from phasewise.serving.ranks.shared_weights import copy_panels, panels_by_node, places_in_segment

_log = logging.getLogger(__name__)


def weights_near(model: PackedModel, nodes: Nodes, further_bytes: int) -> PackedModel:
    """`model` with its weights on `nodes`; itself where there are none, or where memory is too short for two.

    further_bytes: of memory that the model needs besides. RanksError where the system grants none.
    """
    if not nodes:
        return model
    places = places_in_segment(model)
    left = available_bytes()
    if left is not None and places.n_bytes + further_bytes > left:
        _log.warning(
            "%s: its weights stay where the system has read them, for a copy on NUMA node %s needs %.0f MiB"
            " more than the %.0f MiB that are free",
            model.name,
            ",".join(map(str, nodes)),
            (places.n_bytes + further_bytes - left) / 2**20,
            left / 2**20,
        )
        return model
    memory = Mapped.own(places.n_bytes)
    answer = place_on_nodes(memory.memory, 0, memory.n_bytes, nodes)
    weights, vectors = places.views(memory)
    copy_panels(model.weights, weights, None, huge=False)  # `memory` has asked for them
    for name, vector in model.vectors.items():
        vectors[name][...] = vector
    if model.file is not None:
        model.file.release()
    warn_of_refusals({0: answer})
    if answer == 0:
        warn_of_strays(0, panels_by_node(weights, None), nodes)
    return replace(model, weights=weights, vectors=vectors, file=None)
