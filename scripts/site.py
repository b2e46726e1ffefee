"""A hook of mkdocs (mkdocs.yml): adds the pages that are made when the site is built and are not in the repository.

- README.md, CONTRIBUTING.md and CHANGELOG.md from the root, with links as they are inside docs/
- tour.md: examples/tour.ipynb with its outputs
- reference/command-line.md: every verb and flag, from the program's own parser
- reference/python.md: every public name, from `__all__`, signatures and docstrings
"""

from __future__ import annotations

import argparse
import html
import importlib
import inspect
import json
import pkgutil
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import kl_lens
from kl_lens.cli.main import VERBS, build_parser

ROOT = Path(__file__).resolve().parent.parent
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
TOUR = "examples/tour.ipynb"

COMMAND_LINE = """\
# Command line

`kl-lens VERB --help` shows the usual flags of a verb. This page has all of them.

Results go to standard output; progress, warnings and errors go to standard error. The exit code is 0 for success, 1 for
an error, 2 for a command that cannot be understood, a budget that cannot be met, or a `--task-drop` of `evaluate` that
was exceeded, 70 for a fault of KL Lens, and 130 after Ctrl-C. Type the same command again to resume it.

Write sizes as `90MB`, `0.5GiB` or a number of bytes, shares as `45%` or `0.45`. A `TEXT` is
`NAME:SPLIT` (`wikitext2:test`) or the path of a file or folder. A `MODEL` is a folder, a hub id or an embedded model.
"""

