"""Packed layers give what torch gives, whatever the shape and dtype; what cannot be packed is named."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from phasewise.cython_kernels import packing  # noqa: E402
from phasewise.torch import PackedLinear, packed_linear, replace_linear  # noqa: E402


def unpacked(layer: PackedLinear) -> torch.nn.Linear:
    """The layer as a float32 linear layer."""
    linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(packing.unpack(layer._weight)))
        if layer.bias is not None and linear.bias is not None:
            linear.bias.copy_(layer.bias)
    return linear


def linear(n: int, k: int, zeros: float, dtype: Any, bias: bool = True) -> Any:
    torch.manual_seed(0)
    layer = torch.nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        layer.weight[torch.rand(n, k) < zeros] = 0
    return layer.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("storage", ["auto", "dense", "sparse"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 1, 7)])
def test_a_packed_layer_gives_what_torch_gives(dtype: Any, storage: str, shape: tuple[int, ...]) -> None:
    layer = linear(37, 101, 0.5, dtype)
    if storage == "sparse" and dtype != torch.bfloat16:
        with pytest.raises(ValueError, match="no sparse storage"):
            PackedLinear.from_linear(layer, storage)
        return
    x = torch.randn(*shape, 101).to(dtype)

    y = PackedLinear.from_linear(layer, storage)(x)

    with torch.no_grad():
        expected = torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
    assert y.shape == expected.shape
    assert y.dtype == dtype
    assert torch.allclose(y.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 33), (17, 1), (15, 31), (16, 32), (17, 65), (130, 257)])
@pytest.mark.parametrize("bias", [False, True])
def test_odd_sizes_with_and_without_bias(n: int, k: int, bias: bool) -> None:
    """Against float64: sums of k products in float32, and bf16 where the weights are."""
    for dtype, storage in ((torch.float32, "dense"), (torch.bfloat16, "sparse")):
        layer = linear(n, k, 0.5, dtype, bias)
        packed = PackedLinear.from_linear(layer, storage)
        x = torch.randn(4, k).to(dtype)

        y = packed(x)

        exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
        size = (x.double().abs() @ layer.weight.double().abs().T).max() + 1
        assert (packed.in_features, packed.out_features, packed.bias is None) == (k, n, not bias)
        rounding = 2**-8 if dtype == torch.bfloat16 else k * 2**-23
        assert float((y.double() - exact).detach().abs().max()) <= size * rounding


def test_other_threads_run_while_a_layer_multiplies() -> None:
    """The GIL is released: a thread counts on while products are made in this one."""
    layer = PackedLinear.from_linear(linear(2048, 2048, 0.5, torch.bfloat16), "sparse")
    x, ends, counted = torch.randn(256, 2048), threading.Event(), 0

    def count() -> None:
        nonlocal counted
        while not ends.wait(0.0001):
            counted += 1

    before, thread = torch.get_num_threads(), threading.Thread(target=count)
    thread.start()
    try:
        torch.set_num_threads(1)
        at_first = counted
        layer(x)
        during = counted - at_first
    finally:
        torch.set_num_threads(before)
        ends.set()
        thread.join()

    assert during > 0


def test_as_many_threads_work_as_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = PackedLinear.from_linear(linear(256, 64, 0.5, torch.bfloat16))
    real, seen = packed_linear.torch_team, []

    def torch_team() -> Any:
        team = real()
        seen.append(team.threads)
        return team

    monkeypatch.setattr(packed_linear, "torch_team", torch_team)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            layer(torch.randn(2, 64))
    finally:
        torch.set_num_threads(before)

    assert seen == [1, 3]


def test_a_layer_moved_to_another_type_keeps_its_sums_in_float32() -> None:
    """`model.to(dtype)` changes a bias with all other buffers; the packed weight stays."""
    layer = PackedLinear.from_linear(linear(40, 64, 0.5, torch.bfloat16))
    x = torch.randn(3, 64)
    expected = layer(x)

    assert torch.equal(copy.deepcopy(layer).to(torch.bfloat16)(x), expected)


def test_a_state_dict_comes_back() -> None:
    layer = PackedLinear.from_linear(linear(40, 70, 0.6, torch.bfloat16), "sparse")
    other = PackedLinear.from_linear(linear(40, 70, 0.0, torch.bfloat16), "dense")

    other.load_state_dict(copy.deepcopy(layer.state_dict()))

    x = torch.randn(3, 70)
    assert other.is_sparse
    assert torch.equal(other(x), layer(x))
    written = io.BytesIO()
    torch.save(layer.state_dict(), written)
    written.seek(0)
    another = PackedLinear.from_linear(linear(40, 70, 0.0, torch.bfloat16), "dense")
    another.load_state_dict(torch.load(written, weights_only=True))
    assert torch.equal(another(x), layer(x))
    broken = layer.get_extra_state()
    broken["values"][:64] = 255
    with pytest.raises(Exception, match="sparse"):
        other.set_extra_state(broken)


def test_training_and_gradients_raise() -> None:
    layer = PackedLinear.from_linear(linear(8, 8, 0.5, torch.float32))

    with pytest.raises(RuntimeError, match="trained"):
        layer.train()
    with pytest.raises(RuntimeError, match="gradient"):
        layer(torch.randn(2, 8, requires_grad=True))
    assert layer.eval() is layer
    assert torch.allclose(unpacked(layer)(torch.ones(1, 8)), layer(torch.ones(1, 8)), atol=1e-5)


def test_a_model_is_replaced_where_that_pays_and_says_why_not() -> None:
    class Other(torch.nn.Linear):
        pass

    model = torch.nn.Module()
    model.a = linear(16, 32, 0.5, torch.bfloat16)
    model.b = linear(16, 32, 0.1, torch.bfloat16)
    model.c = Other(8, 8)
    model.d = torch.nn.Linear(8, 8)
    model.e = torch.nn.Embedding(8, 8)
    model.d.weight = model.e.weight
    model.lm_head = linear(16, 32, 0.9, torch.bfloat16)

    by_name = {report.name: report for report in replace_linear(model)}

    assert isinstance(model.a, PackedLinear)
    assert {name: report.replaced for name, report in by_name.items()} == {
        "a": True, "b": False, "c": False, "d": False, "lm_head": False,
    }  # fmt: skip
    assert "less than 30 %" in by_name["b"].why
    assert "Other" in by_name["c"].why
    assert "tied" in by_name["d"].why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_for_a_whole_model_too(dtype: Any) -> None:
    """Each weight within a step of its group, of which float16 has the size; zeros stay zeros."""
    layers = (linear(48, 96, zeros, dtype) for zeros in (0.7, 0.0))
    model = torch.nn.Sequential(*layers, torch.nn.Tanh()).eval()  # type: ignore[arg-type]
    before = copy.deepcopy(model)

    report = replace_linear(model, storage="sparse", min_sparsity=0, weight_format="int8")

    assert [(layer.name, layer.why) for layer in report] == [
        ("0", "packed, q8, sparse"),
        ("1", "packed, q8, sparse"),
    ]
    for packed, original in zip(model[:2], before[:2], strict=True):
        weight, exact = unpacked(packed).weight, original.weight.float()
        step = exact.reshape(48, -1, 32).abs().amax(dim=2, keepdim=True) / 127
        assert bool(((weight - exact).reshape(48, -1, 32).abs() <= 0.57 * step + 1e-6).all())
        assert bool((weight[exact == 0] == 0).all())


def test_a_format_keeps_what_it_cannot_pack() -> None:
    model = torch.nn.Sequential(linear(32, 64, 0.5, torch.bfloat16))

    (layer,) = replace_linear(model, storage="sparse", weight_format="int8", min_sparsity=0.6)

    assert not layer.replaced
    assert isinstance(model[0], torch.nn.Linear)
