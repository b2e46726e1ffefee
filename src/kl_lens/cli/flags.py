"""Settings from flags and from YAML files: one dataclass, two ways to fill it."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kl_lens.base.errors import KLLensError
from kl_lens.study.settings import Option, Settings, options_of


def add_arguments(
    parser: argparse.ArgumentParser, settings: type[Settings], shown: Collection[str] | None = None
) -> int:
    """An argument for every field. None has a default here: what was not typed is left to the dataclass.

    `shown`: the flags that the help names; None: all. What it leaves out works all the same. Returns how many it is.
    """
    left_out = 0
    needed = []
    groups: dict[str, Any] = {"": parser}
    for option in options_of(settings):
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        is_shown = shown is None or option.flag in shown or option.required or not option.flag
        left_out += not is_shown
        help_text = (option.meaning.replace("%", "%%") or None) if is_shown else argparse.SUPPRESS
        groups[option.group].add_argument(option.flag or option.name, **_behaviour(option), help=help_text)
        values = option.metavar or "|".join(option.choices)
        if not option.flag:
            needed.append({"?": f"[{values}]", "*": f"[{values} ...]"}.get(str(option.nargs), values))
        elif option.required:
            needed.append(f"{option.flag} {values}")
    parser.usage = " ".join(["%(prog)s", *needed, "[OPTIONS]"])
    return left_out


def _behaviour(option: Option) -> dict[str, Any]:
    behaviour: dict[str, Any] = {"default": argparse.SUPPRESS}
    if option.flag:
        behaviour |= {"dest": option.name, "required": option.required}
    if option.is_switch:
        const = True if option.bare is None else option.bare
        return behaviour | {"action": "store_const", "const": const}
    # argparse converts even its default, for what stands alone and is left out.
    behaviour["type"] = lambda text: text if text is argparse.SUPPRESS else option.read(text)
    for name, value in (("metavar", option.metavar), ("choices", option.choices), ("nargs", option.nargs)):
        if value:
            behaviour[name] = value
    if option.nargs == "?" and option.flag:
        behaviour["const"] = option.bare
    return behaviour


def typed_values(settings: type[Settings], arguments: argparse.Namespace) -> dict[str, Any]:
    """What was typed, by field."""
    typed = vars(arguments)
    named = {option.name: typed[option.name] for option in options_of(settings) if option.name in typed}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in named.items()}


def file_values(settings: type[Settings], file: str) -> dict[str, Any]:
    """The settings that a YAML file holds, by field."""
    known = {option.title.replace("-", "_"): option for option in options_of(settings)}
    values = {}
    for key, value in _read(Path(file)).items():
        option = known.get(key.replace("-", "_"))
        if option is None:
            titles = ", ".join(sorted(each.title for each in known.values()))
            raise KLLensError(f"{file}: no setting is called {key!r}; there are {titles}")
        if value is not None:  # left empty: as if it were not there
            values[option.name] = _converted(option, value, file)
    return values


class _PlainYAML(yaml.SafeLoader):
    """Without aliases: settings need none, and a few lines of them unfold into gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read in settings")
        return super().compose_node(parent, index)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _PlainYAML)
    except OSError as error:
        raise KLLensError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise KLLensError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise KLLensError(f"{path}: expected lines such as `windows: 16`; see kl-lens run --write-config")
    return content


def _converted(option: Option, value: Any, file: str) -> Any:
    """YAML's own types are taken; words go through the flag's own parser."""
    if option.is_switch:
        if not isinstance(value, bool):
            raise KLLensError(f"{file}: {option.title}: expected true or false, not {value!r}")
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = ",".join(str(item) for item in value)
    try:
        return option.read(str(value))
    except KLLensError as error:
        raise KLLensError(f"{file}: {error}") from error


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """By verb."""
    return next(dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))
