"""The model card of an exported file: Markdown with front matter, as the hub shows it, and its chart."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from kl_lens.base.version import __version__
from kl_lens.reporting import answer
from kl_lens.reporting.data import RunView
from kl_lens.reporting.names import plan_title, readable, runtime_title
from kl_lens.reporting.numbers import percent, size, with_error
from kl_lens.reporting.plans import PlanView
from kl_lens.reporting.sections.explorer import Explorer
from kl_lens.reporting.sections.provenance import shown_place
from kl_lens.run.records import ARTIFACT, ORIGINAL, Artifact, Estimate, Score, Subject
from kl_lens.targets import get_target

CHART = "size-against-kl.svg"
_FILES = {
    "plan.json": "the recipe: a format for every component; `kl-lens export` reads it",
    "sensitivities.parquet": "what every component loses in every format that was measured",
    "recipe/": "the plan for other tools, such as `llama-quantize`, if they can express it",
    "artifact.json": "tensors, their formats and the digests of the files",
}


def score_of(view: RunView, plan: PlanView) -> Score | None:
    """How far the plan's file is from the original on test text."""
    subject = Subject(ARTIFACT, plan.name, plan.target)
    scores = [s for s in view.scores if s.kind == "divergence" and s.subject.key == subject.key]
    return scores[-1] if scores else None


def front_matter(
    view: RunView, plan: PlanView, base_model: str | None, inherited: Mapping[str, Any]
) -> dict[str, Any]:
    """What the hub files a model by. `inherited`: from the card of the original (licence, language)."""
    target = str(plan.target)
    formats = sorted({recipe.grid.name for recipe in plan.stored.values()} - {"fp16"})
    kind = view.identity.get("model_type")
    tags = ["kl-lens", "quantized", "mixed-precision", target, *([kind] if kind else []), *formats]
    relation = {"base_model": base_model, "base_model_relation": "quantized"} if base_model else {}
    task = "image-classification" if view.identity.get("task") == "image" else "text-generation"
    return {
        **inherited,
        **relation,
        "library_name": target,
        "pipeline_tag": task,
        "tags": list(dict.fromkeys(tags)),
    }


