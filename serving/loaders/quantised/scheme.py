"""`quantization_config` of config.json, and GPTQ's `quantize_config.json`: read as hostile input, all of it
or none; and the tensors that one quantised weight is made of: found by the ends of their names, checked, and
read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phasewise._safetensors import TensorEntry
from phasewise.cython_kernels.packing import Array, from_bf16
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.source import SourceFile

Method = Literal["compressed-tensors", "awq", "gptq", "fp8"]
Fields = Mapping[str, Any]

METHODS: tuple[Method, ...] = ("compressed-tensors", "awq", "gptq", "fp8")
SPARSE_FORMATS = ("sparse-bitmask", "sparse-24-bitmask")
DENSE_METHODS = ("mxfp4",)  # whose tensors say themselves what they are
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
MAX_GROUPS = 64

_KEYS = {
    "compressed-tensors": "config_groups format kv_cache_scheme transform_config quant_method ignore"
    " quantization_status global_compression_ratio version sparsity_config run_compressed",
    "args": "num_bits type symmetric strategy group_size block_structure actorder dynamic observer"
    " observer_kwargs scale_dtype zp_dtype",
    "awq": "bits group_size version zero_point q_group_size w_bit sym desc_act quant_method"
    " modules_to_not_convert backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config",
    "gptq": "bits group_size sym checkpoint_format format is_marlin_format pack_dtype dynamic quant_method"
    " damp_percent damp_auto_increment static_groups true_sequential lm_head model_name_or_path"
    " model_file_base_name use_exllama disable_exllama exllama_config max_input_length dataset tokenizer"
    " batch_size pad_token_id block_name_to_quantize cache_block_outputs modules_in_block_to_quantize"
    " module_name_preceding_first_block backend use_cuda_fp16 model_seqlen meta mse desc_act quantizer"
    " act_group_aware use_marlin cache_examples_on_gpu",
    "fp8": "weight_block_size fmt weight_per_tensor quant_method activation_scheme modules_to_not_convert"
    " ignored_layers dequantize scale_fmt",
}
"""Keys that are known, by method. No number depends on a key that is not read: it says how a checkpoint was
made, or which kernel others use."""


@dataclass(frozen=True)
class WeightScheme:
    """The numbers of some weights. `block`: outputs and inputs that share a scale, of strategy `block`."""

    bits: int
    is_float: bool
    symmetric: bool = True
    strategy: str = "channel"
    block: tuple[int, int] | None = None
    byte_rows: bool = False
    """True if inputs are rounded to bytes, with a scale for each row."""


@dataclass(frozen=True)
class Quantisation:
    """All that a quantised weight's tensors do not say themselves."""

    method: Method
    schemes: tuple[WeightScheme, ...]
    zero_offset: int = 0
    """The number taken off zero points where they are stored, by GPTQ's first format."""

    def scheme_of(self, is_float: bool, bits: int, what: str) -> WeightScheme:
        """The scheme of weights of this kind and these bits; of several, the one that rounds less. Raises
        ModelError where there is none."""
        matching = [scheme for scheme in self.schemes if (scheme.is_float, scheme.bits) == (is_float, bits)]
        if not matching:
            kind = "floating-point" if is_float else "integer"
            raise ModelError(
                f"{what} holds {kind} numbers of {bits} bits, of which its quantization_config says nothing"
            )
        return min(matching, key=lambda scheme: scheme.byte_rows)


def quantisation_of(
    config: Any, quantize_config: Fields | None, what: str = "config.json"
) -> Quantisation | None:
    """The scheme that a directory states; None: plain weights. Raises ModelError if it cannot run."""
    if config is None and quantize_config is not None:
        config, what = {"quant_method": "gptq", **quantize_config}, "quantize_config.json"
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if method in DENSE_METHODS:
        return None
    if not isinstance(config, Mapping) or method not in METHODS:
        raise ModelError(
            f"{what} has quantization_config = {method!r:.60}, which cannot run: {', '.join(METHODS)} can"
        )
    return _READERS[method](config, what)


