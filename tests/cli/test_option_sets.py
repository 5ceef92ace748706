"""Option sets: a dataclass's fields are a command's options, and none is lost or renamed on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from phasewise.cli.option_sets import OptionSet, opt, option_set, spread
from phasewise.cli.options import parse_bytes


@dataclass(frozen=True)
class Tank:
    size_bytes: int = 4 << 20
    open_lid: bool = False
    names: list[str] | None = None


def _options(written: str = "4M") -> OptionSet:
    return option_set(
        Tank,
        "The tank",
        size_bytes=opt("how large", "--size", parser=parse_bytes, written=written),
        open_lid=opt("without a lid", "--open-lid"),
        names=opt("what it is called [repeatable]", "--name"),
    )


def _run(*arguments: str) -> tuple[int, str]:
    @spread(tank=_options())
    def command(what: str, tank: Tank, loud: bool = False) -> None:
        print(what, tank, loud)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_without_options_the_command_gets_the_dataclass_s_own_defaults() -> None:
    assert _run("it") == (0, f"it {Tank()} False\n")


def test_each_option_reaches_its_field() -> None:
    code, output = _run("it", "--size", "1k", "--open-lid", "--name", "a", "--name", "b", "--loud")
    assert (code, output) == (0, f"it {Tank(1024, True, ['a', 'b'])} True\n")


@dataclass(frozen=True)
class Lid:
    own: Literal["round", "square"] = "round"
    text: str = "round"


def test_a_choice_reaches_its_field_and_nothing_else_is_one() -> None:
    """Choices where the dataclass names them, and where the dataclass has a string."""
    options = option_set(Lid, own=opt("own"), text=opt("text", kind=Literal["round", "square"]))
    reached: list[Lid] = []

    @spread(lid=options)
    def command(lid: Lid) -> None:
        reached.append(lid)

    app = typer.Typer()
    app.command()(command)
    for arguments in ([], ["--own", "square", "--text", "square"]):
        assert CliRunner().invoke(app, arguments).exit_code == 0

    assert reached == [Lid(), Lid("square", "square")]
    assert CliRunner().invoke(app, ["--text", "oval"]).exit_code == 2


def test_a_value_that_cannot_be_read_names_its_option() -> None:
    code, output = _run("it", "--size", "big")
    assert code == 2
    assert "--size" in output


def test_help_shows_the_default_as_a_user_writes_it() -> None:
    assert "[default: 4M]" in _run("--help")[1]


def test_options_that_are_not_the_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="size_bytes"):
        option_set(Tank, size_bytes=opt("how large"))


def test_a_written_default_must_be_the_field_s() -> None:
    with pytest.raises(ValueError, match="8M"):
        spread(tank=_options("8M"))(lambda tank: None)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1000", 1000),
        ("4k", 4096),
        ("512M", 1 << 29),
        ("1.5GiB", 3 << 29),
        ("2 GB", 2 << 30),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "-1", "1X", "one", "1e9", "G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)
