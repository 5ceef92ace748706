"""A config means the same by the names of transformers 4 and 5, whichever of its layers are of which kind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.hf_config import config_of
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.rope import LinearScaling, RopeSpec
from tests.support.models.tiny_models import TinyShape, hf_config

THETAS = st.sampled_from((10000.0, 500000.0, 1e6))
NAMES = {True: "sliding_attention", False: "full_attention"}
SHAPE = TinyShape()


def read(fields: dict[str, Any]) -> ModelConfig:
    return config_of({key: value for key, value in fields.items() if value is not None}, {}, add_bos=False)


def fields_of(model_type: str, n_layers: int) -> dict[str, Any]:
    fields = {**hf_config("llama"), "model_type": model_type, "num_hidden_layers": n_layers}
    del fields["rope_theta"]
    return fields


@given(
    sliding=st.lists(st.booleans(), min_size=1, max_size=7),
    whole=THETAS | st.none(),
    local=THETAS | st.none(),
    factor=st.sampled_from((None, 8.0)),
    window=st.integers(1, 64),
)
def test_gemma_3_is_the_same_by_both_releases(
    sliding: list[bool], whole: float | None, local: float | None, factor: float | None, window: int
) -> None:
    """Every layer has the base and the scaling of its kind, also where no layer is of the other kind."""
    names = [NAMES[is_sliding] for is_sliding in sliding]
    plain = {**fields_of("gemma3_text", len(names)), "layer_types": names, "sliding_window": window}
    plain["hidden_act"] = "gelu_pytorch_tanh"
    scaling = {"rope_type": "linear", "factor": factor} if factor else {}
    fourth = {**plain, "rope_theta": whole, "rope_local_base_freq": local, "rope_scaling": scaling or None}
    of_kinds = {"full_attention": (whole, scaling), "sliding_attention": (local, {})}
    fifth = {
        **plain,
        "rope_parameters": {
            kind: {"rope_type": "default", **({} if theta is None else {"rope_theta": theta}), **more}
            for kind, (theta, more) in of_kinds.items()
            if kind in names
        },
    }

    seen = read(fourth)

    spec = RopeSpec(whole or 1e6, SHAPE.head_dim, LinearScaling(factor) if factor else None)
    kinds = {
        True: LayerKind(window, RopeSpec(local or 10000.0, SHAPE.head_dim)),
        False: LayerKind(None, spec),
    }
    for config in (seen, read(fifth)):
        assert [form.attention for form in config.forms] == [kinds[is_sliding] for is_sliding in sliding]


def test_a_scaling_of_layers_with_a_window_is_refused() -> None:
    fields = {
        **fields_of("gemma3_text", 2),
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    }
    with pytest.raises(ModelError, match="'linear' in layers with a window"):
        read(fields)


@given(
    model_type=st.sampled_from(("llama", "mistral", "qwen2", "qwen3", "olmo2", "granite")),
    theta=THETAS | st.none(),
    factor=st.sampled_from((None, 2.0)),
    name=st.sampled_from(("rope_type", "type")),
)
def test_rope_is_the_same_by_both_releases(
    model_type: str, theta: float | None, factor: float | None, name: str
) -> None:
    plain = fields_of(model_type, 2)
    scaling = {name: "linear", "factor": factor} if factor else None
    fourth = {**plain, "rope_theta": theta, "rope_scaling": scaling}
    base = {} if theta is None else {"rope_theta": theta}
    fifth = {**plain, "rope_parameters": {"rope_type": "default", **base, **(scaling or {})}}
    if scaling and name == "type":
        del fifth["rope_parameters"]["rope_type"]

    assert read(fourth) == read(fifth)
    expected = (theta or 10000.0, LinearScaling(factor) if factor else None)
    assert (read(fifth).rope.theta, read(fifth).rope.scaling) == expected


@given(sliding=st.lists(st.booleans(), min_size=1, max_size=5), uses=st.sampled_from((True, False, None)))
def test_windows_of_qwen_are_those_of_its_layers(sliding: list[bool], uses: bool | None) -> None:
    """A file that names layers with a window and says that none is used contradicts itself."""
    names = [NAMES[is_sliding] for is_sliding in sliding]
    fields = {
        **fields_of("qwen3", len(names)),
        "layer_types": names,
        "sliding_window": 16,
        "use_sliding_window": uses,
    }
    if uses is False and any(sliding):
        with pytest.raises(ModelError, match="use_sliding_window"):
            read(fields)
        return
    config = read(fields)
    windows = [form.attention and form.attention.window for form in config.forms]
    assert windows == [16 if is_sliding else None for is_sliding in sliding]