PYTHON = """\
# Python

Every public name: what is in the `__all__` of a package. Other names may change without notice. Start with
[`kl_lens.Study`](#kl_lens); it does everything that the command line does.

Errors caused by the input are subclasses of `kl_lens.KLLensError`, with a message of one line.
"""


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {path: from_root(name) for name, path in FROM_ROOT.items()}
    pages["index.md"] = "---\nhide: [navigation]\n---\n" + pages["index.md"]
    pages["tour.md"] = notebook(ROOT / TOUR)
    pages |= {
        "reference/command-line.md": command_line(),
        "reference/python.md": python(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Pygments takes commands without a prompt in front of them for output."""
    return markdown.replace("```console", "```bash")


def from_root(name: str) -> str:
    """A page of the repository's root as docs/ would have it."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    for original, local in {**FROM_ROOT, TOUR: "tour.md"}.items():
        text = text.replace(f"]({original}", f"]({local}")
    return text


def notebook(path: Path) -> str:
    """A notebook as a page: text, code, and what the code gave."""
    lines = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        lines += [
            source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```",
            "",
        ]
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/svg+xml" in data:
                lines.append(f"<div>{''.join(data['image/svg+xml'])}</div>")
            elif "text/html" in data:
                lines.append(
                    re.sub(
                        r'<style.*?</style>|\n| border="1" class="dataframe"',
                        "",
                        "".join(data["text/html"]),
                        flags=re.DOTALL,
                    )
                )
            else:
                lines.append(
                    f"```text\n{''.join(output.get('text', data.get('text/plain', ''))).rstrip()}\n```"
                )
            lines.append("")
    return "\n".join(lines)


# -- the command line -------------------------------------------------------------------------------------------------


def command_line() -> str:
    parser = build_parser()
    verbs = next(
        a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)
    )
    lines = [COMMAND_LINE, "| verb | what it does |", "|---|---|"]
    lines += [
        f"| [`{verb}`](#kl-lens-{verb}) | {_escaped(text)} |"
        for verb, text in VERBS.items()
    ]
    for verb in VERBS:
        lines += ["", f"## kl-lens {verb}", "", _escaped(verbs[verb].description or "")]
        lines += ["", "```text", _usage(verb, verbs[verb]), "```"]
        for group in verbs[verb]._action_groups:
            actions = [
                action
                for action in group._group_actions
                if "--help" not in action.option_strings
            ]
            if actions:
                lines += [
                    "",
                    f"**{(group.title or '').capitalize()}**",
                    "",
                    *_table(actions),
                ]
        for exclusive in verbs[verb]._mutually_exclusive_groups:
            names = [
                f"`{action.option_strings[-1]}`" for action in exclusive._group_actions
            ]
            lines += ["", f"Only one of {', '.join(names)}."]
    return "\n".join(lines) + "\n"


def _usage(verb: str, parser: argparse.ArgumentParser) -> str:
    required = [_written(a) for a in parser._actions if a.option_strings and a.required]
    positional = [_values(a) for a in parser._actions if not a.option_strings]
    return " ".join(["kl-lens", verb, *positional, *required, "[OPTIONS]"])


def _table(actions: Iterable[argparse.Action]) -> list[str]:
    rows = [
        f"| <code>{_cell(_written(action))}</code> | {_meaning(action)} |"
        for action in actions
    ]
    return ["| argument | meaning |", "|---|---|", *rows]


def _written(action: argparse.Action) -> str:
    return " ".join(
        part for part in (", ".join(action.option_strings), _values(action)) if part
    )


def _values(action: argparse.Action) -> str:
    """What follows a flag, or stands alone: `N`, `[TEXT]`, `RUN …`, `bytes|kl|seconds`."""
    if action.nargs == 0:
        return ""
    choices = (
        "|".join(map(str, action.choices))
        if action.choices is not None
        else action.dest.upper()
    )
    names = choices if action.metavar is None else action.metavar
    text = " ".join(names) if isinstance(names, tuple) else names
    return {"?": f"[{text}]", "*": f"[{text} …]", "+": f"{text} …"}.get(
        str(action.nargs), text
    )


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "") % (vars(action) | {"prog": "kl-lens"})
    if action.choices is not None and action.metavar is not None:
        text += f" ({', '.join(map(str, action.choices))})"
    if action.required and action.option_strings:
        text = "; ".join(part for part in (text, "required") if part)
    return _escaped(text)


def _escaped(text: str) -> str:
    """For a cell of a table or an item of a list."""
    return _plain(" ".join(text.split())).replace("|", "\\|")


def _cell(text: str) -> str:
    """A bar inside `code` would end the cell of a table."""
    return html.escape(text).replace("|", "&#124;")


def _plain(text: str) -> str:
    """`<model>` is no tag of HTML."""
    return re.sub(r"(`[^`]*`)|<", lambda match: match[1] or "&lt;", text)


# -- Python -----------------------------------------------------------------------------------------------------------


def packages() -> list[str]:
    """kl_lens and its packages that have public names."""
    rooms = [
        f"kl_lens.{m.name}" for m in pkgutil.iter_modules(kl_lens.__path__) if m.ispkg
    ]
    return [
        name
        for name in ("kl_lens", *rooms)
        if public_names(importlib.import_module(name))
    ]


def public_names(module: Any) -> list[str]:
    """`__all__`, or what a package imports from its own modules."""
    imported = [
        n
        for n, value in vars(module).items()
        if str(getattr(value, "__module__", "")).startswith("kl_lens.")
    ]
    return [n for n in getattr(module, "__all__", imported) if not n.startswith("_")]


def python() -> str:
    return (
        "\n".join([PYTHON, *(line for name in packages() for line in _package(name))])
        + "\n"
    )


def _package(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield from ("", f"## {name}", "", (inspect.getdoc(module) or "").split("\n\n")[0])
    for public in public_names(module):
        member = getattr(module, public)
        if inspect.ismodule(member):
            continue  # it has a section of its own
        yield from ("", f"### {public}", "")
        if inspect.isclass(member) and issubclass(member, Exception):
            yield inspect.getdoc(member) or ""
        elif callable(member):
            yield from ("```python", signature(public, member), "```", "")
            yield from _described(member)
        else:
            yield f"`{textwrap.shorten(repr(member), 90)}`"


def signature(name: str, member: Any) -> str:
    """`name(...)` with types, one parameter a line where one line is too short."""
    inspected = inspect.signature(member)
    parameters = []
    for parameter in inspected.parameters.values():
        made_anew = parameter.default is not inspect.Parameter.empty and "<" in repr(
            parameter.default
        )
        if made_anew:
            parameter = parameter.replace(default=inspect.Parameter.empty)
        shown = str(parameter)
        if isinstance(parameter.annotation, str):
            shown = shown.replace(repr(parameter.annotation), parameter.annotation)
        parameters.append(shown + (" = …" if made_anew else ""))
    kinds = [p.kind for p in inspected.parameters.values()]
    if (
        inspect.Parameter.KEYWORD_ONLY in kinds
        and inspect.Parameter.VAR_POSITIONAL not in kinds
    ):
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    gives = (
        ""
        if inspected.return_annotation in (inspected.empty, None, "None")
        else f" -> {inspected.return_annotation}"
    )
    line = f"{name}({', '.join(parameters)}){gives}"
    return (
        line
        if len(line) <= 80
        else f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){gives}"
    )


def _described(member: Any) -> Iterator[str]:
    text = inspect.getdoc(member) or ""
    if not text.startswith(
        f"{member.__name__}("
    ):  # dataclasses without one get their signature
        yield from _markdown(text)
    if inspect.isclass(member):
        methods = [
            (name, method)
            for name, method in vars(member).items()
            if callable(method) and not name.startswith("_") and method.__doc__
        ]
        yield from (
            "",
            *(
                f"- `{n}`: {_escaped(inspect.getdoc(m).split(chr(10) * 2)[0])}"
                for n, m in methods
            ),
        )


def _markdown(docstring: str) -> Iterator[str]:
    """A docstring with `Args:` as a list and `Example:` as code."""
    for part in re.split(r"\n\n(?=\w+:\n)", docstring):
        title, _, body = part.partition(":\n")
        if title not in ("Args", "Keywords", "Returns", "Raises", "Example"):
            yield _plain(part)
        elif title == "Example":
            yield from ("", "```pycon", textwrap.dedent(body).rstrip(), "```")
        else:
            body = re.sub(
                r"\n +(?=\S)",
                lambda match: "\n" + " " * (match.end() - match.start() - 1),
                f"\n{textwrap.dedent(body)}",
            )
            items = re.sub(r"^(\w+): ", r"- `\1`: ", body, flags=re.MULTILINE)
            yield from ("", f"*{title}*", _plain(items))
