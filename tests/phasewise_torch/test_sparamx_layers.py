"""The benchmark of SparAMX's layers, with layers that stand in for theirs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.peers import sparamx_layers  # noqa: E402

N, K = 64, 32


class Dense(torch.nn.Linear):  # type: ignore[misc]
    """Multiplies rows of two dimensions, as theirs."""

    @classmethod
    def from_linear(cls, linear: Any) -> Any:
        layer = cls(K, N, bias=False, dtype=torch.bfloat16)
        layer.load_state_dict(linear.state_dict())
        return layer

    def forward(self, x: Any) -> Any:
        assert x.ndim == 2
        return super().forward(x)


class Sparse(torch.nn.Module):  # type: ignore[misc]
    """Multiplies rows of three dimensions, and keeps a bitmap and the values that are no zeros, as theirs."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        kept = weight != 0
        self.weight_metadata = torch.zeros(N * K // 32, dtype=torch.int32)
        self.weight_values = weight[kept]
        self._kept = kept

    @classmethod
    def from_linear(cls, linear: Any, num_threads: int) -> Any:
        assert num_threads == 2
        return cls(linear.weight.data)

    def forward(self, x: Any) -> Any:
        assert x.ndim == 3
        weight = torch.zeros(N, K, dtype=torch.bfloat16)
        weight[self._kept] = self.weight_values
        return torch.nn.functional.linear(x, weight)


class Wrong(Sparse):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 1.02


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sparamx_layers.SHAPES, "q_proj", (N, K))
    monkeypatch.setattr(sparamx_layers, "COLD_BYTES", 4 * N * K)


def lines(sparse: Any) -> list[str]:
    options = sparamx_layers.options_of(["CHECKOUT", "--rows", "1,16", "--rounds", "1"])
    with torch.no_grad():
        return list(sparamx_layers.figures("q_proj", (Dense, sparse), options))


def test_every_layer_has_a_line_for_each_number_of_rows() -> None:
    told = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines(Sparse)]

    whats = ("torch bf16", "SparAMX dense", "SparAMX sparse")
    assert told == [["q_proj", rows, what] for rows in ("1", "16") for what in whats]


def test_a_layer_whose_results_are_off_is_not_timed() -> None:
    with pytest.raises(SystemExit, match=r"^SparAMX sparse: results are [^\n]* off"):
        lines(Wrong)