def check_compression(config: Mapping[str, Any], what: str) -> None:
    """Raise ModelError for a compressed-tensors config that asks for a format that is not read here."""
    own, sparsity, can = config.get("format"), config.get("sparsity_config"), ", ".join(SPARSE_FORMATS)
    sparse_format = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if config.get("config_groups") or own not in (None, "dense", *SPARSE_FORMATS):
        raise ModelError(f"{what} asks for compressed-tensors' format {own!r:.60}: {can} can be read")
    if sparse_format not in (None, "dense", *SPARSE_FORMATS):
        raise ModelError(f"{what} asks for the sparse format {sparse_format!r:.60}: {can} can be read")


def _compressed(config: Fields, what: str) -> Quantisation | None:
    groups = config.get("config_groups")
    if not groups:
        check_compression(config, what)
        return None
    _only(config, "compressed-tensors", what)
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise ModelError(f"{what} asks for compressed-tensors' {key}, which cannot run")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise ModelError(f"{what} asks for weights that are both quantised and sparse, which cannot run")
    _one_of(config, "format", (*COMPRESSED_FORMATS, None), what)
    if not isinstance(groups, Mapping) or len(groups) > MAX_GROUPS:
        raise ModelError(
            f"{what} has config_groups = {groups!r:.60}: an object of at most {MAX_GROUPS} expected"
        )
    return Quantisation("compressed-tensors", tuple(_group(group, what) for group in groups.values()))


def _group(group: Any, what: str) -> WeightScheme:
    if not isinstance(group, Mapping):
        raise ModelError(f"{what} has a config group {group!r:.60}: an object expected")
    unknown = set(group) - {"targets", "weights", "input_activations", "output_activations", "format"}
    if unknown:
        raise ModelError(f"{what} has a config group with {min(unknown)!r:.60}, which is not known here")
    if group.get("output_activations"):
        raise ModelError(f"{what} asks for quantised outputs of layers, which cannot run")
    weights, rows = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise ModelError(f"{what} has a config group whose weights are {weights!r:.60}: an object expected")
    _only(weights, "args", what)
    if weights.get("dynamic"):
        raise ModelError(f"{what} asks for weights that are quantised while they run, which cannot run")
    strategy = _one_of(
        weights, "strategy", ("tensor", "channel", "group", "block", "tensor_group", None), what
    )
    return WeightScheme(
        _integer(weights, "num_bits", range(1, 9), what),
        _one_of(weights, "type", ("int", "float", None), what) == "float",
        weights.get("symmetric", True) is True,
        strategy or "channel",
        _block(weights.get("block_structure"), what),
        isinstance(rows, Mapping) and rows.get("type", "int") == "int" and rows.get("num_bits", 8) == 8,
    )


def _awq(config: Fields, what: str) -> Quantisation:
    _only(config, "awq", what)
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise ModelError(f"{what} asks for AWQ's version {config['version']!r:.60}: gemm can be read")
    if config.get("bits", config.get("w_bit", 4)) != 4 or config.get("desc_act"):
        raise ModelError(f"{what} asks for AWQ weights other than of 4 bits in order, which cannot run")
    return Quantisation("awq", (WeightScheme(4, False, False, "group"),))


def _gptq(config: Fields, what: str) -> Quantisation:
    _only(config, "gptq", what)
    bits = _integer(config, "bits", (2, 4, 8), what)
    stored = config.get("checkpoint_format", config.get("format", "gptq"))
    if stored not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise ModelError(f"{what} has GPTQ's checkpoint_format {stored!r:.60}: gptq and gptq_v2 can be read")
    if config.get("dynamic") or config.get("pack_dtype", "int32") != "int32":
        raise ModelError(
            f"{what} asks for GPTQ weights packed layer by layer or not in int32, which cannot run"
        )
    return Quantisation("gptq", (WeightScheme(bits, False, False, "group"),), int(stored == "gptq"))


