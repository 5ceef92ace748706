"""Typer apps whose help is plain text: examples first, options under headings, choices and flags whole."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from phasewise._options import NoEffect
from phasewise.cli.option_sets import spread
from phasewise.cli.present import EXIT_USAGE, note

MOST_USED = "Most used"
OTHER_OPTIONS = "Options"
HEADINGS_IN_ORDER = {MOST_USED: -1, OTHER_OPTIONS: 1}
"""Sort keys of headings that come first or last in help; all others stand where their first option does."""
NOUNS: dict[Any, str] = {int: "N", Path: "FILE"}
"""The noun for an option's value in help, by type; for other types the last word of the option's flag."""
EXAMPLE = "$ "
"""The beginning of an example in a command's docstring; help shows examples first."""
HYPHEN, KEPT_HYPHEN = "-", "\N{NON-BREAKING HYPHEN}"
SAYS_WHAT_IS_UNUSED = frozenset({"serve"})
"""Commands that report variables and lines of the configuration file without effect on this run. Others take
defaults such as PHASEWISE_DB silently, since some of their runs read none."""
TYPER_WORDS = "Value error, "
"""Prefix that Typer's validator puts before the reason why a value is refused."""


def _replaced(args: list[str], pairs: dict[str, dict[str, list[str]]]) -> list[str]:
    """Replace each flag and value, e.g. `-o json`, by the words that `pairs` has for them."""
    replaced: list[str] = []
    index = 0
    while index < len(args):
        words = pairs.get(args[index], {}).get(args[index + 1] if index + 1 < len(args) else "")
        replaced += [args[index]] if words is None else words
        index += 1 if words is None else 2
    return replaced


class _WholeWords(typer.Context.formatter_class):  # type: ignore[misc, valid-type]
    """Help formatter that breaks lines only at spaces, so that a flag stays in one piece."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(_kept(prog), _kept(args), prefix)

    def write_text(self, text: str) -> None:
        super().write_text(_kept(text))

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(_kept(name), _kept(text)) for name, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return str(super().getvalue()).replace(KEPT_HYPHEN, HYPHEN)


def _kept(text: str) -> str:
    return text.replace(HYPHEN, KEPT_HYPHEN)


class _WithExamples:
    """Help of a command or a group: usage, examples, description, options."""

    examples: tuple[str, ...]
    help: str | None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        shown = [text for text in paragraphs if text.startswith(EXAMPLE)]
        self.examples = tuple(line.removeprefix(EXAMPLE) for text in shown for line in text.splitlines())
        self.help = "\n\n".join(text for text in paragraphs if text not in shown)
        for parameter in getattr(self, "params", ()):
            _name_value(parameter)

    def get_help(self, ctx: Any) -> str:
        formatter = _WholeWords(width=ctx.terminal_width, max_width=ctx.max_content_width)
        self.format_help(ctx, formatter)  # type: ignore[attr-defined]
        return formatter.getvalue().rstrip("\n")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"  {example}\n")
        super().format_help_text(ctx, formatter)  # type: ignore[misc]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]


def _name_value(parameter: Any) -> None:
    """Set the noun of an option's value, unless it has one or is a choice."""
    kind = parameter.type_descriptor
    if not isinstance(parameter, TyperOption) or parameter.is_flag or kind.is_choice:
        return
    if parameter.metavar is None:
        types = (kind.annotation, *get_args(kind.annotation))  # of a list, what it holds
        last_word = parameter.opts[-1].rpartition("-")[2].upper()
        parameter.metavar = next((NOUNS[each] for each in types if each in NOUNS), last_word)


