"""A model's weights as bytes with a scale for each output: compressed-tensors' W8A8, `int-quantized`.

    python benchmarks/w8a8_directory.py 1b-BF16.gguf DIRECTORY

For speed: values are rounded to nearest by the largest of a row, with no calibration. The embedding and the
head stay bf16. `phasewise bench run DIRECTORY` rounds rows to bytes as they come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Argument

from benchmarks.harness import Yielded, commands
from phasewise.cython_kernels.blocks import BlockRows
from phasewise.cython_kernels.packing import dequantise, to_bf16, widened
from phasewise.serving.loaders import open_source
from phasewise.serving.loaders.fetching.resolve import cache_root, locate
from phasewise.serving.loaders.source import ModelSource, SourceTensor
from phasewise.workflows.new_path import new_path
from phasewise.workflows.prune.directory import (
    Tensor,
    check_family,
    write_tensors,
    write_texts,
)
from phasewise.workflows.prune.run import TENSORS_FILE, theirs_of
from phasewise.workflows.prune.settings import EMBEDDINGS

BYTES = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**BYTES, "strategy": "channel"},
            "input_activations": {**BYTES, "strategy": "token", "dynamic": True},
        }
    },
}


def floats_of(tensor: SourceTensor) -> np.ndarray:
    """All rows as float32."""
    rows = tensor.rows(0, tensor.shape[0] if len(tensor.shape) > 1 else 1)
    if not isinstance(rows, np.ndarray):
        rows = dequantise(widened(rows) if isinstance(rows, BlockRows) else rows)
    return np.asarray(rows, np.float32)


def tensors_of(source: ModelSource) -> Iterator[Tensor]:
    for name, tensor in source.tensors.items():
        theirs, values = theirs_of(name), floats_of(tensor)
        if len(tensor.shape) == 1:
            yield Tensor(theirs, "F32", values.reshape(-1))
        elif name.rpartition(".")[2] in EMBEDDINGS:
            yield Tensor(theirs, "BF16", to_bf16(values))
        else:
            largest = np.abs(values).max(axis=1, keepdims=True)
            scales = np.maximum(largest, np.float32(1e-30)) / np.float32(127)
            yield Tensor(theirs, "I8", np.rint(values / scales).astype(np.int8))
            yield Tensor(f"{theirs}_scale", "F32", scales)


def w8a8_directory(model: Annotated[str, Argument()], out: Annotated[Path, Argument()]) -> Yielded:
    located = locate(model, cache_root(), lambda _: None)
    with open_source(located) as source, new_path(out) as directory:
        check_family(source)
        write_texts(source, directory, None)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISATION}))
        write_tensors(directory / TENSORS_FILE, tensors_of(source), 2 * len(source.tensors))
    yield f"{out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e9:.2f} GB"


app = commands(__doc__, w8a8_directory)

if __name__ == "__main__":
    app()
