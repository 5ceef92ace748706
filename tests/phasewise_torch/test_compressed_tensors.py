"""Files of `phasewise prune --storage bitmask` are read by the package whose format it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.sparse_compressors.sparse_bitmask import BitmaskTensor  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from phasewise.cython_kernels import packing  # noqa: E402
from phasewise.workflows.prune.run import prune  # noqa: E402
from phasewise.workflows.prune.settings import Pattern, PruneSettings  # noqa: E402
from tests.support.models.tiny_models import write_tiny_hf  # noqa: E402

PARTS = ("shape", "compressed", "bitmask", "row_offsets")


@pytest.mark.parametrize("pattern", [Pattern(0.3), Pattern(0.9), Pattern(0.5, 2, 4)])
def test_the_package_reads_what_we_write(tmp_path: Path, pattern: Pattern) -> None:
    """Every weight, decompressed by it, is that of the dense directory bit for bit."""
    model = str(write_tiny_hf(tmp_path / "m", "llama"))
    tensors = {}
    for storage in ("dense", "bitmask"):
        prune(PruneSettings(model, tmp_path / storage, pattern, storage=storage))  # type: ignore[arg-type]
        tensors[storage] = load_file(str(tmp_path / storage / "model.safetensors"))
    stems = {name.removesuffix(".bitmask") for name in tensors["bitmask"] if name.endswith(".bitmask")}
    assert len(stems) == 14

    for stem in stems:
        parts = {part: tensors["bitmask"][f"{stem}.{part}"] for part in PARTS}
        parts["shape"] = parts["shape"].tolist()
        decompressed = BitmaskTensor(**parts).decompress()
        want = tensors["dense"][stem if stem in tensors["dense"] else f"{stem}.weight"]
        assert np.array_equal(*(packing.to_bf16(x.float().numpy()) for x in (decompressed, want))), stem
