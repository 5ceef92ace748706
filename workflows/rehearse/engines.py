"""The real engines of a rehearsal: of one way of serving, opened as `serve` does, without HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from phasewise.workflows.rehearse.ways import DRAFT_ROWS, IN_USE, PoolCores, ServerWay, looked_of
from phasewise.workflows.report import silent
from phasewise.workflows.serve.pools import Pools

if TYPE_CHECKING:
    from phasewise.cluster.simulated.simulated_requests import Arrival
    from phasewise.serving.engine.engine_host import OpenHost
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import OpenEngine
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.tune_config.subject import Wish


@dataclass(frozen=True)
class Engines:
    """A model opened by each of the plans that are rehearsed, and the wish that named it."""

    models: Mapping[str, OpenModel]
    wish: Wish

    @property
    def n_vocabulary(self) -> int:
        return self.models[IN_USE].model.config.vocab_size

    def size(self, way: ServerWay) -> EngineSize:
        """The size of an engine that has all of the memory."""
        from phasewise.serving.engine.engine_size import EngineSize
        from phasewise.serving.ranks.rank_layout import teams_of
        from phasewise.serving.scheduling.scheduler_terms import DEFAULT_SEQUENCES

        model, is_pooled = self.models[way.plans], way.pools is not None
        size = EngineSize.for_many(
            model.model,
            DEFAULT_SEQUENCES,
            None,
            None,
            kv_shared=is_pooled,
            teams=() if is_pooled else teams_of(model.plans),
        )
        limits = replace(size.limits, prefix_reuse=False, max_batch_tokens=way.batch_tokens)
        kv = replace(size.kv, touched=True)
        return replace(size, limits=limits, kv=kv, kv_policy=way.kv_policy, tpot_ms=way.tpot_ms)

    def engine(self, way: ServerWay) -> OpenEngine:
        """One engine; use it in `with`. ServingError."""
        from phasewise.serving.engine.open_engine import open_engine

        model = self.models[way.plans]
        return open_engine(model.model, model.plans, self.size(way), schedules=model.schedules)

    @contextmanager
    def host(
        self, way: ServerWay, arrivals: Sequence[Arrival], answers: Sequence[Sequence[int]] = ()
    ) -> Iterator[OpenHost]:
        """The engine that answers as this way says. answers: the tokens that are to come, by which drafts are
        made that are right as often as the log's were. Raises as `open_engine` and `open_pools` do.
        """
        if way.pools is not None:
            with self._pooled(way.pools, way) as host:
                yield host
            return
        from phasewise.serving.drafts.logged_lookup import LoggedAnswer, drafter_again
        from phasewise.serving.engine.engine_thread import EngineThread

        with self.engine(way) as opened:
            if way.draft_tokens is not None:
                logged = [
                    LoggedAnswer(looked_of(arrival.lookup), answer)
                    for arrival, answer in zip(arrivals, answers, strict=True)
                ]
                n_tokens = way.draft_tokens if isinstance(way.draft_tokens, int) else None
                opened.engine.drafter = drafter_again(lambda name: logged[int(name)], DRAFT_ROWS, n_tokens)
            yield partial(EngineThread, opened.engine)

    @contextmanager
    def _pooled(self, cores: PoolCores, way: ServerWay) -> Iterator[OpenHost]:
        from phasewise.serving.engine.open_engine import ModelText
        from phasewise.workflows.opening.open_model import Weights
        from phasewise.workflows.serve.instance_process import InstanceSpec
        from phasewise.workflows.serve.pools import open_pools

        model, wish = self.models[IN_USE], self.wish
        spec = InstanceSpec(wish.model, Weights(wish.weight_format), self.size(way), None, wish.db)
        pools, text = pools_on(cores), ModelText(model.model)
        with open_pools(pools, model, text, spec, None, silent) as opened:
            assert opened is not None, "pools were asked for"
            yield opened.host


def pools_on(cores: PoolCores) -> Pools:
    """The options of `serve` for them."""
    return Pools(prompt_pool=[cores.prompt], token_pool=[cores.token])


def halves_of(plans: Mapping[Phase, ServicePlan]) -> PoolCores | None:
    """The cores of the plan for prompts in two halves: its ranks, else the cores of its only rank. None: they
    cannot be halved."""
    from phasewise.tuner.plans import list_cores

    ranks = [rank.cores for rank in plans["prefill"].ranks]
    if len(ranks) == 1:
        middle = len(ranks[0]) // 2
        ranks = [ranks[0][:middle], ranks[0][middle:]]
    middle = len(ranks) // 2
    if not all(ranks) or len(ranks) % 2:
        return None
    parts = ["+".join(list_cores(cores) for cores in half) for half in (ranks[:middle], ranks[middle:])]
    return PoolCores(*parts)
