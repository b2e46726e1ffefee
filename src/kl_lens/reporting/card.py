"""The model card of an exported file: Markdown with front matter, as the hub shows it, and its chart."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from kl_lens.base.version import __version__
from kl_lens.reporting import answer
from kl_lens.reporting.data import RunView
from kl_lens.reporting.names import (
    percent,
    plan_title,
    readable,
    runtime_title,
    size,
    with_error,
)
from kl_lens.reporting.page import asset
from kl_lens.reporting.sections.details import shown_place
from kl_lens.reporting.sections.explorer import Explorer
from kl_lens.run.records import ARTIFACT, Artifact, Plan, Score, Subject
from kl_lens.targets import get_target

CHART = "size-against-kl.svg"


def score_of(view: RunView, plan: Plan) -> Score | None:
    """How far the plan's file is from the original on test text."""
    return view.score(Subject(ARTIFACT, plan.name, plan.target), "divergence")


def front_matter(
    view: RunView, plan: Plan, base_model: str | None, inherited: Mapping[str, Any]
) -> dict[str, Any]:
    """What the hub files a model by. `inherited`: from the card of the original (licence, language)."""
    target = str(plan.target)
    formats = sorted(
        {recipe.grid.name for recipe in view.cost(plan).stored.values()} - {"fp16"}
    )
    kind = view.identity.get("model_type")
    tags = [
        "kl-lens",
        "quantized",
        "mixed-precision",
        target,
        *([kind] if kind else []),
        *formats,
    ]
    relation = (
        {"base_model": base_model, "base_model_relation": "quantized"}
        if base_model
        else {}
    )
    task = (
        "image-classification"
        if view.identity.get("task") == "image"
        else "text-generation"
    )
    return {
        **inherited,
        **relation,
        "library_name": target,
        "pipeline_tag": task,
        "tags": list(dict.fromkeys(tags)),
    }


def card(
    view: RunView,
    plan: Plan,
    artifact: Artifact,
    score: Score,
    repository: str,
    about: Mapping[str, Any],
) -> str:
    """The whole card. `about`: its front matter."""
    target = get_target(str(plan.target))
    file = Subject(ARTIFACT, plan.name, plan.target)
    judged = view.judged(plan, plan.target)
    base = about.get("base_model")
    original = view.identity.get("original") and f"({view.identity['original']})"
    stock = plan.notes.get("taken_over")
    recorded = [
        c.provenance["versions"] for c in view.commands if "versions" in c.provenance
    ]
    versions = recorded[-1] if recorded else {}
    matter = yaml.safe_dump(dict(about), sort_keys=False, allow_unicode=True, width=1000)
    page = Environment(
        undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True
    )
    page.filters["cell"] = _cell
    body = page.from_string(asset("card.md")).render(
        percent=percent,
        size=size,
        name=repository.rpartition("/")[2],
        base=f"[{base}](https://huggingface.co/{base})"
        if base
        else " ".join(filter(None, [f"`{shown_place(view.model)}`", original])),
        title=target.title,
        bytes=artifact.realised_bytes,
        whole=view.fp16_of(plan.target),
        text=shown_place(score.what),
        tokens=score.tokens,
        window=score.protocol.get("window"),
        kl=with_error(score.values["kl_mean"]),
        perplexity=judged.perplexity,
        original=judged.original,
        contest=readable(plan.contest or ""),
        chart=CHART,
        rivals=_rivals(view, plan, score.what),
        how_to_run=target.how_to_run(repository, artifact),
        stock=stock and plan_title(str(stock)),
        target=answer.target_of(plan),
        verdicts=sorted({v for (s, _), v in view.verdicts.items() if s.key == file.key}),
        shares=view.cost(plan).shares,
        texts=_texts(view, plan, score),
        extra=target.extra,
        version=__version__,
        commands=_again(view, plan),
        made_with=[
            f"{n} {versions[n]}"
            for n in ("kl-lens", "torch", "transformers")
            if n in versions
        ],
        judge=f"{runtime_title(plan.target)} ({score.runtime.get('version', 'unknown version')})",
    )
    return f"---\n{matter}---\n\n{body}"


def chart(view: RunView, plan: Plan) -> str:
    """Size against KL as a stand-alone SVG on white, whatever the reader's theme is."""
    drawn = Explorer(view, view.spaces[plan.target]).chart(plan.name)
    drawn.spec["background"] = "#ffffff"
    return drawn._repr_svg_()


def _rivals(view: RunView, plan: Plan, text: str) -> list[list[str]]:
    """This file among the others of its target, small files last."""
    rows = []
    for rival in sorted(
        view.plans_of(plan.target), key=lambda p: -view.bytes_of(p, plan.target)
    ):
        judged = view.judged(rival, plan.target)
        if judged.kl and judged.circumstances.endswith(f"on {text}"):
            title = "this file" if rival is plan else plan_title(rival.name)
            title += " (in PyTorch, as deployed)" if judged.stands_in else ""
            perplexity = judged.perplexity
            cells = [
                title,
                size(view.bytes_of(rival, plan.target)),
                with_error(judged.kl),
                f"{perplexity.value:.2f}" if perplexity else "–",
            ]
            rows.append([f"**{cell}**" for cell in cells] if rival is plan else cells)
    return rows


def _texts(view: RunView, plan: Plan, score: Score) -> list[tuple[str, ...]]:
    rows = []
    for role, text in view.texts.items():
        if "windows" in text and "length" in text:
            source = shown_place(text.get("source", "unknown"))
            split = text.get("split")
            name = (
                source
                if not split or source.endswith(f":{split}")
                else f"{source}:{split}"
            )
            tokens = f"{text['windows'] * text['length']:,}"
            begins = "" if text.get("bos") is None else ", windows begin with BOS"
            rows.append((role.partition("@")[0], name, tokens + begins))
    if plan.measured:
        rows.append(("choosing the plan", plan.measured.place, ""))
    rows.append(("the numbers above", shown_place(score.what), f"{score.tokens:,}"))
    return list(dict.fromkeys(rows))


def _again(view: RunView, plan: Plan) -> list[str]:
    """The commands, with the commit of the model, without places on somebody's disk."""
    source = str(view.identity.get("source", ""))
    lines = []
    for line in answer.commands_for(view, plan):
        words = shlex.split(line)
        if "--run" in words:
            del words[words.index("--run") : words.index("--run") + 2]
        pinned = [
            source if "@" in source and word == view.model else shown_place(word)
            for word in words
        ]
        lines.append(shlex.join(pinned))
    return lines


def _cell(text: object) -> str:
    """Names from outside, so that they stay text: no markup, no line breaks, no new columns."""
    plain = " ".join(str(text).split())
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in plain)
