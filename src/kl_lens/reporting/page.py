"""The page: one file with everything in it, that asks the network for nothing.

A content security policy forbids every request and every script but our own (by its hash), so that even a mistake in
escaping could neither run nor send anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from importlib import resources

from kl_lens.reporting import palette
from kl_lens.reporting.data import RunView
from kl_lens.reporting.markup import Html, tag
from kl_lens.reporting.sections import (
    Section,
    autopsy,
    details,
    positions,
    prediction,
    provenance,
    sensitivity,
    sizes,
    speed,
    summary,
)
from kl_lens.reporting.wording import TOLD, of_tokens

_HATCH = Html(
    '<svg class="defs" aria-hidden="true"><defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path d="M0 5L5 0"/></pattern></defs></svg>'
)


def report_page(view: RunView) -> str:
    """The report of one run."""
    modules = (summary, sensitivity, prediction, positions, sizes, speed, autopsy, details, provenance)
    told = TOLD.get(view.identity.get("task"), of_tokens)
    sections = [part for module in modules if (part := module.section(view)) is not None]
    return page(f"KL Lens: {view.model}", sections, told)


def page(title: str, sections: Sequence[Section], told: Callable[[str], str] = of_tokens) -> str:
    """`told` puts our own words otherwise, where tokens are images."""
    script = told("\n".join(asset(name) for name in ("knapsack.js", "explorer.js", "report.js")))
    style = Html(palette.stylesheet() + "\n" + asset("report.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="referrer", content="no-referrer"),
        Html('<link rel="icon" href="data:,">'),
        tag("title", title),
        tag("style", style),
    )
    top = tag(
        "header",
        tag("h1", title),
        tag("button", "Dark", type="button", class_="toggle", hidden=True),
        _contents(sections),
    )
    body = tag(
        "body",
        _HATCH,
        tag(
            "div",
            top,
            tag("main", *(Html(told(_section(n, s))) for n, s in enumerate(sections, 1))),
            class_="page",
        ),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _contents(sections: Sequence[Section]) -> Html:
    links = [
        tag("li", tag("a", f"{number} {section.title}", href=f"#{section.identifier}"))
        for number, section in enumerate(sections, 1)
    ]
    return tag("nav", tag("ul", *links), aria_label="Sections")


def _section(number: int, section: Section) -> Html:
    return tag("section", tag("h2", f"{number} {section.title}"), section.body, id=section.identifier)


def asset(name: str) -> str:
    """A file of the page: its style, its scripts."""
    return resources.files("kl_lens.reporting").joinpath("assets", name).read_text(encoding="utf-8")
