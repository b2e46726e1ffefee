"""`kl-lens run`: what it says in the end, on one screen: the answers, a small table, the frontier, the next command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from rich.table import Table

from kl_lens.cli.console import console, new_table
from kl_lens.pipeline.running import UNIFORM_FP16, RunResult, RunSettings
from kl_lens.records import ARTIFACT, ORIGINAL, PLAN, Estimate, Subject
from kl_lens.reporting.answer import libraries, speed_ratio, unmeasurable
from kl_lens.reporting.data import RunView, collect
from kl_lens.reporting.numbers import with_error
from kl_lens.reporting.plans import PlanView
from kl_lens.runs import Run
from kl_lens.units import human_bytes

RIVALS = 3  # shown beside each recommendation; the report has all
SPARKS, WIDTH = "▁▂▃▄▅▆▇█", 48


def show(result: RunResult) -> None:
    with Run.open(result.folder) as run:
        view = collect(run)
    out = console()
    numbers = ("size", "of FP16", "KL from the original", "perplexity", "× FP16 speed")
    table = new_table(
        f"{view.model}: the recommended files and their nearest rivals", ("plan", "for"), numbers
    )
    answers, sparks = [], []
    for target, names in result.plans.items():
        answers += [_sentence(view, names[-1], target), *_kept(view, names[-1], target, result.settings)]
        sparks += _spark(view, names[-1], target)
        for name in _nearest(view, names, target):
            _add_row(table, view, name, target, loud=name == names[-1])
        table.add_section()
    spent = ", ".join(f"{verb} {used:.0f} s" for verb, used in result.stage_seconds.items() if used >= 1)
    lines = [*sparks, f"Done in {result.seconds:.0f} s ({spent}). {_judged(view, result)}"]
    lines += unmeasurable([p for p in view.profiles if p.protocol == "use"])
    lines += libraries([p for p in view.profiles if p.protocol == "use"])
    lines += [f"Failed, see the log: kl-lens {command}" for command in result.failed]
    folder = shlex.quote(str(result.folder))
    if (result.folder / "report.html").is_file():
        lines.append(f"Report: kl-lens report --run {folder} --open  ({result.folder / 'report.html'})")
    for place in list(result.exported.values())[: int(result.generates)]:
        lines.append(f'Next: kl-lens generate {shlex.quote(str(place))} --prompt "The history of the city"')
    out.print()
    for part in [*answers, table, *lines]:
        out.print(part, soft_wrap=not isinstance(part, Table))


def _nearest(view: RunView, names: Sequence[str], target: str) -> list[str]:
    """The recommendation and the rivals whose files are nearest in size, largest first."""
    size = {name: view.subject_bytes(_subject(target, name)) or 0 for name in names}
    own = size[names[-1]]
    rivals = sorted((n for n in names[:-1] if n != UNIFORM_FP16), key=lambda n: abs(size[n] - own))[:RIVALS]
    return sorted([*rivals, names[-1]], key=lambda n: -size[n])


def _add_row(table: Table, view: RunView, name: str, target: str, *, loud: bool) -> None:
    subject, base = _subject(target, name), view.subject_bytes(_subject(target, UNIFORM_FP16))
    size, ratio = view.subject_bytes(subject), _ratio(view, subject)
    table.add_row(
        _name(name, target),
        target,
        "" if size is None else human_bytes(size),
        "" if not size or not base else f"{size / base:.0%}",
        _shown(_value(view, subject, "divergence", "kl_mean")),
        ""
        if (own := _value(view, subject, "perplexity", "token_perplexity")) is None
        else f"{own.value:.2f}",
        ratio,
        style="bold" if loud else None,
    )


def _name(plan: str, target: str) -> str:
    """As people say it: `FP16`, `Q4_K_M`; the runtime has a column of its own."""
    for prefix in ("uniform_", "stock."):
        if plan.startswith(prefix):
            return plan.removeprefix(prefix).upper()
    return plan.replace(f"-{target}", "")


def _sentence(view: RunView, name: str, target: str) -> str:
    plan = view.plan(name)
    assert plan is not None
    subject = _subject(target, name)
    size, base = view.subject_bytes(subject) or plan.bytes, view.subject_bytes(_subject(target, UNIFORM_FP16))
    share = f" ({size / base:.0%} of FP16)" if base else ""
    contest = plan.plan.contest
    beside = f"; {contest}" if contest else ""
    return f"Recommended for {target}: {human_bytes(size)}{share}{_quality(view, plan, subject)}{beside}."


def _quality(view: RunView, plan: PlanView, subject: Subject) -> str:
    original = _value(view, Subject(ORIGINAL), "perplexity", "token_perplexity")
    own = _value(view, subject, "perplexity", "token_perplexity")
    if own is not None and original is not None:
        return f", perplexity {own.value:.2f} against {original.value:.2f}"
    if plan.perplexity is None or plan.original_perplexity is None:
        return ""
    return f", perplexity {plan.perplexity.value:.2f} against {plan.original_perplexity:.2f} ({plan.measured_on})"


def _kept(view: RunView, name: str, target: str, settings: RunSettings) -> list[str]:
    """Whether what was asked for holds on the evaluation text."""
    subject = _subject(target, name)
    if settings.max_drop is not None:
        original = _value(view, Subject(ORIGINAL), "perplexity", "token_perplexity")
        change = _value(view, subject, "perplexity", "token_perplexity_change")
        if change is None or original is None:
            return []
        rise, error = change.value / original.value, change.standard_error / original.value
        verdict = "kept" if rise <= settings.max_drop else "NOT kept"
        return [
            f"--max-drop {settings.max_drop:.1%} {verdict} on the evaluation text: perplexity rises by {rise:.2%} "
            f"± {error:.2%}."
        ]
    if settings.max_bytes is not None or settings.budget is not None:
        return []
    lost = _value(view, subject, "divergence", "kl_mean")
    measured = "" if lost is None else f" The file loses {with_error(lost)} on the evaluation text."
    return [f"Asked for: at most {settings.max_loss:g} nats of KL per token (--max-loss).{measured}"]


def _spark(view: RunView, name: str, target: str) -> list[str]:
    """Predicted KL (log) of the best plan from the smallest size on, and where the recommendation lies."""
    space, plan = view.spaces.get(None if target == "torch" else target), view.plan(name)
    points = [(b, math.log10(kl)) for b, kl in space.frontier if kl > 1e-9] if space else []
    if len(points) < 2 or plan is None:
        return []
    size = view.subject_bytes(_subject(target, name)) or plan.bytes
    low, high = points[0][0], max(min(points[-1][0], 2 * size), points[1][0])
    heights = []
    for place in range(WIDTH):
        limit = low + (high - low) * place / (WIDTH - 1)
        heights.append(next(kl for b, kl in reversed(points) if b <= limit + 1))
    least, most = min(heights), max(heights)
    line = "".join(SPARKS[round(7 * (h - least) / (most - least or 1))] for h in heights)
    at = round((WIDTH - 1) * min(1.0, max(0.0, (size - low) / (high - low))))
    line = f"{line[:at]}⟨{line[at]}⟩{line[at + 1 :]}"
    ends = f"KL {10**most:.2g} → {10**least:.1g}"
    return [
        f"{target:9} {human_bytes(low):>9} {line} {human_bytes(high)}  predicted {ends}, log; here: recommended"
    ]


def _judged(view: RunView, result: RunResult) -> str:
    """On what the numbers stand, in a line."""
    settings = result.settings
    original = _score(view, Subject(ORIGINAL), "perplexity")
    where = f"Judged on {original[0]} ({original[1]:,} {result.unit}). " if original else ""
    return (
        f"{where}A first look: {settings.windows} calibration windows, {settings.held_out_windows} held-out ones, "
        f"{settings.repeats} rounds of timing; the flags of kl-lens run raise them."
    )


def _subject(target: str, plan: str) -> Subject:
    return Subject(PLAN, plan) if target == "torch" else Subject(ARTIFACT, plan, target)


def _score(view: RunView, subject: Subject, kind: str) -> tuple[str, int, dict[str, Estimate]] | None:
    scores = [s for s in view.scores if s.subject.key == subject.key and s.kind == kind]
    return (scores[-1].what, scores[-1].tokens, scores[-1].values) if scores else None


def _value(view: RunView, subject: Subject, kind: str, name: str) -> Estimate | None:
    score = _score(view, subject, kind)
    return None if score is None else score[2].get(name)


def _ratio(view: RunView, subject: Subject) -> str:
    profiles = [p for p in view.profiles if p.subject.key == subject.key and p.protocol == "use"]
    ratio = speed_ratio(profiles[-1]) if profiles else None
    return "" if ratio is None else ratio.brief


def _shown(estimate: Estimate | None) -> str:
    return "" if estimate is None else with_error(estimate)
