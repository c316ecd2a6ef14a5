"""Options from dataclasses: a command takes a dataclass as one parameter, and users see an option for each field.

The option of a field is in its `Annotated` type or, if the dataclass belongs to a layer without knowledge of command
lines, in the `Flags` that annotate the command's parameter. Types and defaults are those of the fields.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo


def flag(names: str, about: str, *, is_shared: bool = False, **settings: Any) -> OptionInfo:
    """Return an option with its help.

    Args:
        names: names of the option, as in "--name", "--name -n" or "--name/--no-name".
        about: the help text.
        is_shared: whether all commands also read it from `PSCTL_<NAME>`.
        settings: further arguments of `typer.Option`.
    """
    first, *others = names.split()
    envvar = f"PSCTL_{_parameter_name(first).upper()}" if is_shared else None
    # The others follow one rule, which the help gives once.
    return typer.Option(first, *others, help=about, envvar=envvar, show_envvar=is_shared, **settings)


@dataclass(frozen=True)
class Flags:
    """The options that set the fields of a dataclass, used as annotation of a command's parameter.

    Attributes:
        kind: the dataclass.
        options: option of each field, or flags of a field that is a dataclass itself, by name.
        fixed: values of fields without an option, set by the command. All other fields keep their defaults.
        panel: title of their part of the help.
    """

    kind: type[Any]
    options: "Mapping[str, OptionInfo | Flags]"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    panel: str | None = None

    def __post_init__(self) -> None:
        unknown = {*self.options, *self.fixed} - {each.name for each in fields(self.kind)}
        assert not unknown, f"{self.kind.__name__} has no field {', '.join(unknown)}"

    @classmethod
    def of(cls, kind: type[Any]) -> "Flags":
        """Return the flags of a dataclass whose fields have their options in their types, and its `PANEL` as panel."""
        return cls(
            kind,
            {
                name: option
                for name, hint in get_type_hints(kind, include_extras=True).items()
                for option in get_args(hint)[1:]
                if isinstance(option, OptionInfo | Flags)
            },
            panel=getattr(kind, "PANEL", None),
        )

    def only(self, *names: str) -> "Flags":
        """Return flags with only the options of these fields."""
        return replace(self, options={name: self.options[name] for name in names})

    def without(self, *names: str) -> "Flags":
        """Return flags without the options of these fields."""
        assert {*names} <= {*self.options}, f"{self.kind.__name__} has no option for one of {names}"
        return replace(self, options={name: self.options[name] for name in self.options if name not in names})

    def using(self, **options: "OptionInfo | Flags") -> "Flags":
        """Return flags with other options for these fields."""
        return replace(self, options={**self.options, **options})

    def fixing(self, **values: Any) -> "Flags":
        """Return flags with fixed values for these fields, which then have no options."""
        left = {name: option for name, option in self.options.items() if name not in values}
        return replace(self, options=left, fixed={**self.fixed, **values})

    def names(self) -> set[str]:
        """Return the first name of every option, such as "--order"."""
        found: set[str] = set()
        for option in self.options.values():
            found |= option.names() if isinstance(option, Flags) else {_first_name(option)}
        return found

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield the parameters from which typer builds the options."""
        for each in fields(self.kind):
            option = self.options.get(each.name)
            if isinstance(option, Flags):
                yield from option.parameters()
            elif option is not None:
                default = each.default_factory() if each.default_factory is not MISSING else each.default
                option = copy(option)
                option.rich_help_panel = option.rich_help_panel or self.panel
                yield inspect.Parameter(
                    _name_of(option),
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=Annotated[_plain_type(each.type), option],
                )

    def build(self, given: dict[str, Any]) -> Any:
        """Remove the options' values from `given`, and build the dataclass from them.

        Raises UsageError: as the dataclass, if a value is not allowed.
        """
        values = dict(self.fixed)
        for name, option in self.options.items():
            if isinstance(option, Flags):
                values[name] = option.build(given)
            else:
                values[name] = given.pop(_name_of(option))
        return self.kind(**values)


