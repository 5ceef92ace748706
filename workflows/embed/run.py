"""Opens an embedding model for this machine, and reads the texts to embed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise._files import read_input
from phasewise._words import reason_of
from phasewise.serving.embedding.encoder.embedder import Embedder
from phasewise.serving.embedding.encoder.input_tokens import EncoderText, Text
from phasewise.serving.embedding.encoder.pooling import PRECISIONS, Precision, check_numbers, truncated
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.storage_modes import PackMode
from phasewise.topology import read_machine
from phasewise.tuner.plans import default_plan
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.report import Report, silent

BATCH_INPUTS = 512
MAX_TEXT_BYTES = 256 << 20


@dataclass(frozen=True)
class OpenEmbedder:
    """An embedding model in memory, on cores of this process."""

    model: PackedModel
    text: EncoderText
    embedder: Embedder

    def vectors(
        self,
        texts: Sequence[Text],
        *,
        truncate: bool = False,
        dimensions: int | None = None,
        input_type: str | None = None,
        task: str | None = None,
    ) -> tuple[npt.NDArray[np.float32], int]:
        """Embed texts: float32 [texts, dimensions] in the texts' order, and the number of tokens.

        truncate: texts that are too long lose their end, else ContextLengthExceeded. dimensions: length to
        which vectors are cut, then scaled to norm 1. input_type: "query", "document" or one of the model's
        prompts, which is put before each text; None: the default prompt. task: one of the model's tasks, in
        place of input_type. Raises WorkflowError where the model has fewer dimensions or no such prompt or
        task, and for a cross-encoder; StepFailed where values are not numbers.
        """
        if self.model.config.scores:
            raise WorkflowError(
                f"{self.model.name} scores pairs of texts and makes no vectors: `phasewise serve` it and ask"
                " /v1/rerank"
            )
        width = self.model.config.vector_width
        if dimensions is not None and dimensions > width:
            raise WorkflowError(
                f"{self.model.name} makes vectors of {width} numbers; {dimensions} are too many"
            )
        if input_type is not None and task is not None:
            raise WorkflowError("an input type and a task say the same: give one of them")
        try:
            self.text.kind_of(input_type, task)
        except ValueError as error:
            raise WorkflowError(str(error)) from error
        runs, n_tokens = [], 0
        for start in range(0, len(texts), BATCH_INPUTS):
            batch = texts[start : start + BATCH_INPUTS]
            tokens = self.text.tokens(batch, truncate=truncate, input_type=input_type, task=task)
            runs.append(self.embedder.embed(tokens))
            n_tokens += sum(len(input_tokens.ids) for input_tokens in tokens)
        whole = np.concatenate(runs)
        check_numbers(whole)
        if dimensions is not None:
            whole = np.stack([truncated(vector, dimensions) for vector in whole])
        return whole, n_tokens


@contextmanager
def open_embedder(
    ref: str,
    weight_format: str = "native",
    threads: int | None = None,
    report: Report = silent,
    *,
    is_canonical: bool = False,
    pack: PackMode = "keep",
) -> Iterator[OpenEmbedder]:
    """Load an embedding model and start its threads. ModelError for any other model, PlanError, RanksError.

    threads: cores to use; None: all cores of the node that the default prefill plan names. is_canonical: the
    vectors have the same bits on every CPU. pack: as for `load_model`.
    """
    model = load_model(ref, weight_format, report=report, pack=pack)
    plan = default_plan(read_machine(), "prefill", threads)
    cores = [core for rank in plan.ranks for core in rank.cores]
    with closing(Embedder(model, cores, is_canonical=is_canonical)) as embedder:
        yield OpenEmbedder(model, EncoderText(model), embedder)


def in_precision(vectors: npt.NDArray[np.float32], precision: Precision) -> npt.NDArray[Any]:
    """Convert vectors to a precision of `pooling.PRECISIONS`, whose numbers take fewer bits."""
    return np.stack([PRECISIONS[precision](vector) for vector in vectors])


def lines_of(path: Path) -> list[str]:
    """Read one text a line. WorkflowError where the file cannot be read, is not UTF-8 or has no line."""
    try:
        text = read_input(path, MAX_TEXT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkflowError(f"{path} cannot be read: {reason_of(error)}") from error
    return texts_in(text, str(path))


def texts_in(text: str, what: str) -> list[str]:
    """The lines of a text without their ends. WorkflowError for none."""
    lines = text.splitlines()
    if not lines:
        raise WorkflowError(f"{what} has no line to embed")
    return lines
