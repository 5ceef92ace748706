"""A load is given memory that the allocators hold beforehand; loads run in processes of their own."""

import ctypes
import subprocess
import sys

import pytest

from phasewise.serving.processes.headroom import malloc_bytes_in_use

glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc's malloc, or too old"
)

_ASK = """
import contextlib, ctypes, sys, threading
from phasewise.serving.processes.headroom import allocator_headroom, use_one_heap

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
"""

_LOAD = """
with {context}:
    before = resident()
    objects = [bytes(n % 400) for n in range(20_000)]
    for n in [64, 1000, 30_000] * 100:
        ctypes.memset(libc.malloc(n), 1, n)
    print(resident() - before)
"""

_THREAD = """
{first}
found = []
thread = threading.Thread(target=lambda: found.append(libc.malloc(1000)))
thread.start()
thread.join()
with open("/proc/self/maps") as lines:
    heap = next(line.split()[0] for line in lines if "[heap]" in line)
first, last = (int(end, 16) for end in heap.split("-"))
print(first <= found[0] < last)
"""


def _told(script: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", _ASK + script], capture_output=True, text=True, check=True, timeout=60
    )
    return ran.stdout.strip()


def test_load_within_the_headroom_takes_no_new_pages() -> None:
    taken = int(_told(_LOAD.format(context="allocator_headroom(16 << 20)")))
    without = int(_told(_LOAD.format(context="contextlib.nullcontext()")))
    assert without > 6 << 20
    assert taken < 1 << 20


@glibc
def test_threads_allocate_from_the_one_heap() -> None:
    assert _told(_THREAD.format(first="use_one_heap()")) == "True"
    assert _told(_THREAD.format(first="")) == "False"  # what the system would do


@glibc
@pytest.mark.parametrize(("n_bytes", "count"), [(100, 10_000), (50_000, 100), (40 << 20, 3)])
def test_bytes_in_use_are_those_given_out(n_bytes: int, count: int) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = malloc_bytes_in_use()
    held = [libc.malloc(n_bytes) for _ in range(count)]
    after = malloc_bytes_in_use()
    for place in held:
        libc.free(place)
    assert before is not None
    assert after is not None
    assert 0.9 * count * n_bytes <= after - before <= 1.3 * count * n_bytes + 65536
