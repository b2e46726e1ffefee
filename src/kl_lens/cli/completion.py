"""Completion of commands, flags and values for bash, zsh and fish, made from the parser."""

from __future__ import annotations

import argparse
from typing import Any

_BASH = """_kl_lens() {{
  local word words= verb= now=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case $word in {verbs}) verb=$word; break ;; esac
  done
  case "$verb $before" in
{values}
    " "*) words="{top}" ;;
{flags}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$now"))
}}
complete -o default -F _kl_lens kl-lens
"""


def completion(shell: str, parser: argparse.ArgumentParser) -> str:
    """A script for the shell to read when it starts."""
    verbs = {verb: _flags(subparser) for verb, subparser in subparsers_of(parser).items()}
    if shell == "fish":
        lines = [f"complete -c kl-lens -n __fish_use_subcommand -f -a '{' '.join(verbs)}'"]
        lines += [f"complete -c kl-lens -n __fish_use_subcommand -l {flag[2:]}" for flag in _flags(parser)]
        for verb, flags in verbs.items():
            for flag, values in flags.items():
                value = "" if values is None else f" -x -a '{' '.join(values)}'" if values else " -r"
                seen = f"'__fish_seen_subcommand_from {verb}'"
                lines.append(f"complete -c kl-lens -n {seen} -l {flag[2:]}{value}")
        return "\n".join([*lines, ""])
    # After a flag that takes a value of any kind, and for what stands alone, bash offers files.
    values = [
        f'    "{verb} {flag}") ' + (f'words="{" ".join(choices)}" ;;' if choices else "return ;;")
        for verb, flags in verbs.items()
        for flag, choices in flags.items()
        if choices is not None
    ]
    script = _BASH.format(
        verbs="|".join(verbs),
        values="\n".join(values),
        top=" ".join([*verbs, *_flags(parser)]),
        flags="\n".join(
            f'    "{verb} "*) [[ $now == -* ]] && words="{" ".join(flags)}" ;;'
            for verb, flags in verbs.items()
        ),
    )
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """By verb."""
    return next(dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def _flags(parser: argparse.ArgumentParser) -> dict[str, list[str] | None]:
    """Flag → the values it may have; None: it takes none."""
    return {
        name: None if action.nargs == 0 else [str(choice) for choice in action.choices or ()]
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }
