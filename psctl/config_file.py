"""Options from a TOML file, `--config FILE`: flags and environment variables override them.

A key is the name of an option. At the top of the file it applies to every command that has the option, in a table only
to the commands that the table's name begins: `[serve]`, `[bench]`, `[bench.slo]`. The nearest table wins.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from ..data.errors import UsageError
from .errors import message_of
from .flags import built, flag, set_from_file

_NAME = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_PATH = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_TABLE, _KEY = re.compile(rf"\s*\[\s*({_PATH})\s*\]"), re.compile(rf"\s*({_PATH})\s*=")
_NOT_IN_FILES = frozenset({"config", "help", "help_all", "version"})
_READ = f"{__name__}.read"


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a file.

    Attributes:
        words: words of the command or group whose table it is in; empty at the top.
        key: the key as written.
        value: its value.
        line: number of its line.
    """

    words: tuple[str, ...]
    key: str
    value: Any
    line: int

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.key.replace("-", "_")

    def given_to(self, param: Any) -> str | list[str]:
        """Return the value as it would be written on a command line; of a list, repeated or with commas between.

        Raises UsageError: a command line has no such value.
        """
        each = [_text_of(value) for value in (self.value if isinstance(self.value, list) else [self.value])]
        if None in each:
            raise UsageError(f"{self.key} must be text, a number, true, false, or a list of these")
        texts = [text for text in each if text is not None]
        return texts if param.multiple else ",".join(texts)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file and its settings, in the order of the file."""

    path: Path
    settings: tuple[Setting, ...]

    @classmethod
    def read(cls, path: Path) -> "ConfigFile":
        """Read a file. Raises UsageError: it cannot be read, or is not TOML."""
        try:
            text = path.read_text(encoding="utf-8-sig")
            content = tomllib.loads(text)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--config {path} cannot be read: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"--config {path} is not valid TOML: {error}") from None
        return cls(path, tuple(_settings(content, (), _lines_of(text))))

    def at(self, setting: Setting) -> str:
        """Return the place of a setting for messages."""
        return f"{self.path} line {setting.line}"

    def problems(self, root: Any) -> list[str]:
        """Return a line for each setting that no command has."""
        return [problem for each in self.settings if (problem := self._problem(each, root))]

    def _problem(self, setting: Setting, root: Any) -> str:
        command = root
        for number, word in enumerate(setting.words, 1):
            names = getattr(command, "commands", {})
            if word not in names:
                table = ".".join(setting.words[:number])
                return f"{self.at(setting)}: [{table}] is no command{_nearest(word, list(names))}"
            command = names[word]
        allowed = {name for each in _leaves(command) for name in options_of(each)}
        if setting.name in allowed:
            return ""
        of = f"of psctl {' '.join(setting.words)}" if setting.words else "of any command"
        keys = sorted(name.replace("_", "-") for name in allowed)
        return f"{self.at(setting)}: {setting.key} is no option {of}{_nearest(setting.key, keys)}"

    def of(self, words: tuple[str, ...], command: Any) -> dict[str, Setting]:
        """Return the settings of a command by parameter name."""
        options = options_of(command)
        applying = [each for each in self.settings if each.words == words[: len(each.words)] and each.name in options]
        return {each.name: each for each in sorted(applying, key=lambda each: len(each.words))}


def options_of(command: Any) -> dict[str, Any]:
    """Return the options of a command that a file may set, by parameter name."""
    params = [each for each in command.params if each.param_type_name == "option"]
    return {each.name: each for each in params if each.name not in _NOT_IN_FILES}


def words_of(context: Any) -> tuple[str, ...]:
    """Return the words of a context's command after `psctl`."""
    return () if context.parent is None else (*words_of(context.parent), context.info_name)


def settings_in(context: Any) -> dict[str, Setting]:
    """Return the settings of the file that a context has read, by parameter name."""
    read = context.meta.get(_READ)
    return {} if read is None else read.of(words_of(context), context.command)


def placed(message: str, context: Any) -> str:
    """Return an error's message with the place of the setting that it is about, if a file has set it."""
    read: ConfigFile | None = context.meta.get(_READ)
    found = settings_in(context)
    sources = {name: context.get_parameter_source(name) for name in found}
    used = [name for name, source in sources.items() if source is not None and source.name == "DEFAULT_MAP"]
    # An option whose value is refused has a source, but no value.
    refused = [name for name in used if name not in context.params]
    named = [name.replace("-", "_") for name in re.findall(r"--([\w-]+)", message)]
    at_fault = next((name for name in (*refused, *named) if name in used), None)
    return message if read is None or at_fault is None else f"{read.at(found[at_fault])}: {message}"


