"""Our Wanda beside one written in torch as its authors wrote theirs, over the same activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from phasewise.cython_kernels import packing  # noqa: E402
from phasewise.serving.loaders import load_model, open_source  # noqa: E402
from phasewise.serving.loaders.fetching.resolve import Located  # noqa: E402
from phasewise.workflows.prune import masks  # noqa: E402
from phasewise.workflows.prune.calibration import gather, tapped  # noqa: E402
from phasewise.workflows.prune.directory import bf16_bits  # noqa: E402
from phasewise.workflows.prune.settings import READERS, Pattern  # noqa: E402
from tests.support.models.tiny_models import TinyShape, write_tiny_hf  # noqa: E402

LEAST_EQUAL = 0.999
WINDOWS, TOKENS = 5, 96


class TorchWanda:
    """The mean over windows of the squared norms of inputs, in float32, and a sort of each row's metric."""

    def __init__(self, n_inputs: int) -> None:
        self.squares, self.count = torch.zeros(n_inputs), 0

    def add(self, rows: Any) -> None:
        self.squares *= self.count / (self.count + 1)
        self.count += 1
        self.squares += torch.norm(rows, p=2, dim=0) ** 2 / self.count

    def kept(self, w: Any, pattern: Pattern) -> Any:
        metric = w.abs() * self.squares.sqrt()
        dropped = torch.zeros_like(w, dtype=torch.bool)
        if pattern.is_structured:
            for column in range(0, w.shape[1], pattern.of):
                group = metric[:, column : column + pattern.of]
                smallest = torch.topk(group, pattern.zeros, dim=1, largest=False)[1]
                dropped.scatter_(1, column + smallest, value=True)
        else:
            order = torch.sort(metric, dim=-1, stable=True)[1]
            dropped.scatter_(1, order[:, : int(w.shape[1] * pattern.share)], value=True)
        return ~dropped


@pytest.mark.parametrize("pattern", [Pattern(0.3), Pattern(0.5), Pattern(0.7), Pattern(0.5, 2, 4)])
def test_masks_equal_those_of_torch_over_the_same_activations(tmp_path: Path, pattern: Pattern) -> None:
    """Every linear weight of a small model, its rows taken from our engine window by window."""
    directory = write_tiny_hf(tmp_path / "m", "llama", shape=TinyShape(n_layers=2))
    model = load_model(str(directory), "bf16", tmp_path / "cache")
    rng = np.random.default_rng(0)
    pieces = [[int(i) for i in rng.integers(3, model.config.vocab_size, TOKENS)] for _ in range(WINDOWS)]
    theirs: dict[tuple[int, str], TorchWanda] = {}
    for rows, n in tapped(model, pieces):
        for key, taken in rows.items():
            theirs.setdefault(key, TorchWanda(taken.shape[1])).add(torch.from_numpy(taken[:n].copy()))
    ours = gather(model, pieces, "squares", lambda line: None)

    equal = total = 0
    with open_source(Located("m", directory)) as source:
        for layer in range(model.config.n_layers):
            for name, reader in READERS.items():
                tensor = source.tensors[f"layers.{layer}.{name}"]
                w = packing.from_bf16(bf16_bits(np.asarray(tensor.rows(0, tensor.shape[0]))))
                mine = masks.wanda_mask(w, ours.squares[layer, reader], pattern)
                wanted = theirs[layer, reader].kept(torch.from_numpy(w), pattern).numpy()
                equal, total = equal + int((mine == wanted).sum()), total + mine.size

    assert total > 10_000
    assert equal >= LEAST_EQUAL * total
