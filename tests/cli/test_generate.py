"""`phasewise generate`: what a person and a script see, on a tiny model of random weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from phasewise.cli.main import app
from tests.support.tiers import first_is_smoke
from tests.support.tiny_models import TinyShape, tiny_gguf

pytest.importorskip("phasewise.serving.open_engine", reason="the kernels are not built", exc_type=ImportError)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "generate-cache"))
    monkeypatch.setenv("PHASEWISE_DB", str(tmp_path_factory.getbasetemp() / "none.db"))
    monkeypatch.setenv("PHASEWISE_CONFIG", "/dev/null")


def invoke(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin)


def run_json(*arguments: object, stdin: str | None = None) -> dict[str, Any]:
    result = invoke(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return dict(json.loads(result.stdout))


def test_json_tells_the_tokens_and_their_times(model: Path) -> None:
    fields = run_json(model, "-p", "hello", "-n", 9, "--ignore-eos")

    assert fields["schema_version"] == 1
    assert (fields["model"], fields["format"], fields["finish_reason"]) == ("tiny", "native", "length")
    assert fields["isa"]
    assert len(fields["prompt_token_ids"]) == 5
    assert len(fields["token_ids"]) == 9
    assert isinstance(fields["text"], str)
    assert fields["ttft_ms"] > 0
    assert fields["tokens_per_second"] == pytest.approx(1000 / fields["tpot_ms"])
    assert set(fields["plan"]) == {"prefill", "decode"}


def test_text_goes_to_stdout_and_times_to_stderr(model: Path) -> None:
    fields = run_json(model, "-p", "hello", "-n", 9)

    result = invoke(model, "-p", "hello", "-n", 9)

    assert result.stdout == fields["text"] + "\n"
    assert "5 prompt tokens" in result.stderr


def test_the_prompt_may_be_an_argument_or_a_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello", encoding="utf-8")
    wanted = run_json(model, "-p", "hello", "-n", 3)["token_ids"]

    assert run_json(model, "hello", "-n", 3)["token_ids"] == wanted
    assert run_json(model, "-f", file, "-n", 3)["token_ids"] == wanted
    assert run_json(model, "-n", 3, stdin="hello")["token_ids"] == wanted


def test_two_prompts_are_wrong_usage(model: Path) -> None:
    result = invoke(model, "hello", "-p", "hello")

    assert result.exit_code == 2
    assert "one prompt" in result.stderr


def test_a_prompt_file_that_is_no_text_is_named(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe")

    error = invoke(model, "-f", file).exception

    assert str(file) in str(error)
    assert "UTF-8" in str(error)


def test_a_share_above_one_is_wrong_usage(model: Path) -> None:
    result = invoke(model, "-p", "a", "--top-p", 7)

    assert result.exit_code == 2
    assert "--top-p" in result.stderr


def test_an_answer_that_is_cut_says_so(model: Path) -> None:
    assert "cut at 3 tokens" in invoke(model, "-p", "hello", "-n", 3, "--ignore-eos").stderr


def test_a_system_message_comes_before_the_prompt(model: Path) -> None:
    chat = run_json(model, "hi", "-n", 2, "--chat")["prompt_token_ids"]
    with_system = run_json(model, "hi", "-n", 2, "--system", "be brief")["prompt_token_ids"]

    assert with_system[-len("hi") - 3 :] == chat[-len("hi") - 3 :]
    assert len(with_system) > len(chat)


def test_one_token_has_no_rate(model: Path) -> None:
    fields = run_json(model, "-p", "hello", "-n", 1)

    assert (fields["tpot_ms"], fields["tokens_per_second"]) == (None, None)
    assert "1 token;" in invoke(model, "-p", "hello", "-n", 1).stderr


def test_the_prompt_may_come_from_stdin(model: Path) -> None:
    assert (
        run_json(model, "-p", "-", stdin="hello")["prompt_token_ids"]
        == run_json(model, "-p", "hello")["prompt_token_ids"]
    )


def test_a_chat_message_goes_through_the_template(model: Path) -> None:
    plain, chat = run_json(model, "-p", "hi", "-n", 2), run_json(model, "-p", "hi", "-n", 2, "--chat")

    assert len(chat["prompt_token_ids"]) > len(plain["prompt_token_ids"])


def test_greedy_is_the_default_and_a_seed_repeats(model: Path) -> None:
    drawn = ["--temperature", 2, "--top-p", 0.95, "-n", 20, "--ignore-eos", "-p", "hello"]

    assert run_json(model, "-p", "a b")["token_ids"] == run_json(model, "-p", "a b")["token_ids"]
    assert (
        run_json(model, *drawn, "--seed", 7)["token_ids"] == run_json(model, *drawn, "--seed", 7)["token_ids"]
    )
    assert (
        run_json(model, *drawn, "--seed", 7)["token_ids"] != run_json(model, *drawn, "--seed", 8)["token_ids"]
    )


def test_a_stop_text_ends_it(model: Path) -> None:
    text = run_json(model, "-p", "hello", "-n", 30, "--ignore-eos", "--temperature", 1, "--seed", 3)["text"]
    stop = next(one for one in text[3:] if one.isprintable() and one != "\ufffd")

    fields = run_json(
        model,
        "-p",
        "hello",
        "-n",
        30,
        "--ignore-eos",
        "--temperature",
        1,
        "--seed",
        3,
        "--stop",
        stop,
        "--stop",
        "\0",
    )

    assert fields["text"] == text[: text.find(stop)]
    assert fields["finish_reason"] == "stop"


@pytest.mark.parametrize("weight_format", ["native", "f32", "bf16", "int8", "int4"])
def test_every_format_runs(model: Path, weight_format: str) -> None:
    fields = run_json(
        model, "-p", "hello", "-n", 5, "--ignore-eos", "--format", weight_format, "--threads", 1
    )

    assert len(fields["token_ids"]) == 5
    assert fields["format"] == weight_format
    assert fields["plan"]["decode"]["source"] == "flag"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    first_is_smoke(
        [
            (["no-such-model", "-p", "a"], "no-such-model"),
            (["MODEL", "-p", ""], "no tokens"),
            (["MODEL", "-p", "a", "-n", "100000"], "context"),
            (["MODEL", "-p", "a", "--threads", "100000"], "threads"),
        ]
    ),
)
def test_what_cannot_be_done_is_one_line(model: Path, arguments: list[str], said: str) -> None:
    command = [str(model) if one == "MODEL" else one for one in arguments]
    result = subprocess.run(
        [sys.executable, "-m", "phasewise", "generate", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1
    assert last.startswith("phasewise: ")
    assert said in last
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_ctrl_c_ends_it_without_a_traceback(model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "phasewise", "generate", str(model), "-p", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(1.0)  # it waits for its prompt by now
    process.send_signal(signal.SIGINT)

    assert process.communicate(timeout=20)[1] == "phasewise: interrupted\n"
    assert process.returncode == 130


def test_a_prompt_that_is_no_text_is_one_line(model: Path) -> None:
    command = [sys.executable, "-m", "phasewise", "generate", str(model), "-p", "-"]
    result = subprocess.run(command, input=b"\xff\xfe", capture_output=True, timeout=60, check=False)

    assert (result.returncode, result.stdout) == (1, b"")
    assert b"not UTF-8" in result.stderr


def test_nothing_of_the_server_is_imported() -> None:
    """A start to the first token has 1.5 s; the web framework and the database would take half of it."""
    ours = "phasewise.serving.open_engine, phasewise.serving.one_answer, phasewise.cli.main"
    code = f"import sys, {ours}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    loaded = set(result.stdout.split())
    assert not loaded & {
        "fastapi",
        "h11",
        "sqlalchemy",
        "alembic",
        "huggingface_hub",
        "prometheus_client",
        "gguf",
    }


def test_drafts_change_no_token_and_are_counted(model: Path) -> None:
    plain = run_json(model, "-p", "hello hello hello", "-n", 100, "--ignore-eos")
    drafted = run_json(model, "-p", "hello hello hello", "-n", 100, "--ignore-eos", "--draft", "lookup")

    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["drafts"] is None
    assert set(drafted["drafts"]) == {"accepted", "rejected"}
    assert "drafted tokens accepted" in invoke(model, "-p", "hello", "-n", 9, "--draft", model).stderr


def test_a_draft_model_of_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_gguf(shape=TinyShape(vocab_size=280)).to_bytes())

    result = invoke(model, "-p", "hello", "--draft", other)

    assert result.exit_code == 1
    assert "vocabularies differ, first at token 272" in str(result.exception)
