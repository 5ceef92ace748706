"""The process of one instance of a pool: `python -m phasewise.workflows.serve.instance_process`.

It is told what to do on its standard input, and opens the model and the tuning database of its own host.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from phasewise.workflows.opening.open_model import Weights, open_under

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.cluster.real.instance import Orders
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import OpenEngine
    from phasewise.serving.prefix_store.opening import PrefixSettings
    from phasewise.topology import Machine
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.report import Report

MODULE = "phasewise.workflows.serve.instance_process"

_FOR_THE_FRONT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Supervisors send them to all of a service; the front ends its instances when it is done."""


@dataclass(frozen=True)
class InstanceSpec:
    """The model and settings of an instance.

    plans: of both phases; None: those of its host's database that use `cores`, else one rank on as many cores
    of its host, the first `first_core` of which others use. db: URL or file of the tuning database.
    """

    model: str
    weights: Weights
    size: EngineSize
    plans: tuple[ServicePlan, ...] | None
    db: str | None = None
    pinned: bool = True
    ends_with_parent: bool = True
    first_core: int = 0
    cores: int | None = None
    prefixes: PrefixSettings | None = None

    def tell(self, orders: Orders) -> bytes:
        """The line that `main` reads."""
        spec_fields: dict[str, Any] = {
            "model": self.model,
            "weights": asdict(self.weights),
            "size": asdict(self.size),
            "plans": None if self.plans is None else [plan.to_json() for plan in self.plans],
            "db": self.db,
            "pinned": self.pinned,
            "ends_with_parent": self.ends_with_parent,
            "first_core": self.first_core,
            "cores": self.cores,
            "prefixes": None if self.prefixes is None else asdict(self.prefixes),
        }
        return json.dumps({"spec": spec_fields, "orders": asdict(orders)}).encode()


def _read(text: bytes) -> tuple[InstanceSpec, Orders]:
    from phasewise.cluster.real.instance import Orders
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.prefix_store.opening import PrefixSettings
    from phasewise.serving.processes.sockets import Keys
    from phasewise.tuner.plans import ServicePlan

    told = json.loads(text)
    spec_fields, orders = told["spec"], told["orders"]
    plans, prefixes = spec_fields.pop("plans"), spec_fields.pop("prefixes")
    spec = InstanceSpec(
        **{
            **spec_fields,
            "weights": Weights(**spec_fields["weights"]),
            "size": EngineSize.from_json(spec_fields["size"]),
        },
        prefixes=None if prefixes is None else PrefixSettings.from_json(prefixes),
        plans=None if plans is None else tuple(ServicePlan.from_json(plan, "flag") for plan in plans),
    )
    keys = orders.pop("keys")
    return spec, Orders(**orders, keys=None if keys is None else Keys(**keys))


def main() -> int:
    """Open the model and compute for the front until it says so. The exit code of the process."""
    for number in _FOR_THE_FRONT:
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb") as file:
        text = file.read()
    spec, orders = _read(text)
    if spec.ends_with_parent:
        from phasewise.serving.ranks.rank_worker import end_with_parent

        end_with_parent()
        if os.getppid() != parent:
            return 0  # the front had ended before it could take this process along
    logging.basicConfig(level=logging.WARNING, format=f"{orders.name}: %(message)s")
    from phasewise.cluster.real.instance import run_instance, say_cannot_start

    try:
        opened = _open(spec)
    except Exception as error:
        if not _is_expected(error):
            logging.getLogger(__name__).exception("the instance cannot start")
        say_cannot_start(orders, str(error) or type(error).__name__)
        return 1
    with opened:
        return run_instance(opened, orders)


def _is_expected(error: Exception) -> bool:
    return isinstance(getattr(error, "exit_code", None), int) or isinstance(error, (OSError, MemoryError))


def _open(spec: InstanceSpec) -> OpenEngine:
    from phasewise.serving.processes.headroom import use_one_heap

    use_one_heap()
    from phasewise.serving.engine.open_engine import ModelText, open_engine
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import check_fits, model_key, plans_for

    log = logging.getLogger(__name__)
    machine = read_machine()
    key = model_key(locate(spec.model, cache_root(None), log.warning).name, spec.weights.weight_format)
    plans: dict[Phase, ServicePlan]
    if spec.plans is None:
        stored = plans_for(spec.db, machine, key, None, log.warning)
        plans = _plans_within(stored, machine, spec, log.warning)
    else:
        plans = {plan.phase: plan for plan in spec.plans}
        if spec.pinned:
            for plan in plans.values():
                check_fits(plan, machine)
    opened = open_under(plans, spec.model, spec.weights, spec.db, machine, log.warning)
    size = replace(spec.size, kv=replace(spec.size.kv, shared=True))
    return open_engine(
        opened.model,
        plans,
        size,
        ModelText(opened.model),
        opened.schedules,
        spec.pinned,
        prefixes=spec.prefixes,
    )


def _plans_within(
    stored: Mapping[Phase, ServicePlan], machine: Machine, spec: InstanceSpec, report: Report
) -> dict[Phase, ServicePlan]:
    """The stored plans where they fit into the instance's share of its host, else one rank on that share."""
    from phasewise.tuner.plans import ServicePlan, cores_of_share, list_cores, rank_on

    if spec.cores is None:
        return dict(stored)
    share = cores_of_share(machine, spec.first_core, spec.cores)
    plans: dict[Phase, ServicePlan] = {}
    for phase, plan in stored.items():
        if plan.source in ("database", "imported") and set(plan.cores) <= set(share):
            plans[phase] = plan
        else:
            plans[phase] = ServicePlan(phase, (rank_on(machine, share),), "default")
            report(
                f"no tuned {phase} plan fits cores {list_cores(share)} of this host: one rank uses them all"
            )
    return plans


if __name__ == "__main__":
    sys.exit(main())
