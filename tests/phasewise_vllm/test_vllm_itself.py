"""The plugin in the installed vLLM, unmodified: loaded by it, its methods replaced, its products as before.

Needs vLLM for CPUs in this interpreter: `make test-vllm`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

from tests.support import stand_in_vllm  # noqa: E402

BESIDE = """
import os, sys, torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.plugins import load_general_plugins
import vllm.envs

def layer():
    made = torch.nn.Module()
    weight = torch.randn(960, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    made.weight, made.bias = torch.nn.Parameter(weight, requires_grad=False), None
    return made

x, method = torch.randn(9, 576).bfloat16(), UnquantizedLinearMethod()
stock = layer()
exact, size = x.double() @ stock.weight.double().T, x.double().abs() @ stock.weight.double().abs().T
method.process_weights_after_loading(stock)
os.environ["PHASEWISE_VLLM"] = sys.argv[1]
load_general_plugins()
own = layer()
method.process_weights_after_loading(own)
assert hasattr(own, "phasewise_number") and not hasattr(stock, "phasewise_number")
assert vllm.envs.compile_factors()["PHASEWISE_VLLM"].startswith(sys.argv[1])
for each in (stock, own):
    assert (method.apply(each, x).double() - exact).abs().le(float(sys.argv[2]) * size).all()
"""


def test_vllm_has_what_the_plugin_needs() -> None:
    assert stand_in_vllm.broken_promises() == []


def test_vllm_loads_it_and_multiplies_by_it(tmp_path: Path) -> None:
    """Layers that were loaded before stay vLLM's; both are as far from float64 as rounding goes."""
    environment = {name: value for name, value in os.environ.items() if name != "PHASEWISE_VLLM"}
    environment["PHASEWISE_DB"] = str(tmp_path / "none.db")

    subprocess.run(
        [sys.executable, "-c", BESIDE, "native", str(2.0**-8)], env=environment, check=True, timeout=300
    )
