"""The entry point of vLLM's plugin: its place, and what is asked of it. Needs neither vLLM nor torch."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from phasewise.vllm import plugin


@pytest.mark.parametrize("value", ["", "off"])
def test_it_is_off_unless_it_is_asked_for(value: str) -> None:
    """vLLM is not even looked for."""
    assert plugin.asked_format(value) is None


@pytest.mark.parametrize("value", ["1", "on", "int4", "Native"])
def test_another_value_is_refused_by_name(value: str) -> None:
    with pytest.raises(ValueError, match=rf"^PHASEWISE_VLLM is '{value}': native, int8 or off expected$"):
        plugin.asked_format(value)


def test_vllm_finds_it_among_its_general_plugins() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="phasewise")

    assert entry.load() is plugin.register
