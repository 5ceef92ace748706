"""Begun answers over the real kernels: what was generated has, as a prompt, the numbers that it had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cython_kernels import isa
from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Failure, Submit
from phasewise.serving.engine.open_engine import open_engine
from phasewise.serving.errors import RankLost
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.serving.models.packed_model import FORMATS, PackedModel
from phasewise.serving.sampling.sampling import SamplingParams
from tests.support.models import family_models as families
from tests.support.models.tiny_models import TinyShape, write_sparse_hf, write_tiny_gguf
from tests.support.servers.fake_engine import run_all
from tests.support.servers.pools import plans_of, prompt
from tests.support.tiers import isas
from tests.support.whole_answers import whole_answer

LOST = RankLost("rank 1 (pid 7) was killed by SIGKILL")
LOSSES = (5, 18, 19, 34)
"""Steps after which keys and values are lost."""
SHAPE = TinyShape(n_layers=2, hidden=256, ffn=512, n_heads=4, n_kv_heads=2, head_dim=64)
GGUF_TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


def requests() -> list[Submit]:
    samplings = [
        SamplingParams(temperature=0.0, top_logprobs=3),
        SamplingParams(temperature=0.9, seed=7, top_p=0.9, top_logprobs=1),
        SamplingParams(temperature=1.1, seed=8, frequency_penalty=0.5, top_logprobs=0),
    ]
    return [
        Submit(str(index), prompt(9 + 31 * index, index), 24, sampling, ignore_eos=True)
        for index, sampling in enumerate(samplings)
    ]


def disturbed(engine: Engine) -> dict[str, list[Answer | Failure]]:
    """All requests at once; keys and values are lost again and again."""
    outs: dict[str, list[Answer | Failure]] = {}
    for request in requests():
        engine.submit(request)
    n_steps = 0
    while engine.has_work:
        for out in engine.step().outs:
            outs.setdefault(out.request_id, []).append(out)
        n_steps += 1
        if n_steps in LOSSES:
            assert not engine.recover(LOST).outs
    assert engine.n_continued > 0
    return outs


def assert_goes_on(model: PackedModel, kv_format: str = "auto") -> None:
    size = EngineSize.for_many(model, 4, None, 8 << 20)
    limits = replace(size.limits, context_length=256, max_batch_tokens=40)
    size = replace(size, limits=limits, kv=replace(size.kv, slots=1024, format=kv_format))
    plans = {plan.phase: plan for plan in plans_of(1)}

    def told(run: Callable[[Engine], Any]) -> dict[str, dict[str, Any]]:
        with open_engine(model, plans, size, pinned=False) as opened:
            return {name: whole_answer(outs) for name, outs in run(opened.engine).items()}

    assert told(disturbed) == told(lambda engine: run_all(engine, *requests()))


@pytest.mark.many
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_whatever_the_format_of_keys_and_values(tmp_path: Path, kv_format: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", shape=SHAPE)
    model = load_model(str(path), "native", tmp_path / "cache")
    for name in isas():
        with isa.using(name):
            assert_goes_on(model, kv_format)


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", FORMATS)
def test_whatever_the_format_of_weights(tmp_path: Path, weight_format: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", shape=SHAPE)
    assert_goes_on(load_model(str(path), weight_format, tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_whatever_the_blocks_of_a_file(tmp_path: Path, kind: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", types=kind, shape=SHAPE)
    assert_goes_on(load_model(str(path), "native", tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_with_sparse_weights(tmp_path: Path, weight_format: str) -> None:
    directory = write_sparse_hf(tmp_path / "sparse", SHAPE, 0.7)
    storage = StorageChoice("always")
    assert_goes_on(load_model(str(directory), weight_format, tmp_path / "cache", storage=storage))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "qwen3next", "granitehybrid", "gemma3", "qwen3moe"])
def test_with_states_windows_and_experts(tmp_path: Path, family: str) -> None:
    families.write_family_hf(tmp_path / family, family)
    assert_goes_on(load_model(str(tmp_path / family), "int8", tmp_path / "cache"))
