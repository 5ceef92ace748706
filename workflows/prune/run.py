"""Prune a model: calibrate, choose what becomes zero, fit the rest again if asked, write a directory, and say
what it gained and lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phasewise._words import counted
from phasewise.cython_kernels import packing
from phasewise.serving.loaders.families.family import HF_LLAMA, HF_OUTSIDE
from phasewise.serving.loaders.source import BF16, INT8
from phasewise.serving.loaders.storage import StorageChoice, bytes_share
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.evaluate.run import read_text
from phasewise.workflows.new_path import new_path
from phasewise.workflows.prune import masks
from phasewise.workflows.prune.calibration import (
    Activations,
    Recovery,
    RecoveryTally,
    gather,
    recover,
    windows,
)
from phasewise.workflows.prune.directory import (
    Tensor,
    bf16_bits,
    bitmask_tensors,
    check_family,
    write_tensors,
    write_texts,
)
from phasewise.workflows.prune.settings import EMBEDDINGS, READERS, PruneSettings
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.loaders.source import ModelSource, SourceTensor

Array = npt.NDArray[Any]
Change = Callable[[str, Array], Array]
"""Maps a weight's name and values, float32 [n, k], to the pruned values."""

EVALUATION_TOKENS = 20480
TENSORS_FILE = "model.safetensors"


@dataclass
class Pruned:
    """The result of pruning, added up while tensors are written. Bytes are those of all weights in memory."""

    out: Path
    zeros: int = 0
    weights: int = 0
    pruned_zeros: int = 0
    """Zeros among the weights that were pruned, which are all but those of `kept`."""
    pruned_weights: int = 0
    kept: tuple[str, ...] = ()
    """Names of the model's weights that were left as they are."""
    dense_bytes: int = 0
    sparse_bytes: int = 0
    int8_bytes: int = 0
    read_dense_bytes: int = 0
    """Bytes of the weights that a token of decoding reads, stored dense."""
    read_sparse_bytes: int = 0
    read_chosen_bytes: int = 0
    """Bytes of the weights that a token of decoding reads, stored by `--sparse auto` on this CPU."""
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    recovery: Recovery | None = None
    """Fitting of the values that pruning left; None: they were not fitted."""

    def add(self, bits: Array, is_read: bool, is_pruned: bool) -> None:
        """Count a tensor of bf16 bits."""
        n, k = bits.shape
        kept = int(np.count_nonzero(bits))
        density = kept / bits.size
        share = bytes_share(BF16, n, k, density)
        dense, least = BF16.nbytes(n, k), min(1.0, share)
        self.zeros += bits.size - kept
        self.weights += bits.size
        self.pruned_zeros += bits.size - kept if is_pruned else 0
        self.pruned_weights += bits.size if is_pruned else 0
        self.dense_bytes += dense
        self.sparse_bytes += int(dense * least)
        self.int8_bytes += INT8.nbytes(n, k)
        self.read_dense_bytes += dense if is_read else 0
        self.read_sparse_bytes += int(dense * least) if is_read else 0
        chosen = share if StorageChoice().is_sparse(BF16, n, k, kept) else 1.0
        self.read_chosen_bytes += int(dense * chosen) if is_read else 0

    @property
    def decode_bound(self) -> float:
        """Largest speed-up of decoding, reached where memory bandwidth alone limits it."""
        return self.read_dense_bytes / self.read_sparse_bytes

    @property
    def decode_gain_here(self) -> float:
        """Largest speed-up of decoding with the storage that `--sparse auto` chooses on this CPU."""
        return self.read_dense_bytes / self.read_chosen_bytes


