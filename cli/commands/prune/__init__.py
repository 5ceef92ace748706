"""`phasewise prune`: set a share of a model's weights to zero."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from phasewise.cli.options import JsonOption, ModelArgument
from phasewise.cli.present import print_json, say

Method = Literal["magnitude", "wanda", "sparsegpt"]
"""The method that chooses weights."""


Allocation = Literal["uniform", "owl"]
"""The division of the zeros between layers."""


Storage = Literal["dense", "bitmask"]
"""The storage of weights in the file."""


def prune(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIRECTORY", help="directory to write; new")],
    sparsity: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="share of the pruned weights that become zero, or 2:4: two of every four"
        ),
    ] = "0.5",
    method: Annotated[Method, typer.Option(help="how weights are chosen")] = "magnitude",
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="text whose activations weigh the weights: wanda, sparsegpt, owl and --recover",
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=64, help="tokens of the calibration text")] = 16384,
    allocation: Annotated[
        Allocation, typer.Option(help="uniform: every layer alike; owl: layers with outliers keep more")
    ] = "uniform",
    skip: Annotated[
        str, typer.Option(metavar="NAMES", help="weights left as they are, with commas between")
    ] = "embed,lm_head",
    storage: Annotated[
        Storage,
        typer.Option(help="dense, or bitmask: compressed-tensors' sparse-bitmask"),
    ] = "dense",
    evaluation: Annotated[
        Path | None, typer.Option("--eval", metavar="FILE", help="text to measure the perplexity on")
    ] = None,
    recover: Annotated[
        bool,
        typer.Option(
            "--recover",
            help="fit the weights that are kept to what each layer computed before, over the text",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Set a share of MODEL's weights to zero and write a Hugging Face directory.

    $ phasewise prune smollm2-135m-instruct -o pruned --sparsity 0.6
    $ phasewise prune model -o pruned --method wanda --calibration text.txt

    The weights of its linear layers are read as bf16. The directory appears
    when it is whole; the same arguments give the same bytes.
    """
    from phasewise.cli.commands.prune.text import pruned_lines
    from phasewise.cli.status_line import status_line
    from phasewise.workflows.prune.run import PruneSettings, parse_pattern
    from phasewise.workflows.prune.run import prune as run

    settings = PruneSettings(
        model=model,
        out=out,
        pattern=parse_pattern(sparsity),
        method=method,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        allocation=allocation,
        skip=tuple(name for name in skip.split(",") if name),
        storage=storage,
        evaluation=evaluation,
        recover=recover,
    )
    with status_line() as status:
        pruned = run(settings, status.say, lambda line: status.show(lambda: line))
    if as_json:
        gains = {"decode_bound": pruned.decode_bound, "decode_gain_here": pruned.decode_gain_here}
        print_json({**asdict(pruned), "out": str(pruned.out), **gains})
        return
    for line in pruned_lines(pruned):
        say(line)