def expanded(command: Callable[..., None], **added: Any) -> Callable[..., None]:
    """Return the command in the form for typer, with single options for each parameter that is a dataclass.

    A leading `~` in a path becomes the home folder.

    Args:
        command: function of the command.
        added: annotations of options, by parameter name, that the command has besides its own and does not receive,
            unless it has a parameter of this name. Their default is None.
    """
    groups: dict[str, Flags] = {}
    own = inspect.signature(command).parameters
    added = {name: each for name, each in added.items() if name not in own}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=each)
        for name, each in added.items()
    ]
    for parameter in own.values():
        flags = _flags_of(parameter.annotation)
        if flags is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            groups[parameter.name] = flags
            parameters += flags.parameters()

    def run(**given: Any) -> None:
        given = {name: _without_tilde(value) for name, value in given.items() if name not in added}
        command(**{name: flags.build(given) for name, flags in groups.items()}, **given)

    run.groups = groups  # type: ignore[attr-defined]
    # Not functools.wraps: typer follows `__wrapped__` for annotations and would see the dataclasses again.
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def built(command: Any, context: Any) -> dict[str, Any]:
    """Return the dataclasses of a command, built from the options of a context. Raises UsageError as they do."""
    given = {name: _without_tilde(value) for name, value in context.params.items()}
    return {name: flags.build(given) for name, flags in getattr(command.callback, "groups", {}).items()}


def given_flags(context: typer.Context) -> dict[str, Any]:
    """Return the values of the options given on the command line, or in the command's own table of a file, by flag."""
    chosen = _from_file(context).chosen
    return {
        param.opts[0]: context.params[param.name]
        for param in context.command.params
        if param.name is not None
        and (context.get_parameter_source(param.name).name == "COMMANDLINE" or param.opts[0] in chosen)  # type: ignore[union-attr]
    }


def preset_flag(names: str, about: str, **values: Any) -> OptionInfo:
    """Return a switch that sets several options to `values`, by parameter name, unless the user gives others."""

    def apply(context: typer.Context, is_on: bool) -> bool:
        if is_on:
            preset(context, values)
        return is_on

    # Eager, so that it runs before the other options look up their defaults.
    return flag(names, about, is_eager=True, callback=apply)


def preset(context: typer.Context, values: Mapping[str, Any]) -> None:
    """Set other defaults of options, by parameter name, except those from a file; for callbacks of eager options."""
    context.default_map = {**(context.default_map or {}), **values, **_from_file(context).values}


@dataclass(frozen=True, slots=True)
class _FromFile:
    """Options from a file, by parameter name; those of `chosen`, by flag, count as given to the command."""

    values: Mapping[str, Any] = field(default_factory=dict)
    chosen: Collection[str] = ()


def set_from_file(context: Any, values: Mapping[str, Any], chosen: Collection[str]) -> None:
    """Set options from a file, by parameter name.

    Args:
        context: context of the command.
        values: the options, which have precedence over presets and defaults.
        chosen: flags of those that count as given to the command.
    """
    # Contexts share `meta` with those of their groups.
    is_command = not hasattr(context.command, "commands")
    context.meta[_key_of(context)] = _FromFile(values, chosen if is_command else ())
    preset(context, {})


def _from_file(context: Any) -> _FromFile:
    return context.meta.get(_key_of(context), _FromFile())


def _key_of(context: Any) -> str:
    return f"{__name__}.{context.command_path}"


def _flags_of(annotation: Any) -> Flags | None:
    found = [each for each in get_args(annotation)[1:] if isinstance(each, Flags)]
    if found:
        return found[0]
    return Flags.of(annotation) if isinstance(annotation, type) and is_dataclass(annotation) else None


def _plain_type(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _name_of(option: OptionInfo) -> str:
    return _parameter_name(_first_name(option))


def _first_name(option: OptionInfo) -> str:
    # In `Annotated`, typer keeps the first name in place of the default.
    return str(option.default).partition("/")[0]


def _parameter_name(option: str) -> str:
    return option.partition("/")[0].lstrip("-").replace("-", "_")


def _without_tilde(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_tilde(each) for each in value]
    return value.expanduser() if isinstance(value, Path) else value