def prune(settings: PruneSettings, report: Report = silent, progress: Report = silent) -> Pruned:
    """Write the directory and return what it holds. Raises WorkflowError, UsageError, ModelError.

    `progress` gets a line for each tensor and for each window of a text.
    """
    from phasewise.serving.loaders import open_source
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate

    located = locate(settings.model, cache_root(), report)
    with open_source(located) as source, new_path(settings.out) as directory:
        check_family(source)
        activations = _calibrate(settings, report, progress)
        sparsity = _sparsity_config(settings) if settings.storage == "bitmask" else None
        write_texts(source, directory, sparsity)
        change = _pruning(settings, activations)
        pruned = _write(settings, source, change, directory / TENSORS_FILE, progress, "pruning")
        if settings.recover:
            assert activations is not None
            between = _perplexity_of_values_left(settings, directory, report, progress)
            pruned, recovery = _recover(settings, source, directory, activations, progress)
            pruned.recovery = replace(recovery, perplexity_pruned=between)
    if settings.evaluation is not None:
        pruned.perplexity_before = _perplexity(settings.model, settings.evaluation, report, progress)
        pruned.perplexity_after = _perplexity(str(settings.out), settings.evaluation, report, progress)
    return pruned


def _calibrate(settings: PruneSettings, report: Report, progress: Report) -> Activations | None:
    if settings.calibration is None or not settings.reads_inputs:
        return None
    from phasewise.serving.loaders import load_model

    model = load_model(settings.model, "bf16", report=report, storage=StorageChoice("never"))
    pieces = windows(model, read_text(settings.calibration), settings.calibration_tokens)
    needs_hessians = settings.method == "sparsegpt" or settings.recover
    return gather(model, pieces, "hessian" if needs_hessians else "squares", progress)


def _recover(
    settings: PruneSettings, source: ModelSource, directory: Path, activations: Activations, progress: Report
) -> tuple[Pruned, Recovery]:
    """Fit the weights that pruning left in the directory's file, and replace the file."""
    from phasewise.serving.loaders import open_source
    from phasewise.serving.loaders.fetching.resolve import Located

    tally, recovered = RecoveryTally(), directory / f"recovered-{TENSORS_FILE}"
    with open_source(Located(source.name, directory)) as left:

        def fitted(name: str, w: Array) -> Array:
            values = _bf16(left.tensors[name])
            if name.rpartition(".")[2] in EMBEDDINGS:
                return values  # whose rows are looked up, or whose inputs are not those of a layer
            values, n_steps, error = recover(w, values, activations.hessians[_inputs_of(name)])
            tally.add(n_steps, error)
            return values

        pruned = _write(settings, source, fitted, recovered, progress, "recovering")
    recovered.replace(directory / TENSORS_FILE)
    return pruned, tally.recovery()


def _bf16(tensor: SourceTensor) -> Array:
    """All rows of a tensor, rounded to bf16, as float32 [n, k]."""
    rows = packing.numbers(tensor.rows(0, tensor.shape[0]))
    values: Array = packing.from_bf16(bf16_bits(rows))
    return values


def _sparsity_config(settings: PruneSettings) -> Mapping[str, Any]:
    return {
        "format": "sparse-bitmask",
        "sparsity_structure": str(settings.pattern) if settings.pattern.is_structured else "unstructured",
        "global_sparsity": settings.pattern.share,
        "targets": ["Linear"],
        "ignore": [name for name in settings.skip if name == "lm_head"],
    }


def _pruning(settings: PruneSettings, activations: Activations | None) -> Change:
    """The function that prunes a weight by the settings' method."""

    pattern, method = settings.pattern, settings.method

    def change(name: str, w: Array) -> Array:
        if name.rpartition(".")[2] in EMBEDDINGS:
            return np.where(masks.magnitude_mask(w, pattern), w, np.float32(0))
        key, n_inputs = _inputs_of(name), w.shape[1]
        if pattern.is_structured and n_inputs % pattern.of:
            raise WorkflowError(
                f"a weight of {counted(n_inputs, 'input')} is not whole groups of {pattern.of}"
            )
        if method == "magnitude" or activations is None:
            return np.where(masks.magnitude_mask(w, pattern), w, np.float32(0))
        if method == "wanda":
            return np.where(masks.wanda_mask(w, activations.squares[key], pattern), w, np.float32(0))
        return masks.sparsegpt(w, activations.hessians[key], pattern)

    return change


def _layer_of(name: str) -> tuple[int, str]:
    """Split a name: ("layers.3.q") is (3, "q")."""
    _, layer, weight = name.split(".")
    return int(layer), weight


def _inputs_of(name: str) -> tuple[int, str]:
    """The key of the inputs of a layer's weight among `Activations`."""
    layer, weight = _layer_of(name)
    return layer, READERS[weight]


