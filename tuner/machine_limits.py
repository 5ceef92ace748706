"""The machine's measured limits: the joint peak FLOP/s and read bandwidth of some cores.

The loops are in `cython_kernels/families/limits.c`. Every core runs the same loop at the same time, as a team
does; the slowest core's rate counts, because a team waits for it. The best of several repeats is kept: other
processes can only slow a run down."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.limit_loops import KINDS

CALIBRATION_ROUNDS = 1 << 16
REPEAT_S = 0.05  # long against a timer tick, short against a neighbour's burst
DEFAULT_READ_BYTES = 512 << 20
LEAST_READ_BYTES = 512 << 20  # beside other timings: the start of a few threads must not matter
PIECES = (64, 256, 1024, 4096, 16384, 65536)
"""Sizes of pieces in bytes, from a cache line to long runs of keys."""


@dataclass(frozen=True)
class MachineLimits:
    """The rates that a set of cores reaches when only the measured limit slows them down."""

    cores: tuple[int, ...]
    isa: str
    peak_flops: dict[str, float]
    """Operations per second by compute type: f32, f16, bf16, int8. A multiply and an add are two."""
    read_bytes_per_s: float
    read_buffer_bytes: int
    """Bytes, over all cores, of the buffer that each pass streamed."""


def peak_flops(kind: str, cores: Sequence[int], repeats: int = 5) -> float:
    """Operations per second of all `cores` together, in multiplies of `kind` (`limits.KINDS`)."""

    def prepare() -> Callable[[], int]:
        started = time.perf_counter_ns()
        _native.limit_peak(kind, CALIBRATION_ROUNDS)
        elapsed_ns = time.perf_counter_ns() - started
        rounds = max(1, int(CALIBRATION_ROUNDS * REPEAT_S * 1e9 / elapsed_ns))
        return lambda: _native.limit_peak(kind, rounds)

    return _best_rate(prepare, cores, repeats)


def read_bandwidth(cores: Sequence[int], total_bytes: int = DEFAULT_READ_BYTES, repeats: int = 40) -> float:
    """Bytes per second of streaming a buffer of `total_bytes`, split evenly over `cores`. A pass takes
    milliseconds and memory changes its pace within a second, hence the many repeats."""
    share_bytes = max(1 << 16, total_bytes // len(cores))

    def prepare() -> Callable[[], int]:
        buffer = np.ones(share_bytes, dtype=np.uint8)  # touched here, by the core that will read it
        return lambda: _native.limit_read(buffer)

    return _best_rate(prepare, cores, repeats)


@dataclass(frozen=True)
class PieceReads:
    """Rates of reading memory in pieces of one size: in order, and scattered (ODMA, section 2.2)."""

    piece_bytes: int
    in_order_bytes_per_s: float
    scattered_bytes_per_s: float

    @property
    def share(self) -> float:
        """The scattered rate as a share of the in-order rate."""
        return self.scattered_bytes_per_s / self.in_order_bytes_per_s


def read_in_pieces(
    cores: Sequence[int], piece_bytes: int, total_bytes: int = DEFAULT_READ_BYTES, repeats: int = 3
) -> PieceReads:
    """Rates of reading memory in pieces, in order and scattered. Each core reads its own buffer, together
    `total_bytes`."""
    share_words = max(2 * piece_bytes, total_bytes // len(cores)) // 8

    def rate(scattered: bool) -> float:
        def prepare() -> Callable[[], int]:
            buffer = np.ones(share_words, dtype=np.uint64)  # touched here, by the core that will read it
            return lambda: _native.limit_read_pieces(buffer, piece_bytes // 8, scattered)[0]

        return _best_rate(prepare, cores, repeats)

    return PieceReads(piece_bytes, rate(scattered=False), rate(scattered=True))


class StreamingRead:
    """Repeated reads of the same buffers, one per core, to be timed beside other timings: memory changes its
    pace within a second, so a share of bandwidth refers to reads at the same time."""

    def __init__(self, cores: Sequence[int], total_bytes: int = DEFAULT_READ_BYTES) -> None:
        share_bytes = max(1 << 16, total_bytes // len(cores))
        self._gate = threading.Barrier(len(cores))
        self._readers = [ThreadPoolExecutor(max_workers=1) for _ in cores]
        opening = [
            reader.submit(_pinned_buffer, core, share_bytes)
            for reader, core in zip(self._readers, cores, strict=True)
        ]
        self._buffers = [opened.result() for opened in opening]

    def rate(self, repeats: int = 2) -> float:
        """Bytes per second: the best of `repeats`, each of enough passes to read LEAST_READ_BYTES."""
        passes = -(-LEAST_READ_BYTES // sum(buffer.nbytes for buffer in self._buffers))

        def read(buffer: npt.NDArray[np.uint8]) -> int:
            return sum(_native.limit_read(buffer) for _ in range(passes))

        def spans(buffer: npt.NDArray[np.uint8]) -> list[tuple[int, int, int]]:
            return [_span(self._gate, lambda: read(buffer)) for _ in range(repeats)]

        members = [
            reader.submit(spans, buffer) for reader, buffer in zip(self._readers, self._buffers, strict=True)
        ]
        return max(_rate(turn) for turn in zip(*(member.result() for member in members), strict=True))

    def close(self) -> None:
        for reader in self._readers:
            reader.shutdown()


def _pinned_buffer(core: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """A buffer whose pages `core` has touched; pins the calling thread to that core."""
    os.sched_setaffinity(0, {core})  # 0 is the calling thread
    return np.ones(size_bytes, dtype=np.uint8)


def measure_limits(cores: Sequence[int], read_buffer_bytes: int = DEFAULT_READ_BYTES) -> MachineLimits:
    """All limits of `cores`, with the active instruction set."""
    return MachineLimits(
        cores=tuple(cores),
        isa=isa.active(),
        peak_flops={kind: peak_flops(kind, cores) for kind in KINDS},
        read_bytes_per_s=read_bandwidth(cores, read_buffer_bytes),
        read_buffer_bytes=read_buffer_bytes,
    )


def _best_rate(prepare: Callable[[], Callable[[], int]], cores: Sequence[int], repeats: int) -> float:
    """The best of `repeats` rates: the work of all cores over the time until the last core is done."""
    gate = threading.Barrier(len(cores))

    def member(core: int) -> list[tuple[int, int, int]]:
        try:
            os.sched_setaffinity(0, {core})  # 0 is the calling thread
            run = prepare()
            return [_span(gate, run) for _ in range(repeats)]
        except BaseException:
            gate.abort()  # the others must not wait for a member that is gone
            raise

    with ThreadPoolExecutor(max_workers=len(cores)) as pool:
        members = list(pool.map(member, cores))
    return max(_rate(turn) for turn in zip(*members, strict=True))


def _span(gate: threading.Barrier, run: Callable[[], int]) -> tuple[int, int, int]:
    gate.wait()
    started_ns = time.perf_counter_ns()
    done = run()
    return started_ns, time.perf_counter_ns(), done


def _rate(turn: Sequence[tuple[int, int, int]]) -> float:
    started_ns = min(started for started, _, _ in turn)
    ended_ns = max(ended for _, ended, _ in turn)
    return sum(done for _, _, done in turn) / (ended_ns - started_ns) * 1e9


FLOAT_BYTES = 4
"""Bytes of an activation before and after a product."""

READ_PASSES = 12


def peak_kinds(weight_format: str) -> tuple[str, ...]:
    """The multiply rates (`limits.KINDS`) at which weights of this format may be computed. bf16 weights may
    be widened or become float16, since not every CPU multiplies pairs of bf16 faster than float32."""
    match weight_format:
        case "f32" | "f16":
            return ("f32",)
        case "bf16":
            return ("f32", "f16", "bf16")
        case _:
            return ("f32", "bf16", "int8")


@dataclass(frozen=True)
class Roofline:
    """The rates of some cores: operations per second by kind (`limits.KINDS`), and bytes read per second."""

    peak_flops: Mapping[str, float]
    read_bytes_per_s: float

    def bound_ns(self, weight_format: str, n: int, k: int, m: int, weight_bytes: int) -> float:
        """The least nanoseconds of y[m, n] = x[m, k] W[n, k]^T with W read from memory once."""
        peak = max(self.peak_flops[kind] for kind in peak_kinds(weight_format))
        moved_bytes = weight_bytes + FLOAT_BYTES * m * (n + k)
        return max(2 * m * n * k / peak, moved_bytes / self.read_bytes_per_s) * 1e9


def measure_roofline(cores: Sequence[int], formats: Iterable[str], read_buffer_bytes: int) -> Roofline:
    """Measure the limits for weights of these formats with the active instruction set; takes about 1 s.
    `read_buffer_bytes`: the total of the timed weights."""
    kinds = dict.fromkeys(kind for weight_format in formats for kind in peak_kinds(weight_format))
    peaks = {kind: peak_flops(kind, cores) for kind in kinds}
    return Roofline(peaks, read_bandwidth(cores, read_buffer_bytes, READ_PASSES))