def _fp8(config: Fields, what: str) -> Quantisation:
    _only(config, "fp8", what)
    _one_of(config, "fmt", ("e4m3", None), what)
    block = _block(config.get("weight_block_size"), what)
    return Quantisation("fp8", (WeightScheme(8, True, True, "block" if block else "tensor", block),))


_READERS = {"compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq, "fp8": _fp8}


def _only(config: Fields, kind: str, what: str) -> None:
    unknown = set(config) - set(_KEYS[kind].split())
    if unknown:
        raise ModelError(f"{what} has the quantisation setting {min(unknown)!r:.60}, which is not known here")


def _one_of(config: Fields, key: str, allowed: Iterable[str | None], what: str) -> str | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, str) or value not in allowed):
        names = ", ".join(name for name in allowed if name)
        raise ModelError(f"{what} has {key} = {value!r:.60} in its quantization_config: {names} can run")
    return value


def _integer(config: Fields, key: str, allowed: Iterable[int], what: str) -> int:
    value = config.get(key)
    if type(value) is not int or value not in allowed:
        can_run = ", ".join(map(str, allowed))
        raise ModelError(f"{what} has {key} = {value!r:.60} in its quantization_config: {can_run} can run")
    return value


def _block(value: Any, what: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list) else str(value).lower().split("x")
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError):
        rows = columns = 0
    if not (1 <= rows <= 1 << 20 and 1 <= columns <= 1 << 20):
        raise ModelError(f"{what} has blocks of {value!r:.60}: two numbers above 0 expected")
    return rows, columns


Found = tuple[SourceFile, TensorEntry]
Parts = Mapping[str, Found]
Opened = Iterable[tuple[SourceFile, Mapping[str, TensorEntry]]]

