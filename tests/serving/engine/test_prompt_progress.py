"""The progress that steps tell: tokens are conserved, however prompts are cut and whoever comes and goes."""

from __future__ import annotations

import random

import pytest

from phasewise.serving.engine.messages import Answer, Progress, Submit
from tests.support.servers.fake_engine import AttentiveRanks, make_engine
from tests.support.tiers import n_examples


@pytest.mark.parametrize("seed", range(n_examples(40)))
def test_every_prompt_is_told_to_its_end_in_growing_steps(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(AttentiveRanks(), context_length=400, kv_slots=1600, max_sequences=3)
    prompts = {str(number): rng.randrange(1, 300) for number in range(8)}
    shared = tuple(rng.randrange(250) for _ in range(300))
    told: dict[str, list[Progress]] = {name: [] for name in prompts}
    begun: set[str] = set()
    left: set[str] = set()
    for name, n_tokens in prompts.items():
        engine.submit(Submit(name, shared[:n_tokens], 3))
    while engine.has_work:
        delivery = engine.step()
        for progress in delivery.progress:
            assert progress.request_id not in begun | left
            told[progress.request_id].append(progress)
        begun |= {out.request_id for out in delivery.outs if isinstance(out, Answer)}
        if rng.random() < 0.05 and engine.has_work:
            aborted = rng.choice(sorted(prompts))
            left.add(aborted)
            engine.abort(aborted)
    for name, steps in told.items():
        computed = [step.n_computed for step in steps]
        assert computed == sorted(set(computed))
        assert all(step.n_cached < step.n_computed <= step.n_prompt == prompts[name] for step in steps)
        assert len({step.n_cached for step in steps}) <= 1
        if name in begun:
            assert computed[-1] == prompts[name]
    assert not engine._progress._prompts
