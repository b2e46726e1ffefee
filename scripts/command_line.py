"""Prints docs/command-line.md from the program itself: `python scripts/command_line.py > docs/command-line.md`.

argparse words its help differently from one Python to the next, so the page is made from the arguments themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kl_lens.cli.main import VERBS, build_parser

INTRODUCTION = """\
# Command line

Printed by `python scripts/command_line.py > docs/command-line.md`; a test fails when this page is behind the program.

Exit codes: 0 done; 1 an error, which one line on standard error names (where several files were asked for, the
others are done all the same); 2 words that cannot be understood, a budget that nothing can meet, or a `--max-drop` of
`kl-lens evaluate` exceeded; 130 stopped by Ctrl-C: the same command goes on from there. Progress goes to standard error
too, results to standard output.

Sizes are written as `90MB`, `0.5GiB` or a number of bytes, times as `12ms`, shares as `45%` or `0.45`. A text is
`NAME:SPLIT` (`wikitext2:test`) or the path of a file or folder. A `MODEL` is a folder, a hub id or an embedded model.
"""


def page() -> str:
    parser = build_parser()
    verbs = _verbs(parser)
    lines = [INTRODUCTION, "## kl-lens", ""]
    lines += _table(action for action in parser._actions if action.option_strings)
    lines += ["", "| verb | what it does |", "|---|---|"]
    lines += [f"| [`{verb}`](#kl-lens-{verb}) | {_escaped(text)} |" for verb, text in VERBS.items()]
    for verb in VERBS:
        lines += ["", f"## kl-lens {verb}", "", _sentence(verbs[verb].description or ""), ""]
        lines += [f"`{_usage(verb, verbs[verb])}`"]
        for group in verbs[verb]._action_groups:
            if group._group_actions:
                lines += ["", f"**{group.title}**", "", *_table(group._group_actions)]
        for exclusive in verbs[verb]._mutually_exclusive_groups:
            names = [f"`{action.option_strings[-1]}`" for action in exclusive._group_actions]
            lines += ["", f"Only one of {', '.join(names)}."]
    return "\n".join(lines) + "\n"


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise LookupError("the parser has no verbs")


def _usage(verb: str, parser: argparse.ArgumentParser) -> str:
    """The verb, what has to be there, and what comes last."""
    required = [_written(a) for a in parser._actions if a.option_strings and a.required]
    given = [_values(a) for a in parser._actions if not a.option_strings]
    return " ".join(["kl-lens", verb, *given, *required, "[OPTIONS]"])


def _table(actions: Iterator[argparse.Action] | list[argparse.Action]) -> list[str]:
    rows = [f"| `{_escaped(_written(action))}` | {_meaning(action)} |" for action in actions]
    return ["| argument | meaning |", "|---|---|", *rows]


def _written(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    return " ".join(part for part in (names, _values(action)) if part)


def _values(action: argparse.Action) -> str:
    """What follows a flag, or stands alone: `N`, `[TEXT]`, `RUN …`, `use|benchmark_app|both`."""
    if action.nargs == 0:
        return ""
    if action.metavar is not None:
        names = action.metavar
    elif action.choices is not None:
        names = "|".join(map(str, action.choices))
    else:
        names = action.dest.upper()
    text = " ".join(names) if isinstance(names, tuple) else names
    return {"?": f"[{text}]", "*": f"[{text} …]", "+": f"{text} …"}.get(str(action.nargs), text)


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "") % (vars(action) | {"prog": "kl-lens"})
    text = text.replace("this help message and exit", "the help of this verb").replace(
        "program's version number and exit", "version"
    )
    if action.choices is not None and action.metavar is not None:
        text += f" ({', '.join(map(str, action.choices))})"
    if action.required and action.option_strings:
        text = "; ".join(part for part in (text, "required") if part)
    if not text and action.default not in (None, argparse.SUPPRESS, False):
        text = f"default: {action.default}"
    return _escaped(" ".join(text.split()))


def _sentence(text: str) -> str:
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
