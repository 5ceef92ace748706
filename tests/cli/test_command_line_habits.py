"""Habits that hold for every command: one spelling for JSON, a checked configuration file, a full disk."""

from __future__ import annotations

import json
import tomllib
from functools import partial
from pathlib import Path

import pytest

from phasewise.cli.config_file import defaults_of
from phasewise.serving.loaders.fetching.hub import folder_of
from tests.cli import command
from tests.cli.command_options import commands


def phasewise(*arguments: str, config: Path | None = None) -> tuple[int, str]:
    done = command.run(*arguments, env={"PHASEWISE_CONFIG": str(config or "/dev/null")})
    return done.exit_code, done.stderr


@pytest.mark.parametrize("flags", [("--json",), ("-o", "json")])
@pytest.mark.parametrize("words", [("topo",), ("bench", "kv", "fixed:8/8", "-n", "5")])
def test_json_is_asked_for_in_two_ways(words: tuple[str, ...], flags: tuple[str, ...]) -> None:
    json.loads(command.text_of(*words, *flags, env={"PHASEWISE_CONFIG": "/dev/null"}))


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        line = command.run_process("topo", stdout=full.fileno()).refusal

    assert line == "phasewise: the results cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("models", "pull", "/nonexistent/x.gguf"),
            1,
            "there is no file or folder '/nonexistent/x.gguf': give",
        ),
        (("generate", "./x.gguf", "-p", "x"), 1, "there is no file or folder './x.gguf': give"),
        (
            ("bench", "serve", "http://127.0.0.1:9", "--requests", "1"),
            1,
            "does not answer: connection refused; start",
        ),
        (
            ("serve", "x.gguf", "--api-key-file", "/no/keys"),
            1,
            "/no/keys cannot be read: No such file or directory\n",
        ),
        (
            ("serve", "no-such-one", "--port", "0"),
            1,
            "no model 'no-such-one': give a .gguf file, a Hugging Face directory, ",
        ),
        (
            ("serve", "smolm2-135m", "--port", "0"),
            1,
            "no model 'smolm2-135m'; did you mean smollm2-135m-instruct?\n",
        ),
        (("serve", "SmolLM", "--port", "0"), 1, "no model 'SmolLM'; did you mean smollm2-135m-instruct?\n"),
        (("generate", "x.gguf", "-p", "x", "--top-p", "3"), 2, "--top-p"),
        (("bench", "serve", "http://127.0.0.1:9", "--slo", "foo"), 2, "--slo"),
        (("bench", "run", "x.gguf", "-p", "abc"), 2, "-p"),
        (("serve", "x.gguf", "--kv-budget", "foo"), 2, "--kv-budget"),
    ],
)
def test_the_reason_is_named_and_the_thing_that_it_concerns(
    arguments: tuple[str, ...], code: int, said: str
) -> None:
    exit_code, told = phasewise(*arguments)

    assert exit_code == code
    assert said in told
    assert not any(word in told for word in ("Errno", "Traceback", "ssl:default"))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("generate smol", ["smollm2-135m-instruct"]),
        ("pull smol", ["smollm2-135m-instruct"]),
        ("serve ./m", ["./m.gguf", "./models/"]),
        ("pull ./m", []),
        ("generate org/", ["org/own-GGUF:Q4_K_M"]),
        ("generate nothing-", []),
    ],
)
def test_the_shell_completes_names_of_models_and_files(
    tmp_path: Path, typed: str, offered: list[str]
) -> None:
    """Known names, what is in the cache, and, where a command takes a path, files that could be models."""
    (tmp_path / "m.gguf").touch()
    (tmp_path / "m.txt").touch()
    (tmp_path / "models").mkdir()
    stored = folder_of("org/own-GGUF:Q4_K_M", tmp_path / "cache" / "phasewise")
    stored.mkdir(parents=True)
    (stored / "own.Q4_K_M.gguf").touch()
    asked = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "_PHASEWISE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"phasewise {typed}",
        "COMP_CWORD": "2",
    }
    completed = command.run_process(env=asked, cwd=tmp_path)

    assert completed.exit_code == 0, completed
    assert completed.stdout.split() == offered


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\nhots = 1\n", "serve.hots is no option; did you mean host?"),
        ("[serv]\nport = 1\n", "[serv] is no command; did you mean serve?"),
        ("[bench.run]\nn-tokens = 1\n", "bench.run.n-tokens is no option"),
        ("port = 1\n", "port is no option"),
        ('[tune-config]\nno_resume = "yes"\n', "tune-config.no_resume is true or false, not 'yes'"),
        pytest.param("a = " + "[" * 50_000, "cannot be read", id="lists without end"),
        pytest.param("a = " + "{a=" * 20_000, "cannot be read", id="tables without end"),
    ],
)
def test_what_a_configuration_file_cannot_say_is_an_error_of_one_line(
    tmp_path: Path, text: str, said: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(text, encoding="utf-8")

    code, told = phasewise("topo", config=config)

    assert code == 1
    assert said in told
    assert told.count("\n") == 1


def test_a_configuration_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    code, told = phasewise("topo", config=tmp_path / "none.toml")

    assert code == 1
    assert "PHASEWISE_CONFIG names" in told


def test_a_value_is_set_shown_and_removed_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("# mine\n[eval]\nchunks = 3  # few\n", encoding="utf-8")
    config_command = partial(command.text_of, "config", env={"PHASEWISE_CONFIG": str(config)})

    config_command("set", "bench.run.repetitions", "7")
    config_command("set", "generate.prompt", "two words")
    config_command("set", "serve.kv_budget", "4G")
    config_command("set", "serve.kv_budget")
    assert config_command("show").splitlines() == [
        "eval.chunks = 3",
        "bench.run.repetitions = 7",
        'generate.prompt = "two words"',
    ]
    config_command("set", "bench.run.repetitions")
    config_command("set", "generate.prompt")
    assert config_command("show") == "eval.chunks = 3\n"
    assert config.read_text(encoding="utf-8").startswith("# mine\n[eval]\nchunks = 3  # few\n")


def test_a_key_is_the_option_s_flag_and_reaches_it(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[tune-config]\nbudget = "soon"\n', encoding="utf-8")

    code, told = phasewise("tune-config", "smollm2-135m-instruct", config=config)

    assert code == 2
    assert "'soon'; the configuration file says so" in " ".join(told.split())
    _, of_flag = phasewise("tune-config", "smollm2-135m-instruct", "--budget", "late", config=config)
    assert "'late'" in of_flag
    assert "configuration file" not in of_flag


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("no_embed_accelerators = true", ["--no-embed-accelerators"]),
        ("no_embed_accelerators = false", ["--embed-accelerators"]),
        ("embed_accelerators = false", ["--no-embed-accelerators"]),
        ('allowed_host = "here.example"', ["--allowed-host", "here.example"]),
        ('allowed_host = ["here.example", "there"]', ["--allowed-host=here.example", "--allowed-host=there"]),
    ],
)
def test_a_line_says_what_its_flag_says(line: str, flags: list[str]) -> None:
    """A flag that turns something off, and one value of an option that takes several."""
    values = defaults_of({"serve": tomllib.loads(line)}, command.tree())["serve"]
    serve = commands()["serve"]

    by_file = serve.make_context("serve", ["model"], default_map=values).params
    assert by_file == serve.make_context("serve", ["model", *flags]).params
    assert by_file != serve.make_context("serve", ["model"]).params or flags == ["--embed-accelerators"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("serve.port", "abc", "valid integer"),
        ("serve.port", "70000", "less than or equal to 65535"),
        ("serve.log_level", "loud", "is not one of"),
        ("bench.run.repetitions", "0", "greater than or equal to 1"),
        ("serve.no_prefix_reuse", "perhaps", "valid boolean"),
    ],
)
def test_a_value_that_the_option_would_refuse_is_not_set(
    tmp_path: Path, name: str, value: str, said: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("", encoding="utf-8")

    code, told = phasewise("config", "set", name, value, config=config)

    assert code == 2
    assert said in told
    assert name in told
    assert len(told.splitlines()) == 1
    assert config.read_text(encoding="utf-8") == ""


@pytest.mark.parametrize(("name", "value"), [("serve.port", "9000"), ("serve.also", "a.gguf")])
def test_a_value_that_it_takes_is_set(tmp_path: Path, name: str, value: str) -> None:
    """One value of an option that takes several, too."""
    config = tmp_path / "config.toml"
    config.write_text("", encoding="utf-8")

    assert phasewise("config", "set", name, value, config=config)[0] == 0
    assert str(tomllib.loads(config.read_text(encoding="utf-8"))["serve"][name.split(".")[1]]) == value


def test_an_option_that_no_command_has_is_not_set(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("", encoding="utf-8")

    code, told = phasewise("config", "set", "serve.hots", "1", config=config)

    assert code == 2
    assert "did you mean host?" in told
    assert config.read_text(encoding="utf-8") == ""
