"""`phasewise generate`: what a person and a script see, on a tiny model of random weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cli import command
from tests.support.models.head_models import write_with_head
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

pytestmark = pytest.mark.usefixtures("own_places")

invoke = partial(command.run, "generate")
run_json = partial(command.fields_of, "generate")
MORE_THAN_A_PIPE = 70_000  # bytes that are written only when some of them are read
DRAWN = ("-p", "hello", "-n", 30, "--ignore-eos", "--temperature", 1, "--seed", 3)


def test_json_tells_the_tokens_and_their_times(tiny: Path) -> None:
    fields = run_json(tiny, "-p", "hello", "-n", 9, "--ignore-eos")

    assert (fields["model"], fields["format"], fields["finish_reason"]) == ("tiny", "native", "length")
    assert fields["isa"]
    assert len(fields["prompt_token_ids"]) == 5
    assert len(fields["token_ids"]) == 9
    assert isinstance(fields["text"], str)
    assert fields["ttft_ms"] > 0
    assert fields["tokens_per_second"] == pytest.approx(1000 / fields["tpot_ms"])
    assert set(fields["plan"]) == {"prefill", "decode"}


def test_text_goes_to_stdout_and_times_to_stderr(tiny: Path) -> None:
    fields = run_json(tiny, "-p", "hello", "-n", 9)

    result = invoke(tiny, "-p", "hello", "-n", 9)

    assert result.stdout == fields["text"] + "\n"
    assert "5 prompt tokens" in result.stderr


def test_the_prompt_may_be_an_argument_a_file_or_stdin(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello", encoding="utf-8")
    wanted = run_json(tiny, "-p", "hello", "-n", 3)["token_ids"]

    assert run_json(tiny, "hello", "-n", 3)["token_ids"] == wanted
    assert run_json(tiny, "-f", file, "-n", 3)["token_ids"] == wanted
    assert run_json(tiny, "-n", 3, stdin="hello")["token_ids"] == wanted
    assert run_json(tiny, "-p", "-", "-n", 3, stdin="hello")["token_ids"] == wanted


def test_an_answer_that_is_cut_says_so(tiny: Path) -> None:
    assert "cut at 3 tokens" in invoke(tiny, "-p", "hello", "-n", 3, "--ignore-eos").stderr


def test_a_system_message_comes_before_the_prompt(tiny: Path) -> None:
    chat = run_json(tiny, "hi", "-n", 2, "--chat")["prompt_token_ids"]
    with_system = run_json(tiny, "hi", "-n", 2, "--system", "be brief")["prompt_token_ids"]

    assert with_system[-len("hi") - 3 :] == chat[-len("hi") - 3 :]
    assert len(with_system) > len(chat)


def test_one_token_has_no_rate(tiny: Path) -> None:
    fields = run_json(tiny, "-p", "hello", "-n", 1)

    assert (fields["tpot_ms"], fields["tokens_per_second"]) == (None, None)
    assert "1 token;" in invoke(tiny, "-p", "hello", "-n", 1).stderr


def test_a_chat_message_goes_through_the_template(tiny: Path) -> None:
    plain, chat = run_json(tiny, "-p", "hi", "-n", 2), run_json(tiny, "-p", "hi", "-n", 2, "--chat")

    assert len(chat["prompt_token_ids"]) > len(plain["prompt_token_ids"])


def test_greedy_is_the_default_and_a_seed_repeats(tiny: Path) -> None:
    drawn = ["--temperature", 2, "--top-p", 0.95, "-n", 20, "--ignore-eos", "-p", "hello"]

    assert run_json(tiny, "-p", "a b")["token_ids"] == run_json(tiny, "-p", "a b")["token_ids"]
    assert (
        run_json(tiny, *drawn, "--seed", 7)["token_ids"] == run_json(tiny, *drawn, "--seed", 7)["token_ids"]
    )
    assert (
        run_json(tiny, *drawn, "--seed", 7)["token_ids"] != run_json(tiny, *drawn, "--seed", 8)["token_ids"]
    )


def test_a_stop_text_ends_it(tiny: Path) -> None:
    text = run_json(tiny, *DRAWN)["text"]
    stop = next(letter for letter in text[3:] if letter.isprintable() and letter != "\ufffd")

    fields = run_json(tiny, *DRAWN, "--stop", stop, "--stop", "\0")

    assert fields["text"] == text[: text.find(stop)]
    assert fields["finish_reason"] == "stop"


@pytest.mark.parametrize("weight_format", ["native", "f32", "bf16", "int8", "int4"])
def test_every_format_runs(tiny: Path, weight_format: str) -> None:
    fields = run_json(tiny, "-p", "hello", "-n", 5, "--ignore-eos", "--format", weight_format, "--threads", 1)

    assert len(fields["token_ids"]) == 5
    assert fields["format"] == weight_format
    assert fields["plan"]["decode"]["source"] == "flag"


@pytest.mark.parametrize(
    "arguments",
    [("hello", "-p", "hello"), ("-", "-p", "hello"), ("-", "-f", "file"), ("-p", "a", "--top-p", 7)],
)
def test_two_prompts_and_a_share_above_one_are_wrong_usage(tiny: Path, arguments: tuple[object, ...]) -> None:
    told = invoke(tiny, *arguments).usage_error

    assert "--top-p" in told or "one prompt" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such-model", "-p", "a"), ["no-such-model"]),
        (("MODEL", "-p", ""), ["no tokens"]),
        (("MODEL", "-p", "a", "-n", "100000"), ["context"]),
        (("MODEL", "-p", "a", "--threads", "100000"), ["threads"]),
        (("MODEL", "-f", "NO TEXT"), ["prompt.bin", "UTF-8"]),
        (("MODEL", "-p", "-"), ["not UTF-8"]),
        (("MODEL", "-p", "hello", "--draft", "OTHER"), ["vocabularies differ, first at token 272"]),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tiny: Path, tmp_path: Path, arguments: tuple[str, ...], said: list[str]
) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", shape=TinyShape(vocab_size=280))
    paths = {"MODEL": tiny, "OTHER": other, "NO TEXT": tmp_path / "prompt.bin"}
    paths["NO TEXT"].write_bytes(b"\xff\xfe")

    line = invoke(*(paths.get(word, word) for word in arguments), stdin=b"\xff\xfe").stderr.splitlines()[-1]

    assert line.startswith("phasewise: ")
    assert all(words in line for words in said)


def test_ctrl_c_ends_it_without_a_traceback(tiny: Path) -> None:
    process = command.start("generate", tiny, "-p", "-")
    assert process.stdin is not None
    process.stdin.write("a" * MORE_THAN_A_PIPE)
    process.stdin.flush()  # it has read some of its prompt, and waits for the rest
    process.send_signal(signal.SIGINT)

    assert process.communicate(timeout=60)[1] == "phasewise: interrupted\n"
    assert process.returncode == 130


def test_nothing_of_the_server_is_imported() -> None:
    """A start to the first token has 1.5 s; the web framework and the database would take half of it."""
    ours = "phasewise.serving.engine.open_engine, phasewise.serving.engine.live_request, phasewise.cli.main"
    code = f"import sys, {ours}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    loaded = set(result.stdout.split())
    assert not loaded & {
        "starlette",
        "h11",
        "sqlalchemy",
        "alembic",
        "huggingface_hub",
        "prometheus_client",
        "gguf",
    }


def test_drafts_change_no_token_and_are_counted(tiny: Path) -> None:
    asked = (tiny, "-p", "hello hello hello", "-n", 100, "--ignore-eos")
    plain, drafted = (run_json(*asked, *draft) for draft in (("--draft", "off"), ()))

    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["drafts"] is None
    assert set(drafted["drafts"]) == {"accepted", "rejected"}
    assert "drafted tokens accepted" in invoke(tiny, "-p", "hello", "-n", 9, "--draft", tiny).stderr


def test_a_head_in_the_files_drafts_unless_it_is_left_out(tmp_path: Path) -> None:
    write_with_head(tmp_path / "tiny", "qwen35", 0.02)
    asked = (tmp_path / "tiny", "-p", "hello", "-n", 60, "--ignore-eos")

    by_itself, named, plain = (
        run_json(*asked, *draft) for draft in ((), ("--draft", "mtp"), ("--draft", "off"))
    )

    assert by_itself["token_ids"] == named["token_ids"] == plain["token_ids"]
    assert plain["drafts"] is None
    assert by_itself["drafts"]["accepted"] + by_itself["drafts"]["rejected"] > 0
    assert "--draft off" in invoke(*asked).stderr


def test_a_head_that_is_not_there_is_one_line(tiny: Path) -> None:
    assert "has no head that drafts" in invoke(tiny, "-p", "hello", "--draft", "mtp").stderr


# ---- a database that is only there to make it faster -------------------------------------------------------

NO_SERVER = "postgresql+psycopg://phasewise@/name?host=/nonexistent"


@pytest.mark.parametrize("draft", ["off", "lookup"])
def test_a_database_that_is_absent_costs_one_line(draft: str, tiny: Path, tmp_path: Path) -> None:
    """A missing server and a missing file change no answer."""
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"no database" * 999)
    wanted = run_json(tiny, *DRAWN)["token_ids"]

    for db in (NO_SERVER, broken):
        answered = command.run_process("generate", tiny, *DRAWN, "--draft", draft, "--json", "--db", db)
        assert answered.exit_code == 0, answered.output
        assert json.loads(answered.stdout)["token_ids"] == wanted
        assert answered.stderr.count("this start goes on with default plans and schedules") == 1
        assert answered.stderr.count(str(db).partition("?")[0]) == 1


def test_what_names_no_database_at_all_is_refused(tiny: Path) -> None:
    assert "unknown kind" in invoke(tiny, "-p", "x", "--db", "nosuch://host/name").refusal
