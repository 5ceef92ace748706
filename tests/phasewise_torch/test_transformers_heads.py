"""Heads that draft beside transformers' own: the same logits from the same rows of a tiny random model."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
from phasewise.serving.batch import Batch  # noqa: E402
from phasewise.serving.drafts.computed_drafts import GuestHead  # noqa: E402
from phasewise.serving.loaders import load_head, load_model  # noqa: E402
from phasewise.serving.ranks.first_rank import KvSettings, RankOptions  # noqa: E402
from phasewise.serving.ranks.open_ranks import LocalRanks  # noqa: E402
from tests.serving.engine.test_engine_kernels import plans  # noqa: E402
from tests.serving.models.test_forward import sliced  # noqa: E402
from tests.support.models import family_cases  # noqa: E402
from tests.support.models.head_models import write_with_head  # noqa: E402

BOUND = 1e-3
"""Largest difference, as a share of the largest logit."""
OPTIONS = RankOptions(KvSettings(512), 64, 4)
N_PROMPT = 40


def theirs(folder: Path, ids: list[int], n_layers: int) -> tuple[np.ndarray, np.ndarray]:
    """transformers' rows of the model behind its last norm, and its head's logits after the last one."""
    from transformers import cache_utils, modeling_layers

    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this release of transformers has no heads")
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        main: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{n_layers}\."]  # theirs are of 61 layers
        rows = main.model(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
        head = modeling_layers.MtpModel.from_pretrained(main).eval()
        _, logits, _ = head(
            input_ids=torch.tensor([ids[1:]]),
            last_hidden_states=rows,
            attention_mask=None,
            position_ids=torch.arange(1, len(ids))[None],
            mtp_cache=cache_utils.MtpCache(config=main.config.get_mtp_config()),
        )
    return rows[0].numpy().copy(), logits[0, 0].numpy().copy()


@pytest.mark.parametrize("name", ["glm4moe", "glm4moe-plain", "deepseek3"])
def test_a_head_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """From the model's rows in chunks, whatever the positions begin with: heads attend by their distances."""
    write_with_head(tmp_path / name, name)
    ids = [int(token) for token in np.random.default_rng(7).integers(3, 250, N_PROMPT + 1)]
    model = load_model(str(tmp_path / name), "f32", cache_dir=tmp_path / "cache")
    head = load_head(model, "f32", cache_dir=tmp_path / "cache")
    assert head is not None
    ranks = LocalRanks(model, plans(), replace(OPTIONS, feeds=True))
    guest = GuestHead(head, lambda: ranks, OPTIONS)
    try:
        ranks.forward(Batch("prefill", (sliced(ids[:-1]),)))
        rows = ranks.take_fed_rows(N_PROMPT)
        assert rows is not None
        first = sliced(ids[1:18])._replace(wants_logits=False)
        guest.forward_rows(Batch("prefill", (first,)), rows[:17])
        logits, _ = guest.forward_rows(Batch("decode", (sliced(ids[18:], 17),)), rows[17:])
        logits = logits[0].copy()
    finally:
        ranks.close()

    fields = family_cases.FAMILY_CASES[name].fields
    want_rows, want = theirs(tmp_path / name, ids, fields["num_hidden_layers"])
    assert np.abs(rows - want_rows).max() <= BOUND * np.abs(want_rows).max()
    assert np.abs(logits - want).max() <= BOUND * np.abs(want).max()
    assert logits.argmax() == want.argmax()
