"""A process group of PyTorch for ranks of one host, through shared memory; importing it registers it.

import phasewise.torch.distributed
torch.distributed.init_process_group("phasewise", init_method=..., rank=..., world_size=...)

It has all_reduce (sums), all_gather, broadcast and barrier. A sum is added in the order of ranks, and every
rank gets the same bits. A call returns when its collective is done, `async_op=True` too (decision 0152).

A thread notices when this rank waits for one whose process has ended.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from phasewise.cython_kernels._native import EXCHANGE_LINE, Exchange, exchange_bytes
from phasewise.cython_kernels.errors import GroupError

LOOK_MS = 100
"""Milliseconds between two checks whether this rank waits for a rank whose process has ended."""


class EndedRanks:
    """Thread that fails the exchange once this rank waits for one whose process has ended.

    A rank that ends after its last collective fails nothing: it is missed only by a rank that has come to
    more barriers than it. Where the system has no descriptors of processes, the group's timeout ends waits.
    """

    def __init__(self, exchange: Exchange, rank: int, pids: list[int]) -> None:
        self._exchange = exchange
        self._rank = rank
        self._stop: int | None = os.eventfd(0)
        self._watched: dict[int, int] = {}
        self.ranks: list[int] = []
        for other, pid in enumerate(pids):
            if pid != os.getpid():
                self._watch_process(other, pid)
        self._thread = threading.Thread(target=self._watch, name="phasewise-ended-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        if self._stop is None:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for descriptor in (self._stop, *self._watched):
            os.close(descriptor)
        self._stop = None

    def _watch_process(self, rank: int, pid: int) -> None:
        try:
            self._watched[os.pidfd_open(pid)] = rank
        except ProcessLookupError:
            self.ranks.append(rank)
        except (OSError, AttributeError):
            pass  # no such call here

    def _watch(self) -> None:
        stop, waiting = self._stop, select.poll()
        assert stop is not None
        for descriptor in (stop, *self._watched):
            waiting.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in waiting.poll(LOOK_MS if self.ranks else None):
                if descriptor == stop:
                    return
                self.ranks.append(self._watched[descriptor])
                waiting.unregister(descriptor)
            own = self._exchange.arrivals(self._rank)
            if any(self._exchange.arrivals(rank) < own for rank in self.ranks):
                self._exchange.fail()
                return


NAME = "phasewise"

SLOT_BYTES = (1 << 18) + EXCHANGE_LINE
"""Bytes of a rank's slot: pieces of 256 KiB, of which three for each rank stay in a core's own cache."""

MOST_WAIT_S = 1e8

_ADDENDS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
}

_NOT_THERE = (
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "_reduce_scatter_base",
)
"""Collectives of torch that this group refuses, by the names of all of torch's releases."""


