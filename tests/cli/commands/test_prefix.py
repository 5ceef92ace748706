"""`phasewise prefix`: a system prompt with its tools is computed once, read by a server, seen and removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import ModelText
from phasewise.serving.prefix_store.pack_file import Pack
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.workflows.opening.open_model import open_model
from tests.cli import command
from tests.serving.engine.test_stored_prefixes import finish, opened, said
from tests.support.models.tiny_models import TinyShape, tiny_gguf
from tests.support.prefix_packs import write_pack

SYSTEM = "You are a careful assistant that answers in short sentences, and only what it knows. " * 3
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(shape=TinyShape(context_length=4000)).to_bytes())
    return path


def test_a_pack_of_a_text_is_read_and_changes_no_answer(model: Path, tmp_path: Path) -> None:
    text, pack = tmp_path / "text", tmp_path / "text.pack"
    text.write_text(SYSTEM)
    told = json.loads(command.run("prefix", "pack", model, "--text-file", text, "-o", pack, "--json").stdout)
    opened_model = open_model(str(model)).model
    prompt = (*ModelText(opened_model).encode(SYSTEM, True), 70, 71, 72)
    with opened(opened_model, None) as alone:
        alone.engine.submit(Submit("a", prompt, 8, GREEDY, ignore_eos=True))
        expected = finish(alone.engine)["a"]
    with opened(opened_model, None, packs=(str(pack),)) as server:
        server.engine.submit(Submit("a", prompt, 8, GREEDY, ignore_eos=True, cache_space="a key"))
        answer = finish(server.engine)["a"]

    assert isinstance(answer, Answer)
    assert said(answer) == said(expected)
    assert told["n_tokens"] == len(prompt) - 3
    assert answer.n_cached == told["n_tokens"] // 16 * 16


def test_a_pack_of_a_system_prompt_has_the_tokens_of_every_conversation(model: Path, tmp_path: Path) -> None:
    tools, pack = tmp_path / "tools.json", tmp_path / "pack"
    tools.write_text(json.dumps(TOOLS))
    for asked in ([], ["--tools", tools]):
        done = command.run("prefix", "pack", model, "--system", SYSTEM, *asked, "-o", pack)
        assert done.exit_code == 0, done.stderr
        opened_pack = Pack.open(pack)
        ids = ModelText(open_model(str(model)).model).conversation(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]
        )
        assert asked or tuple(ids[: len(opened_pack.facts.token_ids)]) == opened_pack.facts.token_ids
        opened_pack.close()


def test_list_verify_and_rm_tell_what_is_there(model: Path, tmp_path: Path) -> None:
    pack, folder = tmp_path / "pack", tmp_path / "kept"
    write_pack(pack, range(100))
    served = open_model(str(model)).model
    with opened(served, folder) as server:
        server.engine.submit(Submit("a", tuple(range(3, 203)), 4, GREEDY, ignore_eos=True))
        finish(server.engine)
    listed = json.loads(command.run("prefix", "list", pack, folder, "--json").stdout)["prefixes"]
    whole = command.run("prefix", "verify", pack, folder)
    damaged = next(folder.glob("*.kv"))
    data = bytearray(damaged.read_bytes())
    data[500] ^= 1
    damaged.write_bytes(data)
    after_damage = command.run("prefix", "verify", folder, "--json")

    assert [(prefix["kind"], prefix["model"], prefix["n_tokens"]) for prefix in listed] == [
        ("pack", "tiny", 100),
        ("folder", "tiny", listed[1]["n_tokens"]),
    ]
    assert listed[1]["n_blocks"] == len(list(folder.glob("*.kv")))
    assert whole.exit_code == 0
    assert after_damage.exit_code == 3
    assert [len(place["damaged"]) for place in json.loads(after_damage.stdout)["checked"]] == [1]
    assert command.run("prefix", "rm", folder, "--id", "ffff").stdout == "0 files removed\n"
    assert "--id is empty" in command.run("prefix", "rm", folder, "--id", "").usage_error
    assert len(list(folder.glob("*.kv"))) == listed[1]["n_blocks"]
    assert command.run("prefix", "rm", folder, "--id", listed[1]["id"]).exit_code == 0
    assert list(folder.glob("*.kv")) == []
    assert "--id has no effect" in command.run("prefix", "rm", pack, "--id", listed[0]["id"]).usage_error
    assert pack.exists()
    assert command.run("prefix", "rm", pack).exit_code == 0
    assert not pack.exists()


def test_what_is_neither_pack_nor_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "text"
    other.write_text("hello")
    for verb in ("list", "verify", "rm"):
        assert "no prefix pack" in command.run("prefix", verb, other).refusal
        assert "no prefix cache" in command.run("prefix", verb, tmp_path).refusal
    assert other.exists()


def test_a_pack_needs_one_beginning_that_fits(model: Path, tmp_path: Path) -> None:
    pack, tools = tmp_path / "pack", tmp_path / "tools"
    tools.write_text("{}")
    long = tmp_path / "long"
    long.write_text("x" * 5000)
    run = lambda *more: command.run("prefix", "pack", model, "-o", pack, *more)  # noqa: E731

    assert run().exit_code == 2
    assert run("--system", "a", "--text-file", long).exit_code == 2
    assert "list of tools" in run("--tools", tools).refusal
    assert "1 to 3999" in run("--text-file", long).refusal
    long.write_text("x" * 9)
    assert "too few to keep any: a pack holds keys and values of 16 tokens" in run("--text-file", long).stderr
    assert not pack.exists()
