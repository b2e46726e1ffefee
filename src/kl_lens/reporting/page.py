"""The page: one file with everything in it, that asks the network for nothing.

A content security policy forbids every request and every script but our own (by its hash), so that even a mistake in
escaping could neither run nor send anything.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path

from kl_lens.base.errors import RunError
from kl_lens.base.files import write_text
from kl_lens.reporting import answer
from kl_lens.reporting.data import RunView, collect
from kl_lens.reporting.markup import escape, join, tag
from kl_lens.reporting.sections import details, explorer, files, prediction, states
from kl_lens.run.folder import Run

SECTIONS = (
    answer.section,
    explorer.section,
    files.section,
    prediction.section,
    prediction.positions,
    states.section,
    files.speed,
    details.autopsies,
    details.section,
    details.provenance,
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style></head>
<body><svg class="defs" aria-hidden="true"><defs><pattern id="hatch" width="6" height="6" \
patternUnits="userSpaceOnUse"><path d="M0 6L6 0"/><path d="M-1 5L5 -1M5 7L7 5"/></pattern></defs></svg>
<div class="page"><header><h1>{title}</h1>
<nav aria-label="Sections"><ul>{links}</ul></nav></header><main>{body}</main></div>
<script>{script}</script></body></html>
"""


def write_report(run: Run, path: Path | None = None) -> Path:
    """Writes the report of a run, to `RUN/report.html` unless told otherwise; gives the path back.

    Example:
        >>> with Run.open(Path("runs/mamba")) as run:
        ...     print(write_report(run))
    """
    path = path or run.folder / "report.html"
    if path.is_dir():
        raise RunError(f"{path} is a folder; --out wants a file")
    content = report_page(collect(run))
    try:
        write_text(path, content)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); use another --out"
        ) from error
    return path


def report_page(view: RunView) -> str:
    """The report of one run. What it has nothing for has no section."""
    parts = [part for section in SECTIONS if (part := section(view)) is not None]
    shown = [(f"{number} {part.title}", part) for number, part in enumerate(parts, 1)]
    script = asset("report.js")
    return _PAGE.format(
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=escape(f"KL Lens: {view.model}"),
        style=asset("report.css"),
        links=join(
            tag("li", tag("a", title, href=f"#{part.identifier}"))
            for title, part in shown
        ),
        body=join(
            tag("section", tag("h2", title), part.body, id=part.identifier)
            for title, part in shown
        ),
        script=script,
    )


def asset(name: str) -> str:
    """A file of the page: its style, its script."""
    return (
        resources.files("kl_lens.reporting")
        .joinpath("assets", name)
        .read_text(encoding="utf-8")
    )