def card(
    view: RunView, plan: PlanView, artifact: Artifact, score: Score, repository: str, about: Mapping[str, Any]
) -> str:
    """The whole card. `about`: its front matter."""
    parts = [
        f"# {_cell(repository.rpartition('/')[2])}",
        _lead(view, plan, artifact, score, about.get("base_model")),
        f"![Size against KL of this file and of stock recipes]({CHART})",
        "Lower and further left is better. Bars: one standard error. Line: the best known at each size.",
        "## Against stock recipes",
        _rivals(view, plan),
        f"KL is from the original, per token: {_text(score)}. Lower is better; ± is one standard error.",
        "## How to run it",
        _code(get_target(str(plan.target)).how_to_run(repository, artifact)),
        "## What was done",
        _done(view, plan),
        "## Text that was used",
        _texts(view, plan, score),
        "## Make it again",
        _code(
            "\n".join(
                [
                    f"pip install 'kl-lens[{get_target(str(plan.target)).extra}]=={__version__}'",
                    *_again(view, plan),
                ]
            )
        ),
        _versions(view, score),
        "## Files",
        "\n".join(f"- `{name}`: {what}" for name, what in _FILES.items()),
    ]
    matter = yaml.safe_dump(dict(about), sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{matter}---\n\n" + "\n\n".join(parts) + "\n"


def chart(view: RunView, plan: PlanView) -> str:
    """Size against KL as a stand-alone SVG on white, whatever the reader's theme is."""
    drawn = Explorer(view, view.spaces[plan.target]).chart(plan.name)
    drawn.spec["background"] = "#ffffff"
    return drawn._repr_svg_()


def _lead(view: RunView, plan: PlanView, artifact: Artifact, score: Score, base_model: object) -> str:
    target, whole = get_target(str(plan.target)), view.fp16_of(plan.target)
    name = (
        f"[{base_model}](https://huggingface.co/{base_model})"
        if base_model
        else f"`{shown_place(view.model)}`"
    )
    original = answer.value_of(view, Subject(ORIGINAL), "perplexity", "token_perplexity")
    own = _value(view, plan, "perplexity", "token_perplexity")
    words = [
        f"{name} for {target.title} in {size(artifact.realised_bytes)}, "
        f"{percent(artifact.realised_bytes / whole)} of FP16.",
        f"KL from the original on {_cell(shown_place(score.what))}: "
        f"**{with_error(score.values['kl_mean'])}** nats per token.",
    ]
    if own and original:
        words.append(f"Perplexity: {own.value:.2f} (original {original.value:.2f}).")
    if plan.plan.contest:
        words.append(f"Against stock recipes: {_cell(readable(plan.plan.contest))}.")
    return " ".join(words)


def _rivals(view: RunView, plan: PlanView) -> str:
    """This file among the others of its target, small files last."""
    judged = [p for p in view.plans if _value(view, p, "divergence", "kl_mean", plan.target)]
    sizes = {p.name: view.subject_bytes(Subject(ARTIFACT, p.name, plan.target)) or p.bytes for p in judged}
    rows = []
    for each in sorted(judged, key=lambda p: -sizes[p.name]):
        perplexity = _value(view, each, "perplexity", "token_perplexity", plan.target)
        cells = [
            "this file" if each is plan else plan_title(each.name),
            size(sizes[each.name]),
            with_error(_value(view, each, "divergence", "kl_mean", plan.target)),
            f"{perplexity.value:.2f}" if perplexity else "–",
        ]
        rows.append([f"**{cell}**" for cell in cells] if each is plan else cells)
    return _table(["file", "size", "KL, nats per token", "perplexity"], rows, numbers=3)


def _done(view: RunView, plan: PlanView) -> str:
    stock = plan.plan.notes.get("taken_over")
    how = (
        f"Each component was quantized alone to some formats, and the KL of the model's output was measured. This file "
        f"follows the stock recipe {plan_title(str(stock))}, which no plan of that size beat measurably."
        if stock
        else "Each component was quantized alone to some formats, and the KL of the model's output was measured. The "
        "formats below are the exact optimum of these measurements."
    )
    rows = [
        [
            f"`{share.recipe}`" if share.quantizable else "not quantized (norms and the like)",
            str(share.components),
            percent(share.share, 1),
        ]
        for share in plan.row.shares
    ]
    verdicts = {
        v for (s, _), v in view.verdicts.items() if s.key == Subject(ARTIFACT, plan.name, plan.target).key
    }
    proof = "The file holds bit for bit the weights that were measured."
    if verdicts:
        proof += f" Against the same weights in PyTorch, it {_cell('; '.join(sorted(verdicts)))}."
    target = answer.target_of(plan).removesuffix(".")
    return "\n\n".join(
        [
            f"{how} {_cell(target)}. {proof}",
            _table(["format", "components", "of the weights"], rows, numbers=2),
        ]
    )


def _texts(view: RunView, plan: PlanView, score: Score) -> str:
    rows = []
    for role, text in view.texts.items():
        if "windows" in text and "length" in text:
            source = shown_place(text.get("source", "unknown"))
            split = text.get("split")
            name = source if not split or source.endswith(f":{split}") else f"{source}:{split}"
            rows.append([role.partition("@")[0], name, f"{text['windows'] * text['length']:,}"])
    if plan.measured_on:
        rows.append(["choosing the plan", plan.measured_on, ""])
    rows.append(["the numbers above", shown_place(score.what), f"{score.tokens:,}"])
    unique = list(dict.fromkeys(tuple(_cell(cell) for cell in row) for row in rows))
    return (
        _table(["used for", "text", "tokens"], unique, numbers=1)
        + "\n\nNo two of these texts overlap; KL Lens refuses that."
    )


def _again(view: RunView, plan: PlanView) -> list[str]:
    """The commands, with the commit of the model, without places on somebody's disk."""
    source = str(view.identity.get("source", ""))
    lines = []
    for line in answer.commands_for(view, plan):
        words = shlex.split(line)
        if "--run" in words:
            del words[words.index("--run") : words.index("--run") + 2]
        pinned = [source if "@" in source and word == view.model else shown_place(word) for word in words]
        lines.append(shlex.join(pinned))
    return lines


def _versions(view: RunView, score: Score) -> str:
    known = [c.provenance.get("versions", {}) for c in view.commands]
    versions = known[-1] if known else {}
    words = [f"{name} {versions[name]}" for name in ("kl-lens", "torch", "transformers") if name in versions]
    judge = f"{runtime_title(score.subject.target)} ({score.runtime.get('version', 'unknown version')})"
    return f"Made with {', '.join(words)}; judged with {judge}."


def _text(score: Score) -> str:
    window = score.protocol.get("window")
    return f"{_cell(shown_place(score.what))}, {score.tokens:,} tokens" + (
        f" in windows of {window}" if window else ""
    )


def _value(view: RunView, plan: PlanView, kind: str, name: str, target: str | None = None) -> Estimate | None:
    return answer.value_of(view, Subject(ARTIFACT, plan.name, target or plan.target), kind, name)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> str:
    """`numbers`: how many of the last columns are aligned to the right."""
    rule = ["---"] * (len(columns) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def _code(lines: str) -> str:
    return f"```bash\n{lines}\n```"


def _cell(text: object) -> str:
    """Names from outside, so that they stay text: no markup, no line breaks, no new columns."""
    plain = " ".join(str(text).split())
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in plain)