class SharedMemoryGroup(dist.ProcessGroup):
    """Process group of ranks on one host, which exchange tensors through memory that all of them map.

    The memory has no name in any file system: it is gone with the last of its ranks, however they end.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._name = self._description = ""
        self._rank = rank
        self._size = size
        self._timeout_s = min(timeout.total_seconds(), MOST_WAIT_S)
        self._one_at_a_time = threading.Lock()
        self._exchange, pids = _meet(store, rank, size)
        self._ended = EndedRanks(self._exchange, rank, pids)
        self._call("init_process_group", self._exchange.barrier)

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        tensor = _only("all_reduce", tensors)
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise ValueError("all_reduce of the phasewise group adds up: pass op=ReduceOp.SUM")
        if tensor.dtype not in _ADDENDS:
            raise ValueError(
                f"all_reduce of the phasewise group adds up {_names(_ADDENDS)}, not {tensor.dtype}"
            )
        whole = tensor.detach().contiguous()
        self._call("all_reduce", self._exchange.all_reduce, _bytes(whole), _ADDENDS[tensor.dtype])
        _return(whole, tensor)
        return _done([tensor])

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        own = _only("all_gather", inputs)
        targets = outputs[0]
        for target in targets:
            _check_cpu("all_gather", target)
            if target.numel() != own.numel() or target.dtype != own.dtype:
                raise ValueError(
                    f"all_gather of {own.numel()} {own.dtype} into {target.numel()} {target.dtype}: "
                    "tensors of one length and type expected"
                )
        wholes = [target.detach().contiguous() for target in targets]
        self._call(
            "all_gather",
            self._exchange.all_gather,
            _bytes(own.detach().contiguous()),
            [_bytes(whole) for whole in wholes],
        )
        for whole, target in zip(wholes, targets, strict=True):
            _return(whole, target)
        return _done(outputs)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        """Gather all ranks' tensors into `output`, one after another (all_gather_into_tensor)."""
        _check_cpu("all_gather_into_tensor", output)
        if output.numel() != self._size * own.numel():
            raise ValueError(
                f"all_gather_into_tensor of {self._size} times {own.numel()} elements into {output.numel()}"
            )
        whole = output.detach().contiguous()
        self.allgather([list(whole.view(-1).chunk(self._size)) if own.numel() else [own] * self._size], [own])
        _return(whole, output)
        return _done(output)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single(output, own, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        tensor = _only("broadcast", tensors)
        whole = tensor.detach().contiguous()
        root = 0 if opts is None else opts.rootRank
        self._call("broadcast", self._exchange.broadcast, _bytes(whole), root)
        if root != self._rank:
            _return(whole, tensor)
        return _done([tensor])

    def barrier(self, opts: Any = None) -> Any:
        self._call("barrier", self._exchange.barrier)
        return _done([])

    def shutdown(self) -> None:
        """Stop watching the other ranks; destroy_process_group calls it."""
        self._ended.close()

    def abort(self) -> None:
        """End the waits of the other ranks, with an error on each of them."""
        self._exchange.fail()
        self._ended.close()

    def _call(self, act: str, collective: Any, *arguments: Any) -> None:
        with self._one_at_a_time:
            try:
                collective(*arguments, timeout_s=self._timeout_s)
            except GroupError as error:
                raise dist.DistBackendError(f"phasewise process group: {error}{self._missing()}") from None

    def _missing(self) -> str:
        """Remark about the ranks that have come to fewer barriers than this one, or have ended."""
        own = self._exchange.arrivals(self._rank)
        missing = {rank for rank in range(self._size) if self._exchange.arrivals(rank) < own}
        missing.update(self._ended.ranks)
        return f" (missing: rank {', '.join(map(str, sorted(missing)))})" if missing else ""


def _refused(name: str) -> Any:
    def refuse(self: SharedMemoryGroup, *arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            "the phasewise process group has all_reduce, all_gather, broadcast and barrier, "
            f"not {name.lstrip('_')}: use a gloo group for it (new_group(backend='gloo'))"
        )

    return refuse


for _name in _NOT_THERE:
    setattr(SharedMemoryGroup, _name, _refused(_name))


# ---- tensors ---------------------------------------------------------------------------------------------


def _check_cpu(act: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"{act} of the phasewise group takes dense tensors on the CPU, "
            f"not {tensor.layout} on {tensor.device}"
        )


def _only(act: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) != 1:
        raise ValueError(f"{act} of the phasewise group takes one tensor for each rank, not {len(tensors)}")
    _check_cpu(act, tensors[0])
    return tensors[0]


def _bytes(contiguous: torch.Tensor) -> Any:
    # By strides: a single element is contiguous whatever its stride, and then cannot be viewed as bytes.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8).numpy()


def _return(whole: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what was computed in a contiguous copy back into the caller's tensor, unless they are the same."""
    if whole.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(whole)


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _names(types: Any) -> str:
    return ", ".join(str(name).removeprefix("torch.") for name in types)


# ---- meeting ---------------------------------------------------------------------------------------------


def _meet(store: Any, rank: int, size: int) -> tuple[Exchange, list[int]]:
    """Map the memory that rank 0 makes into this rank; its exchange, and the processes of all ranks.

    The others open rank 0's descriptor through /proc, so no name is left behind whenever a rank ends.
    """
    pids = _pids(store, rank, size)
    total = exchange_bytes(size, SLOT_BYTES)
    if rank == 0:
        descriptor = os.memfd_create("phasewise-process-group")
        os.ftruncate(descriptor, total)
        exchange = Exchange(mmap.mmap(descriptor, total), size, 0, SLOT_BYTES)
        exchange.initialise()
        store.set("descriptor", str(descriptor))
        for other in range(1, size):
            store.get(f"rank {other} has it")
    else:
        descriptor = _opened(pids[0], int(store.get("descriptor")))
        exchange = Exchange(mmap.mmap(descriptor, total), size, rank, SLOT_BYTES)
        store.set(f"rank {rank} has it", "")
    os.close(descriptor)  # the mapping stays
    return exchange, pids


def _pids(store: Any, rank: int, size: int) -> list[int]:
    """Exchange the process ids of all ranks through the store; an error if they are not of one host."""
    store.set(f"rank {rank}", json.dumps({"host": _host(), "pid": os.getpid()}))
    ranks = [json.loads(store.get(f"rank {other}")) for other in range(size)]
    strangers = [str(other) for other in range(size) if ranks[other]["host"] != ranks[0]["host"]]
    if strangers:
        raise dist.DistBackendError(
            f"phasewise process group: rank {', '.join(strangers)} and rank 0 are on different hosts or in "
            "different containers; use gloo there"
        )
    return [described["pid"] for described in ranks]


def _opened(pid: int, descriptor: int) -> int:
    try:
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise dist.DistBackendError(
            f"phasewise process group: rank 0's memory (process {pid}) cannot be opened: {error.strerror}; "
            "all ranks must belong to one user"
        ) from None


def _host() -> str:
    """An id of kernel and PID namespace: processes with the same id can open each other's descriptors."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


dist.Backend.register_backend(NAME, SharedMemoryGroup, devices=["cpu"])
