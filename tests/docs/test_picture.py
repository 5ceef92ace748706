"""The picture at the top of the README is what the commands of the guide draw."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.command import run as phasewise
from tests.docs.test_guide import FIXTURES, GUIDE, commands

PAGE = GUIDE / "another-machine.md"
PICTURE = GUIDE / "plan.svg"


def test_the_plan_s_picture_is_what_the_guide_s_commands_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FIXTURES / "topology" / "lstopo_v2.xml", "machine.xml")
    shutil.copy(FIXTURES / "guide" / "llama-3-8b.json", "config.json")
    (plan,) = (
        command for command in commands(PAGE.read_text(encoding="utf-8")) if command.endswith("> plan.json")
    )
    (draw,) = (
        command
        for command in commands(PAGE.read_text(encoding="utf-8"))
        if command.endswith("--svg plan.svg")
    )

    done = phasewise(*plan.partition(" > ")[0].replace("\\\n", " ").split()[1:])
    Path("plan.json").write_text(done.stdout, encoding="utf-8")
    phasewise(*draw.split()[1:])

    assert Path("plan.svg").read_bytes() == PICTURE.read_bytes(), f"stale picture: run the commands of {PAGE}"