class GroupedCommand(_WithExamples, TyperCommand):
    """A command whose options are listed under the headings (`rich_help_panel`) that they were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; `--json` and `-o json` mean the same for every command that has one of them."""
        self._refuse_lines_of_the_file(ctx, args)
        flags = {flag for parameter in self.get_params(ctx) for flag in parameter.opts}
        if "--json" in flags and "-o" not in flags:
            args = _replaced(args, {"-o": {"json": ["--json"], "text": []}})
        elif "-o" in flags and "--json" not in flags:
            args = [
                part for argument in args for part in (["-o", "json"] if argument == "--json" else [argument])
            ]
        try:
            return list(super().parse_args(ctx, args))
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(TYPER_WORDS)
            wrong: Any = getattr(error, "param", None)
            if wrong is not None and _source(ctx, wrong) == "DEFAULT_MAP":
                error.message += "; the configuration file says so (phasewise config show)"
            raise

    def _refuse_lines_of_the_file(self, ctx: Any, args: list[str]) -> None:
        """Raise BadParameter for an option that only the configuration file has."""
        alone = {
            flag
            for parameter in self.get_params(ctx)
            if getattr(parameter, "hidden", False)
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        for flag in (word.partition("=")[0] for word in takewhile(lambda word: word != "--", args)):
            if flag in alone:
                line = ".".join([*_path(ctx).split(), flag.lstrip("-").replace("-", "_")])
                raise typer.BadParameter(
                    f"{flag} is a line of the configuration file: phasewise config set {line} VALUE", ctx
                )

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error with `exit_code` 2 becomes a BadParameter, told as wrong usage."""
        if ctx.params.get("log_format") == "json":  # before the first line that a server writes
            from phasewise.serving.processes.json_lines import make_stderr_json

            make_stderr_json()
        try:
            return self._followed(ctx)
        except Exception as error:
            if getattr(error, "exit_code", None) != EXIT_USAGE or isinstance(error, typer.BadParameter):
                raise
            raise typer.BadParameter(str(error), ctx) from None

    def _followed(self, ctx: Any) -> Any:
        """Run the command without the variables and lines of the configuration file that have no effect on
        this run. BadParameter for such an option on the command line."""
        parameters = {parameter.name: parameter for parameter in self.get_params(ctx)}
        for _ in parameters:
            try:
                return super().invoke(ctx)
            except NoEffect as error:
                unused = [parameters[name] for name in error.fields]
                written = [each for each in unused if _source(ctx, each) == "COMMANDLINE"]
                if written:
                    raise typer.BadParameter(error.naming([_name(each) for each in written]), ctx) from None
                if _path(ctx) in SAYS_WHAT_IS_UNUSED:
                    note(f"without effect: {', '.join(_written(ctx, each) for each in unused)} {error.where}")
                for each in unused:
                    ctx.params[each.name] = each.process_value(ctx, each.default)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        arguments: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, meaning = record
            if isinstance(parameter, TyperArgument):
                arguments.append((str(parameter.metavar), _in_words(meaning)))
            else:
                panel = getattr(parameter, "rich_help_panel", None) or OTHER_OPTIONS
                groups.setdefault(panel, []).append((name, _in_words(meaning)))
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        for heading in sorted(groups, key=lambda panel: HEADINGS_IN_ORDER.get(panel, 0)):
            with formatter.section(heading):
                formatter.write_dl(groups[heading])


def _in_words(meaning: str) -> str:
    """Rewrite the bounds in an option's help as people write them: `1 to 512`."""
    text, bracket, rest = meaning.rpartition("  [")
    rest = re.sub(r"(?<![\d.])(-?\d+)\.0(?=[;\]]|<=)", r"\1", rest)
    rest = re.sub(r"(\S+)<=x<=([^];]+)", r"\1 to \2", rest)
    return text + bracket + re.sub(r"x>=([^];]+)", r"at least \1", rest)


def _path(ctx: Any) -> str:
    """The command's words after `phasewise`, as they are typed."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.command.name)
        ctx = ctx.parent
    return " ".join(names)


def _name(parameter: Any) -> str:
    """The name of a parameter in messages: an option's flag, or an argument as help shows it."""
    if not isinstance(parameter, TyperOption):
        return str(parameter.make_metavar(None)) if parameter.metavar is None else str(parameter.metavar)
    return next((flag for flag in parameter.opts if flag.startswith("--")), parameter.opts[0])


def _source(ctx: Any, parameter: Any) -> str:
    """The name of click's ParameterSource for a value, e.g. `ENVIRONMENT`; empty where there is none."""
    source = ctx.get_parameter_source(parameter.name)
    return "" if source is None else str(source.name)


def _written(ctx: Any, parameter: Any) -> str:
    """The variable, or the line of the configuration file, that an option's value comes from."""
    if ctx.get_parameter_source(parameter.name).name == "ENVIRONMENT":
        envvar = parameter.envvar
        return str(envvar) if isinstance(envvar, str) else str(envvar[0])
    return f"{_name(parameter).lstrip('-').replace('-', '_')} of the configuration file"


class CommandGroup(_WithExamples, TyperGroup):
    """A command of subcommands."""


class GroupedCommands(CommandGroup):
    """A command whose subcommands are listed under headings, in the order of `headings`."""

    headings: ClassVar[dict[str, dict[str, Any]]]
    """The names of subcommands by heading."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        width = max(len(name) for names in self.headings.values() for name in names)
        for heading, names in self.headings.items():
            with formatter.section(heading):
                first = {name: str(self.commands[name].help).partition("\n\n")[0] for name in names}
                formatter.write_dl(
                    [(name.ljust(width), " ".join(text.split())) for name, text in first.items()]
                )


class CommandApp(typer.Typer):
    """A Typer app with our help: Typer's own drops `[words in brackets]` and breaks choices mid-word."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
            **{"cls": CommandGroup, **settings},
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        settings.setdefault("cls", GroupedCommand)
        declare = super().command

        def declared(function: Callable[..., Any]) -> Any:
            first = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
            return declare(name, **{"short_help": first, **settings})(spread(function))

        return declared


class LazyCommands(Mapping[str, Any]):
    """Commands by name, for click; each command's module is imported when the command is asked for."""

    def __init__(self, package: str, places: Mapping[str, str], hidden: Mapping[str, str]) -> None:
        self._package = package
        self._places = {**places, **hidden}
        self._hidden = hidden
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._command(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def _command(self, name: str) -> Any:
        module, _, attribute = self._places[name].partition(":")
        target = getattr(importlib.import_module(f"{self._package}.{module}"), attribute)
        alone = CommandApp()
        alone.callback()(lambda: None)
        if isinstance(target, CommandApp):
            alone.add_typer(target, name=name)
        else:
            alone.command(name, hidden=name in self._hidden)(target)
        return typer.main.get_group(alone).commands[name]
