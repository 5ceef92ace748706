"""The text that `phasewise prune` prints at its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasewise.workflows.prune.run import Pruned

LABEL_COLUMNS = 22


def pruned_lines(found: Pruned) -> Iterator[str]:
    """Labels and values."""
    facts = [
        ("written", str(found.out)),
        ("zeros", _share(found.pruned_zeros, found.pruned_weights, "pruned weights")),
        *([("zeros of all", _of_all(found))] if found.kept else []),
        ("bf16 dense", f"{found.dense_bytes / 1e6:.1f} MB"),
        ("bf16 stored sparse", f"{found.sparse_bytes / 1e6:.1f} MB"),
        ("int8 dense", f"{found.int8_bytes / 1e6:.1f} MB"),
        ("decode, by bytes", f"at most {found.decode_bound:.2f} times as fast as bf16 dense"),
        ("decode on this CPU", _here(found)),
    ]
    if found.perplexity_before is not None and found.perplexity_after is not None:
        change = found.perplexity_after / found.perplexity_before - 1
        facts += [
            ("perplexity before", f"{found.perplexity_before:.3f}"),
            ("perplexity after", f"{found.perplexity_after:.3f} ({100 * change:+.1f} %)"),
        ]
    for label, value in facts:
        yield f"{label:<{LABEL_COLUMNS}}{value}"


def _share(zeros: int, weights: int, of: str) -> str:
    return f"{100 * zeros / max(1, weights):.1f} % of {weights / 1e6:.1f} M {of}"


def _of_all(found: Pruned) -> str:
    """Less than was asked for, because some weights are kept whole."""
    return f"{_share(found.zeros, found.weights, 'weights')}: {', '.join(found.kept)} kept as is (--skip)"


def _here(found: Pruned) -> str:
    """The storage that `--sparse auto` chooses for the zeros."""
    if found.read_chosen_bytes == found.read_dense_bytes:
        return "as fast as dense: --sparse auto stores dense here"
    return f"at most {found.decode_gain_here:.2f} times as fast, as --sparse auto stores them"
