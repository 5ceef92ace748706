"""Our numbers of quantised checkpoints are those of the packages whose formats they are, bit for bit.

A package computes in the type of its scales. Ours are the same products in float32: equal where it has
float32 scales, and else equal once rounded to its type.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from phasewise.cython_kernels.packing import unpack  # noqa: E402
from phasewise.serving.loaders import load_model  # noqa: E402
from tests.support.models.quantised_models import CASES, write_quantised_hf  # noqa: E402

STEM, OURS = "model.layers.0.mlp.down_proj.", "layers.0.down"


def parts_and_ours(folder: Path, name: str) -> tuple[dict[str, Any], Any]:
    write_quantised_hf(folder / "m", CASES[name])
    tensors = load_file(str(folder / "m" / "model.safetensors"))
    parts = {key.removeprefix(STEM): value for key, value in tensors.items() if key.startswith(STEM)}
    return parts, torch.from_numpy(unpack(load_model(str(folder / "m"), "native", folder).weights[OURS]))


def decompressed(parts: dict[str, Any], config: dict[str, Any]) -> Any:
    """By the package's own class for the format, of this release or of those before it had schemes there."""
    (group,) = config["config_groups"].values()
    arguments = QuantizationArgs(**group["weights"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    if hasattr(compressor, "decompress_weight"):
        return compressor().decompress_weight(compressed_data=parts, quantization_args=arguments)
    return compressor.decompress(parts, QuantizationScheme(targets=["Linear"], weights=arguments))["weight"]


OLDER = [
    "w4a16", "w4a16-bf16", "w4a16-f32", "w4a16-channel", "w8a16", "w8a8", "w8a8-zeros", "fp8", "fp8-channel",
    "fp8-power",
]  # fmt: skip
NEWER = ["w4a16-zeros", "w4a16-zeros-f32", "w3a16", "fp8-block", "nvfp4", "mxfp4"]


@pytest.mark.parametrize("name", [*OLDER, *NEWER])
def test_compressed_tensors_gives_our_numbers(tmp_path: Path, name: str) -> None:
    if name in NEWER and hasattr(BaseCompressor, "decompress_weight"):
        pytest.skip("this release of compressed_tensors does not read it")
    parts, ours = parts_and_ours(tmp_path, name)
    theirs = decompressed(parts, dict(CASES[name].config["quantization_config"]))
    assert torch.equal(ours.to(theirs.dtype), theirs)


def test_autoawq_gives_our_numbers(tmp_path: Path) -> None:
    """By `awq/utils/packing_utils.py`, which needs torch alone."""
    awq_spec = importlib.util.find_spec("awq")
    if awq_spec is None or not awq_spec.submodule_search_locations:
        pytest.skip("could not import 'awq'")
    source = Path(next(iter(awq_spec.submodule_search_locations))) / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("awq_packing", source)
    assert spec is not None
    assert spec.loader is not None
    awq = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(awq)
    parts, ours = parts_and_ours(tmp_path, "awq")

    halves = awq.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, 64)
    singles = awq.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, 64)

    assert torch.equal(ours, singles.T)
    assert torch.equal(ours.half(), halves.T)


@pytest.mark.parametrize("name", ["gptq", "gptq-zeros", "gptq-v2", "gptq-act-order", "gptq-8", "gptq-2"])
def test_gptq_s_published_formula_gives_our_numbers(tmp_path: Path, name: str) -> None:
    """As gptqmodel and auto-gptq unpack it: scales[g_idx] * (weight - zeros[g_idx])."""
    parts, ours = parts_and_ours(tmp_path, name)
    bits = CASES[name].config["quantization_config"]["bits"]
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    last = (1 << bits) - 1
    zeros = (parts["qzeros"].unsqueeze(2) >> shifts) & last
    zeros = (zeros + (0 if name == "gptq-v2" else 1)).reshape(parts["scales"].shape)
    codes = ((parts["qweight"].unsqueeze(1) >> shifts.unsqueeze(-1)) & last).reshape(
        -1, parts["qweight"].shape[1]
    )
    order = parts["g_idx"].long()

    theirs = parts["scales"].float()[order] * (codes - zeros[order])
    halves = parts["scales"][order] * (codes - zeros[order])

    assert torch.equal(ours, theirs.T)
    assert torch.equal(ours.half(), halves.half().T)
