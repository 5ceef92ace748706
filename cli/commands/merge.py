"""`phasewise merge`: an adapter's numbers in the model's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from phasewise._words import counted
from phasewise.cli.options import JsonOption, ModelArgument
from phasewise.cli.present import note, print_json, say

Dtype = Literal["f32", "bf16"]
"""The type of the numbers in the file."""


def merge(
    model: ModelArgument,
    lora: Annotated[
        str,
        typer.Option("--lora", metavar="PATH", help="the adapter (LoRA): PEFT's directory or a GGUF file"),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIRECTORY", help="directory to write; new")],
    dtype: Annotated[Dtype, typer.Option(help="type of the numbers in the file")] = "bf16",
    as_json: JsonOption = False,
) -> None:
    """Merge an adapter into MODEL and write a Hugging Face directory.

    $ phasewise merge model --lora adapter -o merged
    $ phasewise merge org/name --lora adapter.gguf -o merged --dtype f32

    MODEL is a Hugging Face directory or a hub name; a GGUF file is refused,
    because its weights are rounded already. Each weight is W + scale B A,
    rounded once. To serve an adapter no merging is needed: serve --lora.
    """
    from phasewise.workflows.merge.run import merge as run

    merged = run(model, lora, out, dtype, note)
    if as_json:
        print_json({"out": str(merged.out), "changed": merged.n_changed, "tensors": merged.n_tensors})
    else:
        changed = counted(merged.n_changed, "weight")
        say(f"{merged.out}: {changed} changed, {counted(merged.n_tensors, 'tensor')} written")
