"""One YAML file in place of flags: `--config FILE` reads it, `--write-config` shows what it would hold."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kl_lens.errors import KLLensError
from kl_lens.writing import write_text

FROM_FILE = "from_file"
_OWN = ("config", "write_config", "help", "verb", "debug", "execute", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", action=_Config, help="YAML with the same names as the flags; flags win"
    )
    parser.add_argument(
        "--write-config",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the settings as YAML (to the screen, or to FILE) and do nothing else",
    )


class _Config(argparse.Action):
    """Settings from a file take the place of defaults; a flag beside them, before or after, wins."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        known = _settings(parser)
        for key, value in _read(Path(values)).items():
            name = key.replace("-", "_")
            if name not in known:
                choices = ", ".join(sorted(k.replace("_", "-") for k in known))
                raise KLLensError(f"{values}: no setting is called {key!r}; there are {choices}")
            converted = _converted(known[name], value, values)
            if not known[name].option_strings:
                # argparse fills a missing positional in whenever it likes: kept apart until all is read.
                setattr(namespace, FROM_FILE, {**getattr(namespace, FROM_FILE, {}), name: converted})
            elif getattr(namespace, name, None) == parser.get_default(name):
                setattr(namespace, name, converted)
        setattr(namespace, self.dest, values)


def settle(arguments: argparse.Namespace, **defaults: Any) -> None:
    """Gives positional arguments their value: as typed, else from the file, else the default."""
    found = vars(arguments).pop(FROM_FILE, {})
    for name, default in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, found.get(name, default))


def write(arguments: argparse.Namespace, place: str) -> None:
    """The settings as YAML, those left at None not named."""
    settings = {
        name.replace("_", "-"): value
        for name, value in vars(arguments).items()
        if name not in _OWN and value is not None
    }
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    if place == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(place), text)


def _settings(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions if action.dest not in _OWN}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KLLensError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KLLensError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise KLLensError(f"{path}: expected lines such as `windows: 16`; see kl-lens run --write-config")
    return found


def _converted(action: argparse.Action, value: Any, place: str) -> Any:
    """The value as the flag would have given it: YAML's own types are taken, words go through the flag's type."""
    if isinstance(action.const, bool):
        if not isinstance(value, bool):
            raise KLLensError(f"{place}: {action.dest}: expected true or false, not {value!r}")
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = ",".join(str(item) for item in value)
    try:
        converted = action.type(str(value)) if callable(action.type) else str(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise KLLensError(f"{place}: {action.dest}: {value!r} does not fit ({error})") from error
    if action.choices is not None and converted not in action.choices:
        raise KLLensError(
            f"{place}: {action.dest}: {value!r} is none of {', '.join(map(str, action.choices))}"
        )
    return converted
