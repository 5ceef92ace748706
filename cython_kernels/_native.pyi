"""What the compiled module has; tests/cython_kernels/test_native_stub.py holds this against it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.packing import Kind, PackedWeight

_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]
_Range = tuple[int, int]
_Schedule = Mapping[str, Any]  # the fields of pw_schedule; loop_order: `nm` or `mn`
_RowRanges = Sequence[tuple[int, _Schedule | None]]
_Shape = Mapping[str, int | float | tuple[int, int] | None]
_Memory = Buffer | npt.NDArray[Any]  # numpy says so by itself from Python 3.12 on
_Rows = Literal["every", "gathered", "logits"]

class _Slice(Protocol):  # what `Program.run` reads of one sequence of a step
    @property
    def token_ids(self) -> Iterable[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def slot_base(self) -> int: ...
    @property
    def wants_logits(self) -> bool: ...
    @property
    def table(self) -> Sequence[int] | None: ...
    @property
    def n_drafted(self) -> int: ...
    @property
    def ring(self) -> tuple[int, int] | None: ...
    @property
    def adapter(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def keeps(self) -> Iterable[tuple[int, int]]: ...

class _Experts(Protocol):
    """A mixture of experts: serving.models.experts.Experts."""

    @property
    def count(self) -> int: ...
    @property
    def chosen(self) -> int: ...
    @property
    def normalised(self) -> bool: ...
    @property
    def weighs_inputs(self) -> bool: ...
    @property
    def scores(self) -> str: ...
    @property
    def groups(self) -> int: ...
    @property
    def chosen_groups(self) -> int: ...
    @property
    def group_best(self) -> int: ...
    @property
    def scale(self) -> float: ...

# ---- instruction sets and cores
def isa_ladder() -> list[str]: ...
def isa_usable() -> list[str]: ...
def isa_active() -> str: ...
def isa_select(name: str) -> None: ...
def core_names() -> list[str]: ...
def core_active() -> str: ...
def core_select(name: str | None) -> None: ...
def expands() -> bool: ...
def let_expand(allowed: bool) -> None: ...
def kernel_abi(family: str) -> str: ...
def kernel_abis() -> tuple[str, ...]: ...
def lanes() -> int: ...

# ---- products
def path_names() -> tuple[str, ...]: ...
def compute_paths(kind: Kind, group: int = ...) -> tuple[str, ...]: ...
def micro_kernels(kind: Kind, path: str | None = None, group: int = ...) -> list[tuple[int, int]]: ...
def default_schedule(
    packed: PackedWeight, m: int, threads: int = 1, path: str | None = None, k_parts: int = 1
) -> dict[str, Any]: ...
def sparse_pack(
    values: npt.NDArray[Any], kind: str, zero_point: int, k: int, at: int = 0
) -> tuple[_Bytes, npt.NDArray[np.uint32], int]: ...
def sparse_unpack(
    stream: _Bytes, offsets: npt.NDArray[np.uint32], kind: str, zero_point: int, k: int
) -> _Bytes: ...
def sparse_kept(stream: _Bytes, offsets: npt.NDArray[np.uint32], kind: str, k: int) -> int: ...
def prepared_row_bytes(packed: PackedWeight, path: str | None = None) -> int: ...
def prepare_rows(x: _Floats, packed: PackedWeight, path: str | None = None) -> _Bytes: ...
def gemm_share(
    prepared: _Bytes,
    packed: PackedWeight,
    y: _Floats,
    rows: _Range | None = None,
    panels: _Range | None = None,
    schedule: _Schedule | None = None,
    add: bool = False,
    path: str | None = None,
    k_parts: int = 1,
    part: int | None = None,
) -> None: ...
def gemm(
    x: npt.ArrayLike,
    packed: PackedWeight,
    schedule: _Schedule | None = None,
    path: str | None = None,
    k_parts: int = 1,
) -> _Floats: ...
def unpack_row(packed: PackedWeight, row: int) -> _Floats: ...
def share(packed: PackedWeight, m: int, thread: int, schedule: _Schedule) -> tuple[_Range, _Range]: ...
def weighed_part(count: int, unit: int, weights: Sequence[int], i: int) -> _Range: ...

# ---- groups of ranks
ADDENDS: tuple[str, ...]
EXCHANGE_LINE: int
GROUP_ALIGNMENT: int

def group_bytes(ranks: int) -> int: ...
def exchange_bytes(ranks: int, slot_bytes: int) -> int: ...

class Group:
    def __init__(self, buffer: _Memory, ranks: int) -> None: ...
    @property
    def ranks(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    def initialise(self) -> None: ...
    def barrier(self, rank: int, ranks: int | None = None, timeout_s: float | None = None) -> None: ...
    def ring(self, rank: int) -> None: ...
    def bell(self, rank: int) -> int: ...
    def wait_bell(
        self, rank: int, seen: int, timeout_s: float | None = None, spin_s: float = 0.0
    ) -> int | None: ...
    def fail(self) -> None: ...

class Exchange:
    def __init__(self, buffer: _Memory, ranks: int, rank: int, slot_bytes: int) -> None: ...
    def initialise(self) -> None: ...
    def fail(self) -> None: ...
    def arrivals(self, rank: int) -> int: ...
    def all_reduce(self, data: _Memory, addend: str, timeout_s: float | None = None) -> None: ...
    def all_gather(self, own: _Memory, outs: Iterable[_Memory], timeout_s: float | None = None) -> None: ...
    def broadcast(self, data: _Memory, root: int, timeout_s: float | None = None) -> None: ...
    def barrier(self, timeout_s: float | None = None) -> None: ...

# ---- limits, memory and teams

def limit_peak(kind: str, rounds: int) -> int: ...
def limit_read(buffer: _Memory) -> int: ...
def limit_read_pieces(buffer: npt.NDArray[np.uint64], words: int, scattered: bool) -> tuple[int, int]: ...
def prefer_nodes(nodes: Iterable[int] | None) -> int: ...
def place_on_nodes(memory: _Memory, begin: int, end: int, nodes: Iterable[int]) -> int: ...
def bytes_by_node(memory: _Memory, begin: int, end: int) -> dict[int, int] | None: ...
def huge_pages_within(memory: _Memory) -> None: ...
def own_page(memory: _Memory, at: int) -> int: ...
def drop_mapped(address: int, n_bytes: int) -> None: ...
def watch_mapping(address: int, n_bytes: int, message: str) -> None: ...

MOST_WEIGHT: int

class Team:
    def __init__(
        self, cpus: Iterable[int] | None, members: int = 0, idle_spin_us: int = 200, places: Any = None
    ) -> None: ...
    @property
    def crossings(self) -> int: ...
    @property
    def passed(self) -> int: ...
    @property
    def cpus(self) -> tuple[int, ...] | None: ...
    @property
    def size(self) -> int: ...
    def observed_cpus(self) -> list[int]: ...
    def misplaced(self) -> int: ...
    def weigh(self, streaming: Iterable[int], computing: Iterable[int]) -> None: ...
    def rest(self) -> None: ...
    def barriers(self, rounds: int) -> int: ...
    def close(self) -> None: ...

# ---- elementwise operations, for tests
def rmsnorm(x: _Floats, weight: _Floats, eps: float) -> _Floats: ...
def layernorm(
    x: _Floats, bias: _Floats | None, weight: _Floats, norm_bias: _Floats, eps: float
) -> _Floats: ...
def activated(activation: str, x: _Floats, bias: _Floats | None = None) -> _Floats: ...
def rope(x: _Floats, cosine: _Floats, sine: _Floats, factor: float = 1.0) -> _Floats: ...
def gated(activation: str, gate: _Floats, up: _Floats) -> _Floats: ...
def capped(x: _Floats, c: float) -> _Floats: ...
def exponential(x: _Floats, out: _Floats | None = None) -> _Floats: ...
def softmax(x: _Floats) -> _Floats: ...
def argmax(x: _Floats) -> int: ...
def logsumexp(x: _Floats) -> float: ...
def top_k(x: _Floats, k: int) -> tuple[_Floats, _Ints]: ...

KV_FORMATS: tuple[str, ...]
GATES: dict[str, int]
ACTIVATIONS: dict[str, int]

def kv_slot_bytes(kv_format: str, head_dim: int, latent: bool = False) -> int: ...
def attend_one_head(
    q: _Floats,
    keys: _Floats,
    values: _Floats,
    first: npt.ArrayLike,
    last: npt.ArrayLike,
    table: Sequence[int],
    kv_format: str = "f32",
    cap: float = 0,
    slopes: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
) -> _Floats: ...

# ---- probes
MIB: int

def pace_of_members(team: Team, duration_s: float) -> list[float]: ...

class Readers:
    def __init__(self, team: Team, size_bytes: int) -> None: ...
    def rates(self, active: Iterable[int], duration_s: float) -> list[float]: ...
    def close(self) -> None: ...

class TeamProduct:
    def __init__(
        self, team: Team, packs: Iterable[PackedWeight], m: int, path: str | None = None, k_parts: int = 1
    ) -> None: ...
    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    def time(self, schedule: _Schedule | None, calls: int, prepare: bool = False) -> _Ints: ...
    def result(self) -> _Floats: ...

class OpenMPTeam:
    def __init__(self, threads: int, parallel: int, member: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def observed_cpus(self) -> list[int]: ...

class OpenMPProduct:
    def __init__(
        self,
        team: OpenMPTeam,
        packed: PackedWeight,
        path: str | None = None,
        k_parts: int = 1,
        schedules: _RowRanges = (),
    ) -> None: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    def multiply(self, x: int, bias: int, y: int, rows: int, is_bf16: bool) -> None: ...

# ---- programs
def default_attention(shape: _Shape, tokens: int, positions: int, threads: int) -> dict[str, Any]: ...

class ProgramBuilder:
    def __init__(
        self,
        shape: _Shape,
        capacity: Mapping[str, Any],
        inv_freq: npt.ArrayLike,
        division: Division | None = None,
        patience_s: float = 60.0,
        magnitude: float = 1.0,
    ) -> None: ...
    def kind(
        self,
        inv_freq: npt.ArrayLike,
        window: int = 0,
        magnitude: float = 1.0,
        heads: _Range | None = None,
        in_chunks: bool = False,
    ) -> int: ...
    def layer_inputs(
        self,
        packed: PackedWeight,
        width: int,
        group: int,
        at: int,
        stride: int,
        norm: npt.ArrayLike,
        scale: float,
        eps: float,
    ) -> None: ...
    def embed(
        self,
        packed: PackedWeight,
        out: int,
        out_stride: int,
        scale: float = 1.0,
        positions: npt.NDArray[np.float32] | None = None,
        segments: npt.NDArray[np.float32] | None = None,
    ) -> None: ...
    def linear(
        self,
        parts: Sequence[tuple[PackedWeight, int]],
        source: Literal["rows", "norm", "gate", "activation"],
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        norm: npt.ArrayLike | None = None,
        add: bool = False,
        rows: _Rows = "every",
        residual: tuple[int, int] | None = None,
        arithmetics: Sequence[tuple[str | None, int]] | None = None,
        gate: str = "silu",
        eps: float | None = None,
        bias: npt.ArrayLike | None = None,
        seconds: tuple[int, int] | None = None,
        sparsity: float = 0,
    ) -> int: ...
    def layernorm(
        self,
        width: int,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        weight: npt.ArrayLike,
        norm_bias: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        rows: _Rows = "every",
        eps: float | None = None,
    ) -> None: ...
    def adjust(
        self,
        width: int,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        norm: npt.ArrayLike | None = None,
        bias: npt.ArrayLike | None = None,
        cap: float = 0,
        add: bool = False,
        rows: _Rows = "every",
        residual: tuple[int, int] | None = None,
        eps: float | None = None,
        scale: float = 1.0,
    ) -> None: ...
    def route(
        self,
        experts: _Experts,
        from_at: int,
        from_stride: int,
        rows: _Rows = "every",
        choice_bias: npt.ArrayLike | None = None,
        factors: npt.ArrayLike | None = None,
    ) -> None: ...
    def experts(
        self,
        experts: _Experts,
        packed: PackedWeight,
        source: Literal["rows", "norm", "gate", "activation"],
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        norm: npt.ArrayLike | None = None,
        bias: npt.NDArray[np.float32] | None = None,
        rows: _Rows = "every",
        arithmetic: tuple[str | None, int] = (None, 1),
        gate: str = "silu",
        eps: float | None = None,
    ) -> int: ...
    def combine(
        self,
        experts: _Experts,
        width: int,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        bias: npt.NDArray[np.float32] | None = None,
        rows: _Rows = "every",
        add: bool = True,
    ) -> None: ...
    def attend_latent(
        self,
        layer: int,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        queries: tuple[int, int, int, int],
        vectors: tuple[int, int],
        norm: npt.ArrayLike,
        eps: float,
        scale: float,
        rows: _Rows = "every",
        kind: int = 0,
        cap: float = 0,
    ) -> None: ...
    def choose(
        self,
        layer: int,
        queries: tuple[int, int],
        keys: tuple[int, int],
        weights: tuple[int, int],
        heads: int,
        norm: npt.ArrayLike,
        norm_bias: npt.ArrayLike,
        eps: float,
        rows: _Rows = "every",
        kind: int = 0,
    ) -> None: ...
    def heads(
        self,
        packed: PackedWeight,
        count: int,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        step: int,
        arithmetic: tuple[str | None, int] = (None, 1),
    ) -> int: ...
    def set_schedules(self, op: int, part: int, ranges: _RowRanges, table: int = 0) -> None: ...
    def tap(self, packed: PackedWeight, rows: _Floats) -> None: ...
    def set_attention_schedules(self, ranges: _RowRanges, table: int = 0) -> None: ...
    def attend(
        self,
        layer: int,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        bias: npt.ArrayLike | None = None,
        q_norm: npt.ArrayLike | None = None,
        k_norm: npt.ArrayLike | None = None,
        rows: _Rows = "every",
        kind: int = 0,
        scale: float | None = None,
        cap: float = 0,
        sinks: npt.ArrayLike | None = None,
        slopes: npt.ArrayLike | None = None,
        growth: npt.ArrayLike | None = None,
        growth_span: int = 1,
        growth_shift: int = 0,
        v_norm: npt.ArrayLike | None = None,
        keys_are_values: bool = False,
        only_reads: bool = False,
        norm_last: bool = False,
    ) -> None: ...
    def bytes(self) -> int: ...
    def shared_bytes(self) -> int: ...
    def whole_kv_bytes(self) -> int: ...

MAX_ADAPTERS: int

def add_low_rank(
    x: npt.NDArray[np.float32],
    packed: PackedWeight,
    y: npt.NDArray[np.float32],
    rows: Sequence[int],
    panels: _Range | None = None,
) -> None: ...

class AdaptableBuilder(ProgramBuilder):
    def adapt(
        self,
        op: int,
        adapter: int,
        down: PackedWeight,
        scales: npt.NDArray[np.float32],
        ups: Sequence[tuple[int, PackedWeight]],
    ) -> None: ...

class _Recurrence(Protocol):
    @property
    def heads(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def erases(self) -> bool: ...

class StateBuilder(AdaptableBuilder):
    def convolve(
        self,
        weights: npt.ArrayLike,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        bias: npt.ArrayLike | None = None,
        gates_rows: bool = False,
        silu: bool = False,
    ) -> None: ...
    def state_gates(
        self,
        shape: _Recurrence,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        rates: npt.ArrayLike,
        offsets: npt.ArrayLike,
        steps: tuple[float, float] = ...,
        normalised: tuple[int, int, int, int] | None = None,
        eps: float = 1e-6,
        factor_at: int | None = None,
    ) -> None: ...
    def recur(
        self,
        shape: _Recurrence,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        gates: tuple[int, int],
        columns: tuple[int, int, int],
        skips: npt.ArrayLike | None = None,
    ) -> None: ...
    def gate_rows(
        self,
        width: int,
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        by: tuple[int, int],
        gate: str = "silu",
        norm: npt.ArrayLike | None = None,
        shape: _Recurrence | None = None,
        norm_first: bool = False,
        eps: float | None = None,
        rows: _Rows = "every",
        one_gate: bool = False,
        scale: float = 1.0,
    ) -> None: ...
    def state_bytes(self) -> int: ...

class StreamBuilder(StateBuilder):
    def streams(
        self,
        mode: str,
        width: int,
        count: int,
        at: tuple[int, int],
        taken: tuple[int, int],
        given: tuple[int, int],
        to: tuple[int, int] = (0, 0),
        rows: _Rows = "every",
        active: int = 0,
        norm: npt.ArrayLike | None = None,
        router: npt.ArrayLike | None = None,
        coefficients: npt.ArrayLike | None = None,
        scale: npt.ArrayLike | None = None,
    ) -> None: ...

class Program(StreamBuilder):
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def native_ns(self) -> int: ...
    def seal(self, logits: int, kv: _Memory | None = None) -> None: ...
    def seal_shared(self, logits: int, buffer: _Memory) -> None: ...
    def run(
        self,
        team: Team,
        slices: Iterable[_Slice],
        every_row: bool = False,
        table: int = 0,
        resting: Team | None = None,
        first_row: bool = False,
    ) -> int: ...
    def serve(self, teams: Collection[Team | None]) -> None: ...
    def stop(self) -> None: ...
    def fail(self) -> None: ...
    def observed(self, table: int) -> list[tuple[int, ...]]: ...
    def misplaced(self, table: int) -> int: ...
    def kv_span(self, layer: int, kv_head: int, copy: int = 0) -> _Range: ...
    def touch(self, team: Team) -> None: ...
    def spread(self, nodes: Iterable[int]) -> int: ...
    def memory_by_node(self) -> dict[str, dict[int, int] | None]: ...
    def read_rows(self, at: int, stride: int, rows: _Floats) -> None: ...
    def write_rows(self, at: int, stride: int, rows: _Floats) -> None: ...
    def copy_kv(self, team: Team, source: int, target: int, n_slots: int) -> None: ...
    def kv_bytes(self) -> int: ...
    @property
    def progress(self) -> tuple[int, int]: ...

class KvMemory:
    def __init__(
        self,
        memory: _Memory,
        offset: int,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        kv_slots: int,
        kv_format: str,
        latent: bool = False,
        state_bytes: int = 0,
        state_places: int = 0,
        copies: Sequence[int] = (),
    ) -> None: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    def wire_bytes(self, n_slots: int) -> int: ...
    def read(self, layer: int, slot: int, n_slots: int, out: _Memory) -> None: ...
    def write(self, layer: int, slot: int, n_slots: int, data: _Memory) -> None: ...
    def copy_to(self, target: KvMemory, layer: int, from_slot: int, to_slot: int, n_slots: int) -> None: ...
    def read_state(self, place: int, begin: int, out: _Memory) -> None: ...
    def write_state(self, place: int, begin: int, data: _Memory) -> None: ...
    def copy_state_to(self, target: KvMemory, source: int, place: int, begin: int, n_bytes: int) -> None: ...
