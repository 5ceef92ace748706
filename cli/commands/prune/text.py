"""The text that `phasewise prune` prints at its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasewise.workflows.prune.run import Pruned

LABEL_COLUMNS = 22


def pruned_lines(pruned: Pruned) -> Iterator[str]:
    """Labels and values."""
    facts = [
        ("written", str(pruned.out)),
        ("zeros", _share(pruned.pruned_zeros, pruned.pruned_weights, "pruned weights")),
        *([("zeros of all", _of_all(pruned))] if pruned.kept else []),
        ("bf16 dense", f"{pruned.dense_bytes / 1e6:.1f} MB"),
        ("bf16 stored sparse", f"{pruned.sparse_bytes / 1e6:.1f} MB"),
        ("int8 dense", f"{pruned.int8_bytes / 1e6:.1f} MB"),
        ("decode, by bytes", f"at most {pruned.decode_bound:.2f} times as fast as bf16 dense"),
        ("decode on this CPU", _here(pruned)),
    ]
    if pruned.perplexity_before is not None and pruned.perplexity_after is not None:
        change = pruned.perplexity_after / pruned.perplexity_before - 1
        facts += [
            ("perplexity before", f"{pruned.perplexity_before:.3f}"),
            ("perplexity after", f"{pruned.perplexity_after:.3f} ({100 * change:+.1f} %)"),
        ]
    for label, value in facts:
        yield f"{label:<{LABEL_COLUMNS}}{value}"


def _share(zeros: int, weights: int, of: str) -> str:
    return f"{100 * zeros / max(1, weights):.1f} % of {weights / 1e6:.1f} M {of}"


def _of_all(pruned: Pruned) -> str:
    """Less than was asked for, because some weights are kept whole."""
    return f"{_share(pruned.zeros, pruned.weights, 'weights')}: {', '.join(pruned.kept)} kept as is (--skip)"


def _here(pruned: Pruned) -> str:
    """The storage that `--sparse auto` chooses for the zeros."""
    if pruned.read_chosen_bytes == pruned.read_dense_bytes:
        return "as fast as dense: --sparse auto stores dense here"
    return f"at most {pruned.decode_gain_here:.2f} times as fast, as --sparse auto stores them"
