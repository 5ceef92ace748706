"""CPU sets as text: what is written is read back, and nonsense is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology.cpusets import (
    cpus_of,
    format_list,
    mask_of,
    parse_hwloc_mask,
    parse_kernel_mask,
    parse_list,
)
from phasewise.topology.sizes import format_memory, format_size

CPU_SETS = st.sets(st.integers(0, 1023), max_size=80)


def _words(mask: int, prefix: str) -> str:
    words = []
    while mask or not words:
        words.append(f"{prefix}{mask & 0xFFFFFFFF:08x}")
        mask >>= 32
    return ",".join(reversed(words))


@given(cpus=CPU_SETS)
def test_every_notation_comes_back_as_the_same_set(cpus: set[int]) -> None:
    mask = mask_of(cpus)

    assert cpus_of(mask) == tuple(sorted(cpus))
    assert parse_list(format_list(cpus)) == mask
    assert parse_kernel_mask(_words(mask, "")) == mask
    assert parse_hwloc_mask(_words(mask, "0x")) == mask


def test_hwloc_shortens_empty_words() -> None:
    assert cpus_of(parse_hwloc_mask("0x00000001,0x0,,0x3")) == (0, 1, 96)


@pytest.mark.parametrize("text", ["5-1", "-3", "a", "1-2-3", "99999", "1-99999999999", "٣", "0x1"])
def test_bad_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_list(text)


@pytest.mark.parametrize("text", ["0xf...f,0x1", "0x123456789", "zz", "0x-1", "0x1_0", "0x1," * 600])
def test_bad_masks_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_hwloc_mask(text)


@pytest.mark.parametrize(
    ("size_bytes", "cache", "memory"),
    [
        (None, "?", "?"),
        (512, "512", "512"),
        (48 << 10, "48K", "48K"),
        (1280 << 10, "1.25M", "1.25M"),
        (134_904_430_592, "125.64G", "126G"),
        (1 << 42, "4T", "4T"),
        (1000 << 30, "1000G", "1000G"),
    ],
)
def test_sizes_read_like_the_kernels(size_bytes: int | None, cache: str, memory: str) -> None:
    assert (format_size(size_bytes), format_memory(size_bytes)) == (cache, memory)
