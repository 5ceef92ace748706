"""Numbers, options and metrics that docs/guide/pools.md names are those of the program."""

from __future__ import annotations

import re

from phasewise.cluster.real.supervisor import FrontSettings
from phasewise.cluster.routing import OVERFLOW_S, OWN_TOKEN_COUNTS
from phasewise.serving.engine.engine_size import KV_SHARE_OF_FREE_MEMORY
from phasewise.serving.processes.restarts import MOST_RERUNS
from phasewise.serving.scheduling.held_prefixes import BLOCK_TOKENS
from phasewise.workflows.serve.settings import SPLIT_ABOVE_TOKENS
from phasewise.workflows.serve.ways import OnCores
from tests.support import ROOT

PAGE = " ".join((ROOT / "docs" / "guide" / "pools.md").read_text().split())
WORDS = {"two": 2, "twice": 2, "four": 4, "ten": 10, "quarter": 0.25, "minute": 60}


def stated(pattern: str) -> float:
    """The number where the pattern has a group; the same one, however often it stands there."""
    (text,) = set(re.findall(pattern, PAGE))
    return float(WORDS.get(text, text))


def test_its_numbers_are_those_of_the_program() -> None:
    settings = FrontSettings("", lambda index, life: "")

    assert stated(r"which blocks of (\d+) tokens it holds") == BLOCK_TOKENS
    assert stated(r"prompts that wait there, and (\w+) times those of its own") == OWN_TOKEN_COUNTS
    assert stated(r"longer than computing it again (\w+) times") == OWN_TOKEN_COUNTS
    assert stated(r"prompts of more than (\d+) tokens, or than `split_above`") == SPLIT_ABOVE_TOKENS
    assert stated(r"wait for longer than ([\d.]+) s by the best pace") == OVERFLOW_S
    assert stated(r"divide a (\w+) of what is free on that node") == KV_SHARE_OF_FREE_MEMORY
    assert stated(r"(?:noticed after|says nothing for) ([\d.]+) seconds") == settings.silent_s
    assert stated(r"is tried again every (\w+),") == settings.again_s
    assert stated(r"ended, (\w+) for each of the server and once more") == MOST_RERUNS
    assert stated(r"has not arrived (\w+) seconds after its prompt was computed") == settings.hand_over_s


def test_options_that_it_says_are_refused_are() -> None:
    """All of them, and no others."""
    (with_pools,) = re.findall(r"(`--threads` and [^ ]*) are refused with pools", PAGE)

    named = {flag.lstrip("-").replace("-", "_") for flag in re.findall(r"`(--[a-z-]+)`", with_pools)}
    assert named == {*OnCores.unused} - {"spread"}
