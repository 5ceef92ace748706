"""The text of `--explain` about drafts, and where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.cli.explain_text import uses_text
from phasewise.workflows.opening.drafts import DraftRule, rule_of
from tests.cli import command
from tests.support.models.head_models import write_with_head

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
from phasewise.serving.drafts.opening import DraftSource

ASKED = ("-p", "hello", "-n", 3, "--ignore-eos", "--explain")
HEAD = DraftRule("mtp", "qwen (its head)", 123_456, None, 15, 1.02)


def test_nothing_is_said_where_nothing_drafts() -> None:
    assert rule_of(None) is None
    assert uses_text([]) == ""


@pytest.mark.parametrize(
    ("rule", "lines"),
    [
        (
            HEAD,
            [
                "drafts: qwen (its head), 0.1 MB",
                "  0 to 15 in a step: as many as give most tokens a second, from 2% more on",
            ],
        ),
        (
            DraftRule("model", "small", 1_000_000, 1, 15, 1.02),
            ["drafts: model small, 1.0 MB", "  1 in every step that has room for them"],
        ),
        (
            rule_of(DraftSource(n_tokens=4)),
            ["drafts: lookup in each sequence", "  4 in every step that has room for them"],
        ),
    ],
)
def test_the_text_names_the_source_and_the_rule(rule: DraftRule, lines: list[str]) -> None:
    assert uses_text([], drafts=rule).splitlines() == lines
    assert max(map(len, lines)) <= 80


@pytest.mark.usefixtures("own_places")
def test_generate_tells_the_head_that_drafts(tmp_path: Path) -> None:
    write_with_head(tmp_path / "qwen", "qwen35")
    named_head = ("--draft", "mtp", "--draft-tokens", 2)

    own = command.fields_of("generate", tmp_path / "qwen", *ASKED)["draft_rule"]
    named = command.fields_of("generate", tmp_path / "qwen", *ASKED, *named_head)["draft_rule"]
    none = command.fields_of("generate", tmp_path / "qwen", *ASKED, "--draft", "off")["draft_rule"]

    assert (own["source"], own["name"], own["n_tokens"]) == ("mtp", "qwen (its head)", None)
    assert (named["source"], named["name"], named["n_tokens"]) == ("mtp", "qwen (its head)", 2)
    assert own["weight_bytes"] > 0
    assert none is None
    assert "drafts: qwen (its head), " in command.run("generate", tmp_path / "qwen", *ASKED).stderr