def _write(
    settings: PruneSettings, source: ModelSource, change: Change, path: Path, progress: Report, doing: str
) -> Pruned:
    """Write the file of tensors. One weight at a time is in memory as float32."""
    names = {name.rpartition(".")[2] for name in source.tensors}
    pruned = Pruned(settings.out, kept=tuple(name for name in settings.skip if name in names))
    tied = source.config.tied_embeddings

    def tensors() -> Iterator[Tensor]:
        for number, (name, tensor) in enumerate(_in_order(source)):
            theirs = theirs_of(name)
            if len(tensor.shape) == 1:
                rows = tensor.rows(0, 1)
                assert isinstance(rows, np.ndarray)
                yield Tensor(theirs, "F32", rows.reshape(-1).astype(np.float32))
                continue
            w = _bf16(tensor)
            weight = name.rpartition(".")[2]
            if weight not in settings.skip:
                w = change(name, w)
            bits = bf16_bits(w)
            pruned.add(bits, is_read=name != "embed" or tied, is_pruned=weight not in settings.skip)
            if settings.storage == "bitmask" and weight not in EMBEDDINGS:
                yield from bitmask_tensors(theirs, bits)
            else:
                yield Tensor(theirs, "BF16", bits)
            progress(f"{doing}: {number + 1} of {counted(len(source.tensors), 'tensor')}")

    write_tensors(path, tensors(), 4 * len(source.tensors))
    return pruned


def _in_order(source: ModelSource) -> Iterator[tuple[str, SourceTensor]]:
    """Tensors sorted by layer, so that the same model gives the same file whatever it was read from."""

    def place(name: str) -> tuple[int, str]:
        return (_layer_of(name)[0], name) if name.startswith("layers.") else (-1, name)

    yield from sorted(source.tensors.items(), key=lambda item: place(item[0]))


def theirs_of(ours: str) -> str:
    """Map our name of a tensor to the name in a Hugging Face directory of a plain family."""
    if not ours.startswith("layers."):
        return _GLOBAL[ours]
    layer, name = _layer_of(ours)
    return f"model.layers.{layer}.{_LAYER[name]}"


_GLOBAL = {ours: theirs for theirs, ours in HF_OUTSIDE.items()}
_LAYER = {ours: theirs for theirs, ours in HF_LLAMA.items()}


def _perplexity_of_values_left(
    settings: PruneSettings, directory: Path, report: Report, progress: Report
) -> float | None:
    """Perplexity of the directory before its weights are fitted; nothing of it stays in the cache."""
    from phasewise.serving.loaders import inspection
    from phasewise.serving.loaders.fetching.resolve import cache_root

    if settings.evaluation is None:
        return None
    value = _perplexity(str(directory), settings.evaluation, report, progress, "the pruned model")
    inspection.remove(str(directory), cache_root(), packed_only=True)
    return value


def _perplexity(
    model: str, text: Path, report: Report, progress: Report, told_as: str | None = None
) -> float:
    """Perplexity of a model as bf16 over the first tokens of a text, in windows that do not overlap.

    told_as: the model's name in progress lines; None: its own name.
    """
    from phasewise.workflows.evaluate.figures import perplexity
    from phasewise.workflows.evaluate.run import Chunk, Scorer, losses_of
    from phasewise.workflows.opening.kept_cores import KeptCores
    from phasewise.workflows.opening.open_model import open_model
    from phasewise.workflows.opening.settings import Weights

    opened, cores = open_model(model, Weights("bf16"), report=report), KeptCores(report)
    pieces = windows(opened.model, read_text(text), EVALUATION_TOKENS)
    losses = []
    with Scorer(opened, max(map(len, pieces))) as scorer:
        chunks = [Chunk(piece) for piece in pieces if len(piece) > 1]
        for number, piece_losses in enumerate(cores.between(losses_of(scorer, chunks)), 1):
            losses.append(piece_losses)
            progress(
                f"perplexity of {told_as or opened.model.name}: {number} of {counted(len(chunks), 'window')}"
            )
    return perplexity(np.concatenate(losses)).value
