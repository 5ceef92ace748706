"""`phasewise prune`: set a share of a model's weights to zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise._options import REQUIRED, option
from phasewise._words import counted
from phasewise.cli.options import JsonOption, ModelArgument
from phasewise.cli.tables import present
from phasewise.workflows.prune.settings import PruneSettings, parse_pattern

if TYPE_CHECKING:
    from phasewise.workflows.prune.run import Pruned


def prune(
    *,
    model: ModelArgument,
    out: Path = option(REQUIRED, "directory to write; new", "-o", "--out", metavar="DIRECTORY"),
    settings: PruneSettings,
    sparsity: str = option(
        "0.5", "share of the pruned weights that become zero, or 2:4: two of every four", metavar="SHARE"
    ),
    as_json: JsonOption = False,
) -> None:
    """Set a share of MODEL's weights to zero and write a Hugging Face directory.

    $ phasewise prune smollm2-135m-instruct -o pruned --sparsity 0.6
    $ phasewise prune model -o pruned --method wanda --calibration text.txt

    The weights of its linear layers are read as bf16. The directory appears
    when it is whole; the same arguments give the same bytes.
    """
    from phasewise.cli.status_line import status_line
    from phasewise.workflows.prune.run import prune as run

    settings = replace(settings, model=model, out=out, pattern=parse_pattern(sparsity))
    with status_line() as status:
        pruned = run(settings, status.say, lambda line: status.show(lambda: line))
    gains = {"decode_bound": pruned.decode_bound, "decode_gain_here": pruned.decode_gain_here}
    present(as_json, {**vars(pruned), **gains}, pruned_lines(pruned))


LABEL_COLUMNS = 22


def pruned_lines(pruned: Pruned) -> Iterator[str]:
    """Lines of a label and a figure each."""
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
    if pruned.recovery is not None:
        before, after = pruned.recovery.output_error_pruned, pruned.recovery.output_error_recovered
        shares = f"{100 * before:.1f} %, recovered {100 * after:.1f} %"
        weights = counted(pruned.recovery.n_weights, "weight")
        facts += [("outputs differ by", f"{shares} (mean of {weights})")]
    if pruned.perplexity_before is not None and pruned.perplexity_after is not None:
        before = pruned.perplexity_before
        facts += [("perplexity before", f"{before:.3f}")]
        if pruned.recovery is not None and pruned.recovery.perplexity_pruned is not None:
            facts += [("perplexity pruned", _worse(pruned.recovery.perplexity_pruned, before))]
        facts += [("perplexity after", _worse(pruned.perplexity_after, before))]
    for label, value in facts:
        yield f"{label:<{LABEL_COLUMNS}}{value}"


def _worse(perplexity: float, before: float) -> str:
    return f"{perplexity:.3f} ({100 * (perplexity / before - 1):+.1f} %)"


def _share(zeros: int, weights: int, of: str) -> str:
    return f"{100 * zeros / max(1, weights):.1f} % of {weights / 1e6:.1f} M {of}"


def _of_all(pruned: Pruned) -> str:
    """Share of zeros among all weights in words: less than asked for, since some weights are kept whole."""
    return f"{_share(pruned.zeros, pruned.weights, 'weights')}: {', '.join(pruned.kept)} kept as is (--skip)"


def _here(pruned: Pruned) -> str:
    """The storage in words that `--sparse auto` chooses for the zeros on this machine."""
    if pruned.read_chosen_bytes == pruned.read_dense_bytes:
        return "as fast as dense: --sparse auto stores dense here"
    return f"at most {pruned.decode_gain_here:.2f} times as fast, as --sparse auto stores them"
