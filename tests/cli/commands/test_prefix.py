"""`phasewise prefix`: what a server keeps is seen, checked and removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.serving.engine.messages import Submit
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.workflows.opening.open_model import open_model
from tests.cli import command
from tests.serving.engine.test_stored_prefixes import finish, opened
from tests.support.models.tiny_models import TinyShape, tiny_gguf


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(shape=TinyShape(context_length=4000)).to_bytes())
    return path


def test_list_verify_and_rm_tell_what_is_there(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    served = open_model(str(model)).model
    with opened(served, folder) as server:
        server.engine.submit(Submit("a", tuple(range(3, 203)), 4, GREEDY, ignore_eos=True))
        finish(server.engine)
    listed = json.loads(command.run("prefix", "list", folder, "--json").stdout)["prefixes"]
    whole = command.run("prefix", "verify", folder)
    damaged = next(folder.glob("*.kv"))
    data = bytearray(damaged.read_bytes())
    data[500] ^= 1
    damaged.write_bytes(data)
    after_damage = command.run("prefix", "verify", folder, "--json")

    (kept,) = listed
    assert kept["model"] == "tiny"
    assert kept["n_tokens"] >= 192
    assert kept["n_blocks"] == len(list(folder.glob("*.kv"))) > 0
    assert whole.exit_code == 0
    assert after_damage.exit_code == 3
    assert [len(place["damaged"]) for place in json.loads(after_damage.stdout)["checked"]] == [1]
    assert command.run("prefix", "rm", folder, "--id", "ffff").stdout == "0 files removed\n"
    assert "--id is empty" in command.run("prefix", "rm", folder, "--id", "").usage_error
    assert len(list(folder.glob("*.kv"))) == kept["n_blocks"]
    assert command.run("prefix", "rm", folder, "--id", kept["id"]).exit_code == 0
    assert list(folder.glob("*.kv")) == []


def test_a_pipe_where_an_identity_is_described_is_not_read(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with opened(open_model(str(model)).model, folder) as server:
        server.engine.submit(Submit("a", tuple(range(3, 203)), 4, GREEDY, ignore_eos=True))
        finish(server.engine)
    (place,) = folder.glob("*.json")
    content = place.read_bytes()
    place.unlink()
    os.mkfifo(place)
    pipe = os.open(place, os.O_RDWR)
    os.write(pipe, content)

    (kept,) = json.loads(command.run("prefix", "list", folder, "--json").stdout)["prefixes"]

    assert kept["model"] is None
    assert os.read(pipe, len(content)) == content
    os.close(pipe)


def test_what_is_no_folder_of_prefixes_is_refused_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "text"
    other.write_text("hello")
    for verb in ("list", "verify", "rm"):
        for path in (other, tmp_path, tmp_path / "missing"):
            assert "no prefix cache" in command.run("prefix", verb, path).refusal
    assert other.exists()
