"""Completion for bash, zsh and fish, made from the parser: verbs, flags, and values where they can be listed."""

from __future__ import annotations

import argparse
import re
import shlex

SHELLS = ("bash", "zsh", "fish")


def completion(shell: str, parser: argparse.ArgumentParser) -> str:
    """A script for the shell to read when it starts."""
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    verbs = {choice.dest: choice.help or "" for choice in subparsers._choices_actions}
    flags = {verb: _flags(subparsers.choices[verb]) for verb in verbs}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](verbs, flags, [f for f, *_ in _flags(parser)])


Flag = tuple[str, str, list[str] | None]  # --menu, what it means, its values; None: it takes none


def _flags(parser: argparse.ArgumentParser) -> list[Flag]:
    found: list[Flag] = []
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--"):
                meaning = (
                    "" if action.help in (None, argparse.SUPPRESS) else str(action.help).replace("%%", "%")
                )
                values = None if action.nargs == 0 else [str(choice) for choice in action.choices or ()]
                found.append((name, meaning, values))
    return found


def _bash(verbs: dict[str, str], flags: dict[str, list[Flag]], top: list[str]) -> str:
    values = [
        f'    "{verb} {name}") words={shlex.quote(" ".join(choices))} ;;'
        for verb, each in flags.items()
        for name, _, choices in each
        if choices
    ]
    # After a flag that takes a value of any kind, and for what stands alone, bash offers files.
    free = [f'"{verb} {name}"' for verb, each in flags.items() for name, _, choices in each if choices == []]
    named = [
        f'    "{verb} "*) [[ $now == -* ]] && words="{" ".join(f for f, *_ in each)}" ;;'
        for verb, each in flags.items()
    ]
    return "\n".join(
        [
            "_kl_lens() {",
            "  local word words= verb= now=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}",
            '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
            f"    case $word in {'|'.join(verbs)}) verb=$word; break ;; esac",
            "  done",
            '  case "$verb $before" in',
            *values,
            f"    {'|'.join(free)}) return ;;",
            f'    " "*) words="{" ".join([*verbs, *top])}" ;;',
            *named,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$now"))',
            "}",
            "complete -o default -F _kl_lens kl-lens",
            "",
        ]
    )


def _zsh(verbs: dict[str, str], flags: dict[str, list[Flag]], top: list[str]) -> str:
    def spec(flag: Flag) -> str:
        name, meaning, values = flag
        told = re.sub(r"([\[\]:\\])", r"\\\1", meaning)
        value = "" if values is None else f":value:({' '.join(values)})" if values else ":value:_files"
        return shlex.quote(f"{name}[{told}]{value}")

    described = " ".join(shlex.quote(f"{verb}:{meaning}") for verb, meaning in verbs.items())
    cases = [
        f"    {verb}) _arguments {' '.join(map(spec, each))} '*:file:_files' ;;"
        for verb, each in flags.items()
    ]
    return "\n".join(
        [
            "#compdef kl-lens",
            "_kl_lens() {",
            f"  local -a verbs=({described})",
            f"  if (( CURRENT == 2 )); then _describe verb verbs; compadd -- {' '.join(top)}; return; fi",
            "  local verb=$words[2]; shift words; (( CURRENT-- ))",
            "  case $verb in",
            *cases,
            "  esac",
            "}",
            "compdef _kl_lens kl-lens",
            "",
        ]
    )


def _fish(verbs: dict[str, str], flags: dict[str, list[Flag]], top: list[str]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [f"complete -c kl-lens -n __fish_use_subcommand -l {name[2:]}" for name in top]
    for verb, meaning in verbs.items():
        lines.append(f"complete -c kl-lens -n __fish_use_subcommand -f -a {verb} -d {quoted(meaning)}")
        for name, told, values in flags[verb]:
            value = "" if values is None else f" -x -a {quoted(' '.join(values))}" if values else " -r"
            seen = quoted(f"__fish_seen_subcommand_from {verb}")
            lines.append(f"complete -c kl-lens -n {seen} -l {name[2:]}{value} -d {quoted(told)}")
    return "\n".join([*lines, ""])
