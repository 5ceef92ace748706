"""vLLM's plugin on stand-ins of vLLM's classes: which layers it takes, and what they then give."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from phasewise.torch import packed_linear, shared_threads  # noqa: E402
from phasewise.vllm import methods, plugin  # noqa: E402
from tests.support import stand_in_vllm  # noqa: E402
from tests.support.stand_in_vllm import layer_of, stand_in  # noqa: E402

REDUCED = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
"""Relative rounding of a number, or of a sum of hundreds in float32."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The stand-ins, with the plugin registered, and no database."""
    vllm = stand_in(monkeypatch)
    registered(monkeypatch, "native")
    return vllm


def registered(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PHASEWISE_VLLM", value)
    monkeypatch.setenv("PHASEWISE_DB", "/nonexistent/phasewise.db")
    plugin.register()


def drawn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def is_vllms(method: Any, layer: Any) -> bool:
    method().process_weights_after_loading(layer)
    return hasattr(layer, "of_vllm")


def test_the_stand_ins_have_what_the_plugin_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)

    assert stand_in_vllm.broken_promises() == []


@pytest.mark.parametrize("value", ["", "off"])
def test_nothing_is_replaced_where_it_is_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    vllm = stand_in(monkeypatch)
    before = (vllm.linear.apply, vllm.linear.process_weights_after_loading)

    registered(monkeypatch, value)

    assert (vllm.linear.apply, vllm.linear.process_weights_after_loading) == before


def test_nothing_is_replaced_on_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = stand_in(monkeypatch, is_cpu=False)
    before = vllm.linear.apply

    registered(monkeypatch, "native")

    assert vllm.linear.apply is before


def test_methods_are_replaced_once(vllm: SimpleNamespace) -> None:
    """vLLM may call a plugin several times in a process."""
    once = vllm.linear.apply

    plugin.register()

    assert vllm.linear.apply is once


def test_compiled_models_are_kept_apart(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM hashes these variables into the name of what it has compiled, in which weights have numbers: the
    same layers in the same order have the same name, and no others.
    """
    named = sys.modules["vllm.envs"].environment_variables["PHASEWISE_VLLM"]
    layers = [layer_of(drawn(16, 32), prefix=name) for name in "ab"]

    def after(*order: int) -> str:
        monkeypatch.setattr(methods, "_taken", {})
        monkeypatch.setattr(shared_threads, "_held", [])
        for index in order:
            layer = layer_of(layers[index].weight.data.clone(), prefix=layers[index].prefix)
            vllm.linear().process_weights_after_loading(layer)
        return str(named())

    assert named().startswith("native, phasewise ")
    assert len({after(), after(0), after(1), after(0, 1), after(1, 0)}) == 5
    assert after(0, 1) == after(0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 33), (16, 32), (130, 257)])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3), (0,)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_gives_its_product(
    vllm: SimpleNamespace, dtype: Any, n: int, k: int, rows: tuple[int, ...], bias: bool
) -> None:
    """Against float64; vLLM's copy of the weight is gone."""
    weight, x = drawn(n, k, dtype=dtype), drawn(*rows, k, dtype=dtype)
    added = drawn(n, dtype=dtype) if bias else None
    layer = layer_of(weight.clone())
    method = vllm.linear()

    method.process_weights_after_loading(layer)
    y = method.apply(layer, x, added)

    exact = x.double() @ weight.double().T + (added.double() if added is not None else 0)
    size = x.double().abs() @ weight.double().abs().T + (added.double().abs() if added is not None else 0)
    assert (y.dtype, y.shape) == (dtype, (*rows, n))
    assert bool(((y.double() - exact).abs() <= 2 * REDUCED[dtype] * size).all())
    assert not hasattr(layer, "of_vllm")
    assert layer.weight.numel() == 0


def test_a_row_has_the_same_bits_alone_and_among_others(vllm: SimpleNamespace) -> None:
    """Also where they are not side by side in memory, and where a compiler of torch's calls."""
    layer, method = layer_of(drawn(200, 96)), vllm.linear()
    method.process_weights_after_loading(layer)
    x, bias = drawn(33, 96), drawn(200)

    whole = method.apply(layer, x, bias)
    compiled = torch.compile(lambda rows: method.apply(layer, rows, bias), backend="eager", fullgraph=True)

    assert torch.equal(torch.cat([method.apply(layer, row[None], bias) for row in x]), whole)
    assert torch.equal(method.apply(layer, x.T.contiguous().T, bias), whole)
    assert torch.equal(compiled(x), whole)


def test_a_weight_that_is_loaded_anew_takes_the_place_of_the_old(vllm: SimpleNamespace) -> None:
    layer, method, x = layer_of(drawn(16, 32)), vllm.linear(), drawn(3, 32)
    method.process_weights_after_loading(layer)
    number = layer.phasewise_number
    layer.weight = torch.nn.Parameter(torch.zeros(16, 32, dtype=torch.bfloat16), requires_grad=False)

    method.process_weights_after_loading(layer)

    assert layer.phasewise_number == number
    assert not method.apply(layer, x).any()


@pytest.mark.parametrize(
    ("weight", "fields"),
    [
        (torch.zeros(4, 4, 2, dtype=torch.bfloat16), {}),
        (torch.zeros(4, 4, dtype=torch.float16), {}),
        (torch.zeros(4, 4, dtype=torch.bfloat16, device="meta"), {}),
        (torch.zeros(0, dtype=torch.bfloat16), {}),
        (torch.zeros(4, 4, dtype=torch.bfloat16), {"_cpu_skip_gemm_dispatch": True}),
    ],
    ids=["no matrix", "float16", "meta", "empty", "skipped"],
)
def test_other_layers_stay_vllms(vllm: SimpleNamespace, weight: Any, fields: dict[str, Any]) -> None:
    layer = layer_of(weight, **fields)

    assert is_vllms(vllm.linear, layer)
    assert layer.weight is not None


def test_a_method_below_vllms_keeps_its_own(vllm: SimpleNamespace) -> None:
    """It may multiply in its own way by what vLLM's prepares."""
    assert is_vllms(type("Other", (vllm.linear,), {}), layer_of(drawn(4, 4)))


def test_of_embeddings_the_outputs_alone_are_packed(vllm: SimpleNamespace) -> None:
    """The weight stays: rows of it may be looked up."""
    head, table = layer_of(drawn(48, 32), vllm.head), layer_of(drawn(48, 32))

    assert is_vllms(vllm.embedding, table)
    assert not is_vllms(vllm.embedding, head)
    assert head.weight.shape == (48, 32)
    x = drawn(2, 32)
    assert torch.allclose(
        vllm.embedding().apply(head, x).float(), x.float() @ head.weight.float().T, atol=0.2, rtol=0.01
    )


def test_eight_bits_are_for_linear_layers_and_not_for_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = stand_in(monkeypatch)
    registered(monkeypatch, "int8")
    weight, x = drawn(48, 64), drawn(5, 64)
    linear, head, method = layer_of(weight.clone()), layer_of(weight.clone(), vllm.head), vllm.linear()
    method.process_weights_after_loading(linear)
    vllm.embedding().process_weights_after_loading(head)

    exact = x.double() @ weight.double().T
    errors = [
        float((y.double() - exact).norm() / exact.norm())
        for y in (method.apply(linear, x), vllm.embedding().apply(head, x))
    ]

    assert 0.004 < errors[0] < 0.02
    assert errors[1] < 0.004


def test_zeros_are_not_stored_where_that_pays(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the bits are those of a dense weight."""
    weight, x = drawn(64, 128), drawn(3, 128)
    weight[:, ::2] = 0
    outputs = []
    for share in (0.3, 1.0):  # which is never reached
        monkeypatch.setattr(packed_linear, "WORTH_ZEROS", share)
        layer, method = layer_of(weight.clone()), vllm.linear()
        method.process_weights_after_loading(layer)
        outputs.append(method.apply(layer, x))

    assert packed_linear.packed_weight(weight, "sparse").is_sparse
    assert torch.equal(*outputs)


class CompressedTensorsW8A8Int8:
    """A scheme of compressed-tensors, by vLLM's name."""

    def __init__(self, strategy: str = "channel", is_static: bool = False, is_symmetric: bool = True) -> None:
        self.strategy, self.is_static_input_scheme, self.input_symmetric = strategy, is_static, is_symmetric


def eight_bit_layer(scheme: Any, widths: tuple[int, ...] = (40, 24), k: int = 96) -> tuple[Any, Any]:
    """A layer of bytes, put together from weights of such widths, and what it is worth."""
    rng, n = np.random.default_rng(7), sum(widths)
    codes = torch.from_numpy(rng.integers(-128, 128, (n, k)).astype(np.int8))
    by_channel = scheme.strategy == "channel"
    scales = torch.from_numpy(rng.uniform(0.5, 2, n if by_channel else len(widths)).astype(np.float32)) / 64
    spread = scales if by_channel else scales.repeat_interleave(torch.tensor(widths))
    layer = layer_of(
        codes,
        scheme=scheme,
        weight_scale=scales[:, None] if by_channel else scales,
        logical_widths=list(widths),
    )
    return layer, codes.double() * spread.double()[:, None]


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_bytes_with_a_scale_for_each_output(vllm: SimpleNamespace, strategy: str) -> None:
    """Off by what rounding a row to 127 steps either way may change, and by bf16's rounding."""
    layer, worth = eight_bit_layer(CompressedTensorsW8A8Int8(strategy))
    x, method = drawn(9, 96), vllm.compressed()

    method.process_weights_after_loading(layer)
    y = method.apply(layer, x)

    step = x.double().abs().amax(1, keepdim=True) / 127
    bound = step * worth.abs().sum(1) / 2
    exact = x.double() @ worth.T
    assert not hasattr(layer, "of_vllm")
    assert bool(((y.double() - exact).abs() <= 1.01 * bound + 2.0**-8 * exact.abs()).all())


@pytest.mark.parametrize(
    "scheme",
    [
        SimpleNamespace(strategy="channel"),
        CompressedTensorsW8A8Int8(is_static=True),
        CompressedTensorsW8A8Int8(is_symmetric=False),
    ],
    ids=["another scheme", "scales from the file", "zero points"],
)
def test_other_schemes_stay_vllms(vllm: SimpleNamespace, scheme: Any) -> None:
    layer = layer_of(drawn(4, 4), scheme=scheme, weight_scale=drawn(4))

    assert is_vllms(vllm.compressed, layer)
