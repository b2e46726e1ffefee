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

_OWN = ("config", "write_config", "help", "verb", "debug", "execute", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML with the same names as the flags; flags win")
    parser.add_argument(
        "--write-config",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the settings as YAML (to the screen, or to FILE) and do nothing else",
    )


def read_defaults(parser: argparse.ArgumentParser, file: str) -> dict[str, Any]:
    """The file's settings as the verb's flags would have given them: they become its defaults, and flags win."""
    known = {action.dest: action for action in parser._actions if action.dest not in _OWN}
    found = {}
    for key, value in _read(Path(file)).items():
        name = key.replace("-", "_")
        if name not in known:
            choices = ", ".join(sorted(k.replace("_", "-") for k in known))
            raise KLLensError(f"{file}: no setting is called {key!r}; there are {choices}")
        if value is not None:  # left empty: as if it were not there
            found[name] = _converted(known[name], value, file)
    return found


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
        return
    try:
        write_text(Path(place), text)
    except OSError as error:
        raise KLLensError(f"{place} cannot be written: {error.strerror}") from error


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
