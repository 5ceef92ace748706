"""`phasewise embed`: vectors of texts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from phasewise._options import argument, option
from phasewise.cli.options import ModelArgument
from phasewise.cli.present import note, print_json, read_stdin, say
from phasewise.serving.models.storage_modes import PackMode
from phasewise.workflows.options import FORMAT, PACK, THREADS, VECTOR_ARITHMETIC

if TYPE_CHECKING:
    import numpy.typing as npt


VectorForm = Literal["json", "npy", "csv"]
"""The form in which vectors are written."""
Encoding = Literal["float", "int8", "binary", "ubinary"]
"""Format of a vector's numbers, one of `pooling.PRECISIONS`."""


def embed(
    model: ModelArgument,
    texts: list[str] | None = argument(None, "texts; -: one a line on stdin", "TEXT"),
    file: Path | None = option(None, "read texts from FILE, one a line", metavar="FILE"),
    output: VectorForm = option("json", "form of the vectors on stdout", "-o", "--output"),
    dimensions: int | None = option(
        None, "keep the first N numbers of each vector, with length 1 again", min=1, metavar="N"
    ),
    input_type: str | None = option(
        None,
        "query, document or the name of one of the model's prompts, which is put before each text;"
        " without it the model's default prompt, if it has one",
        metavar="KIND",
    ),
    task: str | None = option(
        None,
        "one of the model's tasks, where it has some: of jina v3 retrieval.query, retrieval.passage,"
        " separation, classification and text-matching",
        metavar="TASK",
    ),
    encoding_format: Encoding = option(
        "float",
        "numbers of vectors: float32; int8, times 127 over the largest magnitude; a bit for each, 1"
        " above 0, in bytes (ubinary), or these less 128 (binary)",
    ),
    truncate: bool = option(False, "cut texts that are too long; else they are an error"),
    weight_format: str = FORMAT("native"),
    pack: PackMode = PACK("keep"),
    arithmetic: Literal["tuned", "canonical"] = VECTOR_ARITHMETIC("tuned"),
    threads: int | None = THREADS(None),
) -> None:
    """Print the vector of each TEXT, computed by an embedding MODEL.

    $ phasewise embed all-minilm-l6-v2 'The cat sat.' 'A dog barked.'
    $ phasewise embed all-minilm-l6-v2 --file texts.txt -o npy > vectors.npy

    The vectors go to stdout: one JSON object, a NumPy file, or a line of
    numbers for each text. MODEL's files say how the vectors of a
    text's tokens become one (modules.json, or GGUF's pooling type).
    """
    from phasewise.workflows.embed.run import in_precision, open_embedder

    inputs = _texts(texts or [], file)
    is_canonical = arithmetic == "canonical"
    with open_embedder(model, weight_format, threads, note, is_canonical=is_canonical, pack=pack) as opened:
        computed, n_tokens = opened.vectors(
            inputs, truncate=truncate, dimensions=dimensions, input_type=input_type, task=task
        )
        vectors = in_precision(computed, encoding_format)
        about = {
            "model": opened.model.name,
            "format": opened.model.format,
            "dimensions": computed.shape[1],
            "encoding_format": encoding_format,
            "prompt_tokens": n_tokens,
        }
        _print_vectors(vectors, output, about)


def _texts(given: list[str], file: Path | None) -> list[str]:
    from phasewise.workflows.embed.run import lines_of, texts_in

    if file is not None:
        if given:
            raise typer.BadParameter("texts come from --file or from the command line, not from both")
        return lines_of(file)
    if given == ["-"]:
        return texts_in(read_stdin(), "stdin")
    if not given:
        raise typer.BadParameter("nothing to embed: give texts, --file, or - to read stdin")
    return given


def _print_vectors(vectors: npt.NDArray[Any], form: VectorForm, about: dict[str, Any]) -> None:
    """Print the vectors in a form. about: fields of the JSON object before the vectors."""
    if form == "npy":
        import numpy as np

        np.save(sys.stdout.buffer, vectors)
        sys.stdout.buffer.flush()
    elif form == "csv":
        for vector in vectors:
            say(",".join(f"{number:.9g}" for number in vector.tolist()))
    else:
        shown = [
            [number if isinstance(number, int) else float(f"{number:.9g}") for number in vector]
            for vector in vectors.tolist()
        ]
        print_json({**about, "vectors": shown})
