"""Settings from flags and from YAML files: one dataclass, two ways to fill it."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from kl_lens.base.errors import KLLensError
from kl_lens.study.settings import Option, Settings, converted, options_of
from kl_lens.study.study import settings_of


def add_arguments(
    parser: argparse.ArgumentParser,
    settings: type[Settings],
    shown: Collection[str] | None = None,
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
        is_shown = (
            shown is None or option.flag in shown or option.required or not option.flag
        )
        left_out += not is_shown
        help_text = (
            (option.meaning.replace("%", "%%") or None) if is_shown else argparse.SUPPRESS
        )
        behaviour = _behaviour(option)
        groups[option.group].add_argument(
            option.flag or option.name, **behaviour, help=help_text
        )
        for name in option.former:
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, **behaviour, help=argparse.SUPPRESS)
        values = option.metavar or "|".join(option.choices)
        if not option.flag:
            needed.append(
                {"?": f"[{values}]", "*": f"[{values} ...]"}.get(
                    str(option.nargs), values
                )
            )
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
    behaviour["type"] = lambda text: (
        text if text is argparse.SUPPRESS else option.read(text)
    )
    for name, value in (
        ("metavar", option.metavar),
        ("choices", () if option.several else option.choices),
        ("nargs", option.nargs),
    ):
        if value:
            behaviour[name] = value
    if option.nargs == "?" and option.flag:
        behaviour["const"] = option.bare
    return behaviour


def settings_from(arguments: argparse.Namespace) -> Settings:
    """The verb's settings: what was typed, then what a --config file says, then the defaults."""
    settings = settings_of(arguments.verb)
    values = dict[str, Any]()
    if file := getattr(arguments, "config", None):
        try:
            values = converted(settings, _read(Path(file)))
        except KLLensError as error:
            raise KLLensError(f"{file}: {error}") from error
    for option in options_of(settings):
        if option.name in arguments:
            typed = getattr(arguments, option.name)
            values[option.name] = tuple(typed) if isinstance(typed, list) else typed
    return settings.of(**values)


class _PlainYAML(yaml.SafeLoader):
    """Without aliases: settings need none, and a few lines of them unfold into gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read in settings")
        return super().compose_node(parent, index)


def _read(path: Path) -> dict[str, Any]:
    """By setting; flags' own spelling is fine too."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _PlainYAML)
    except OSError as error:
        raise KLLensError(f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise KLLensError(f"not YAML: {' '.join(str(error).split())}") from error
    if content is not None and not (
        isinstance(content, dict) and all(isinstance(k, str) for k in content)
    ):
        raise KLLensError(
            "expected lines such as `windows: 16`; see kl-lens run --write-config"
        )
    return {key.replace("-", "_"): value for key, value in (content or {}).items()}