def use(file: ConfigFile, context: Any) -> None:
    """Make a file's settings the defaults of a context. Raises UsageError, which names the first line in error."""
    if problems := file.problems(context.find_root().command) or _set(file, context):
        raise UsageError(problems[0])


def _set(file: ConfigFile, context: Any) -> list[str]:
    """Set the options of a context's command. Returns a line for each value that no option can have."""
    context.meta[_READ] = file
    words, options = words_of(context), options_of(context.command)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, setting in (found := settings_in(context)).items():
        try:
            values[name] = setting.given_to(options[name])
        except UsageError as error:
            problems.append(f"{file.at(setting)}: {error}")
    set_from_file(context, values, {options[name].opts[0] for name, each in found.items() if each.words == words})
    return problems


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a check.

    Attributes:
        commands: keys of the settings that each command gets, by its name.
        problems: a line for each error.
    """

    commands: dict[str, list[str]]
    problems: list[str]


def check(file: ConfigFile, root: Any) -> Checked:
    """Check all settings of a file against the commands that get them: those of its tables, or else `psctl serve`.

    Args:
        file: the file.
        root: context of the application.
    """
    problems = file.problems(root.command)
    commands: dict[str, list[str]] = {}
    tables = {each.words for each in file.settings if each.words} or {("serve",)}
    for words, command in _commands(root.command, ()):
        if not any(words[: len(table)] == table for table in tables):
            continue
        context = command.context_class(command, info_name=words[-1], parent=_parents(root, words))
        errors = _set(file, context)
        commands[" ".join(words)] = [each.key for each in settings_in(context).values()]
        for param in sorted(options_of(command).values(), key=lambda param: not param.is_eager):
            try:
                param.handle_parse_result(context, {}, [])
            except (UsageError, typer.BadParameter) as error:
                errors.append(placed(message_of(error), context))
                context.params[param.name] = None
        if not errors:
            try:
                built(command, context)
            except UsageError as error:
                errors.append(placed(str(error), context))
        problems += [each for each in errors if each not in problems]
    return Checked(commands, problems)


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the commands below one, with their words."""
    for word, each in command.commands.items():
        if hasattr(each, "commands"):
            yield from _commands(each, (*words, word))
        else:
            yield (*words, word), each


def _parents(root: Any, words: tuple[str, ...]) -> Any:
    """Return the context of the group of a command."""
    context = root
    for word in words[:-1]:
        group = context.command.commands[word]
        context = group.context_class(group, info_name=word, parent=context)
    return context


def _use_path(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        use(ConfigFile.read(path.expanduser()), context)
    return path


# Eager and the first parameter: the file sets defaults of the others.
Config = Annotated[
    Path | None,
    flag(
        "--config",
        "TOML file of options, which flags and environment variables override.",
        is_shared=True,
        metavar="FILE",
        is_eager=True,
        callback=_use_path,
        rich_help_panel="Output",
    ),
]


def _settings(
    table: Mapping[str, Any], words: tuple[str, ...], lines: Mapping[tuple[str, ...], int]
) -> Iterator[Setting]:
    for key, value in table.items():
        path = (*words, key)
        if isinstance(value, dict):
            yield from _settings(value, path, lines)
        else:
            known = next(path[:count] for count in range(len(path), -1, -1) if path[:count] in lines)
            yield Setting(words, key, value, lines[known])


def _lines_of(text: str) -> dict[tuple[str, ...], int]:
    """Return the number of the line of each key, by its table's words and itself; 1 for the whole file."""
    lines: dict[tuple[str, ...], int] = {(): 1}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = _parts(match[1])
            lines.setdefault(table, number)
        elif match := _KEY.match(line):
            lines.setdefault((*table, *_parts(match[1])), number)
    return lines


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_NAME, path))


def _text_of(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None


def _leaves(command: Any) -> Iterator[Any]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from _leaves(each)


def _nearest(word: str, names: list[str]) -> str:
    near = get_close_matches(word, names, 3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
