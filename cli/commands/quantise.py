"""`phasewise quantise`: a model's weights in fewer bits, as a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise._options import REQUIRED, option
from phasewise._words import counted, percent
from phasewise.cli.options import JsonOption, ModelArgument
from phasewise.cli.present import on_one_line
from phasewise.cli.status_line import status_line
from phasewise.cli.tables import present
from phasewise.workflows.quantise.settings import QuantiseSettings

if TYPE_CHECKING:
    from phasewise.workflows.quantise.run import Quantised


def quantise(
    *,
    model: ModelArgument,
    out: Path = option(REQUIRED, "GGUF file to write; new", "-o", "--out", metavar="FILE"),
    settings: QuantiseSettings,
    as_json: JsonOption = False,
) -> None:
    """Write the weights of MODEL, a GGUF file, in fewer bits as llama.cpp rounds them.

    $ phasewise quantise model.F16.gguf -o model.Q8_0.gguf
    $ phasewise quantise model.F16.gguf -o model.Q4_0.gguf --format q4_0

    MODEL is in F32, F16 or BF16. The file appears when it is whole and has
    been read back; the same arguments give the same bytes. K-quants are
    written by llama.cpp's llama-quantize. What a format costs: phasewise eval
    FILE --against MODEL.
    """
    from phasewise.workflows.quantise.run import quantise as run

    settings = replace(settings, model=model, out=out)
    with status_line() as status:
        quantised = run(settings, status.say, lambda line: status.show(lambda: line))
    present(as_json, vars(quantised), quantised_lines(quantised))


def quantised_lines(quantised: Quantised) -> Iterator[str]:
    """Lines about the written file, and about each tensor type in it."""
    bits = 8 * quantised.n_bytes / quantised.weights
    yield f"{on_one_line(quantised.out)}: {quantised.n_bytes / 1e6:.1f} MB, {bits:.2f} bits a weight"
    for kind in quantised.types:
        error = f", error {percent(kind.relative_error, 3)}" if kind.relative_error else ""
        tensors = counted(kind.tensors, "tensor")
        yield f"  {kind.type_name:<6}{tensors}, {kind.weights / 1e6:.2f} M weights{error}"