PARTS = (
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
SPARSE = ("compressed", "bitmask", "shape", "row_offsets")
OF_INPUTS = ("input_scale", "input_zero_point", "input_global_scale")
"""Names of fixed scales of inputs, which are not read: here rows are rounded one by one, or not at all."""
FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MAX_DIM = 1 << 31


def parts_in(opened: Opened, ends: Iterable[str], mark: str = ".") -> dict[str, dict[str, Found]]:
    """Collect tensors whose names end in one of `ends` behind a mark, by the rest of the name. Raises
    ModelError for one that is there twice."""
    parts: dict[str, dict[str, Found]] = {}
    for file, entries in opened:
        for theirs, entry in entries.items():
            stem, _, last = theirs.rpartition(mark)
            if last not in ends:
                continue
            own = parts.setdefault(stem, {})
            if last in own:
                raise ModelError(f"{file.path} has the tensor {theirs!r:.80} twice")
            own[last] = file, entry
    return parts


class PartReader:
    """Checked access to the parts of one weight. `what` names it in errors."""

    def __init__(self, name: str, parts: Parts, allowed: Iterable[str]) -> None:
        self.what = f"the quantised tensor {name!r:.80}"
        self._parts = parts
        unknown = set(parts) - set(allowed)
        if unknown:
            raise ModelError(f"{self.what} has a part {min(unknown)}, with which it cannot be read")

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for _, entry in self._parts.values())

    def entry(
        self, part: str, dtypes: Iterable[str], n_dims: Iterable[int] = (2,), *, may_be_empty: bool = False
    ) -> TensorEntry:
        """The part's entry. Raises ModelError for another type or number of dimensions."""
        if part not in self._parts:
            raise ModelError(f"{self.what} lacks its {part}: the file is damaged")
        entry = self._parts[part][1]
        if (
            entry.dtype not in dtypes
            or len(entry.shape) not in n_dims
            or (0 in entry.shape and not may_be_empty)
        ):
            raise ModelError(
                f"{self.what} has {part} as {entry.dtype} {entry.shape}: {', '.join(dtypes)} expected"
            )
        if max(entry.shape, default=1) >= MAX_DIM:
            raise ModelError(f"{self.what} has {part} as {entry.shape}: sizes below {MAX_DIM} expected")
        return entry

    def expect(self, part: str, shape: tuple[int, ...]) -> None:
        actual = self._parts[part][1].shape
        if actual != shape:
            raise ModelError(f"{self.what} has {part} as {actual}: {shape} expected")

    def raw(self, part: str, dtype: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows of a part as a numpy array; of a vector or a number, all of it."""
        file, entry = self._parts[part]
        if len(entry.shape) < 2 or stop is None:
            return np.frombuffer(file.read(entry.offset, entry.n_bytes), dtype).reshape(entry.shape)
        row_bytes = entry.n_bytes // entry.shape[0]
        data = file.read(entry.offset + start * row_bytes, (stop - start) * row_bytes)
        return np.frombuffer(data, dtype).reshape(stop - start, *entry.shape[1:])

    def floats(self, part: str) -> Array:
        """All of a part of plain numbers, as float32."""
        entry = self.entry(part, FLOATS, (0, 1, 2))
        return self.some_floats(part, 0, math.prod(entry.shape)).reshape(entry.shape)

    def some_floats(self, part: str, first: int, count: int) -> Array:
        """`count` numbers of the part, from number `first` on."""
        dtype = self._parts[part][1].dtype
        numbers = self.some(part, FLOATS[dtype], first, count)
        return from_bf16(numbers) if dtype == "BF16" else numbers.astype(np.float32)

    def some(self, part: str, dtype: str, first: int, count: int) -> Array:
        """`count` entries of a part from `first` on, regardless of rows. Raises ModelError for fewer."""
        (file, entry), size = self._parts[part], np.dtype(dtype).itemsize
        if (first + count) * size > entry.n_bytes:
            raise ModelError(f"{self.what} has too few numbers in {part}")
        return np.frombuffer(file.read(entry.offset + first * size, count * size), dtype)

    def stated_shape(self, part: str) -> tuple[int, int]:
        """The two sizes of the weight, which a part holds."""
        entry = self.entry(part, ("I64", "I32"), (1, 2))
        sizes = self.raw(part, "<i8" if entry.dtype == "I64" else "<i4").ravel().tolist()
        if len(sizes) != 2 or not all(1 <= size < MAX_DIM for size in sizes):
            raise ModelError(f"{self.what} says that it is {sizes!r:.60}: two sizes expected")
        return int(sizes[0]), int(sizes[1])

    def group_order(self, part: str, k: int, groups: int) -> Array | None:
        """The group of each input; None where one is -1, by which compressed-tensors means runs."""
        self.entry(part, ("I32", "I64"), (1,))
        self.expect(part, (k,))
        dtype = "<i4" if self._parts[part][1].dtype == "I32" else "<i8"
        order = self.raw(part, dtype).astype(np.int64)
        if (order == -1).any():
            return None
        if order.min() < 0 or order.max() >= groups:
            raise ModelError(
                f"{self.what} has inputs in groups {order.min()} to {order.max()}: 0 to {groups - 1} expected"
            )
        return order


def in_order(order: Array, group: int) -> bool:
    """True if groups are runs of `group` inputs, one after the other."""
    return bool((order == np.arange(order.size) // group).all())


def unpacked(words: Array, bits: int, count: int) -> Array:
    """Unpack codes, uint8 [rows, count], from int32 [rows, words], the lowest bits first, without gaps."""
    raw = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    if bits == 8:
        return raw[:, :count]
    if bits == 4:
        return np.stack([raw & 15, raw >> 4], axis=-1).reshape(raw.shape[0], -1)[:, :count]
    flags = np.unpackbits(raw, axis=1, bitorder="little")[:, : bits * count].reshape(
        raw.shape[0], count, bits
    )
    weights = (1 << np.arange(bits, dtype=np.uint8)).astype(np.uint8)
    codes: Array = (flags * weights).sum(axis=2, dtype=np.uint8)
    return codes
