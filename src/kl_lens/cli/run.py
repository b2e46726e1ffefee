"""`kl-lens run`: what it says in the end. One table, one sentence, the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.table import Table

from kl_lens.cli.console import console, new_table
from kl_lens.pipeline.running import UNIFORM_FP16, RunResult, RunSettings
from kl_lens.records import ARTIFACT, ORIGINAL, PLAN, Estimate, Profile, Score, Subject
from kl_lens.reporting.answer import speed_ratio
from kl_lens.reporting.data import RunView, collect
from kl_lens.reporting.plans import PlanView
from kl_lens.runs import Run
from kl_lens.units import human_bytes


def show(result: RunResult) -> None:
    with Run.open(result.folder) as run:
        view = collect(run)
    recommended, targets = result.plans[-1], list(result.exported)
    out = console()
    out.print()
    out.print(_table(view, result.plans, targets or ["torch"]))
    lines = [*_remarks(view), _sentence(view, recommended, targets)]
    if result.settings.max_drop is not None:
        lines += _kept(view, recommended, targets, result.settings.max_drop)
    spent = ", ".join(f"{verb} {used:.0f} s" for verb, used in result.stage_seconds.items() if used >= 1)
    lines.append(f"Done in {result.seconds:.0f} s ({spent}).")
    lines += [f"Failed, see above: kl-lens {command}" for command in result.failed]
    if (report := result.folder / "report.html").is_file():
        lines.append(f"Report: {report}")
    for place in list(result.exported.values())[:1]:
        lines.append(f'Next: kl-lens generate {shlex.quote(str(place))} --prompt "The history of the city"')
    for line in [*lines, _shortened(result.settings)]:
        out.print(line, soft_wrap=True)


def _shortened(settings: RunSettings) -> str:
    return (
        f"Short for a first look: {settings.windows} calibration windows (kl-lens measure takes 64), "
        f"{settings.evaluation_windows} of {settings.window_length} tokens for evaluation (evaluate takes the whole "
        f"text in windows of 2048), {settings.held_out_windows} held-out ones (plan takes 32), {settings.repeats} "
        "rounds of timing with 32 new tokens (benchmark takes 5 with 64). The flags of kl-lens run raise them."
    )


def _table(view: RunView, plans: Sequence[str], targets: Sequence[str]) -> Table:
    numbers = ("size", "of FP16", "token perplexity", "KL from the original", "× FP16 speed", "peak memory")
    table = new_table(f"{view.model}: plans as files", ("plan", "runtime"), numbers)
    for target in targets:
        base = view.subject_bytes(_subject(target, UNIFORM_FP16))
        for name in plans:
            subject = _subject(target, name)
            size = view.subject_bytes(subject)
            profile = _profile(view, subject)
            ratio = None if profile is None else speed_ratio(profile)
            table.add_row(
                name.removeprefix("uniform_").upper() if name.startswith("uniform_") else name,
                target,
                "" if size is None else human_bytes(size),
                "" if not size or not base else f"{size / base:.0%}",
                _shown(_value(view, subject, "perplexity", "token_perplexity"), ".3f"),
                _shown(_value(view, subject, "divergence", "kl_mean"), ".2e"),
                "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
                ""
                if profile is None or profile.peak_memory_bytes is None
                else human_bytes(profile.peak_memory_bytes),
            )
        table.add_section()
    return table


def _remarks(view: RunView) -> list[str]:
    original = _score(view, Subject(ORIGINAL), "perplexity")
    if original is None:
        return []
    value = original.values["token_perplexity"]
    return [
        f"The original's token perplexity is {_shown(value, '.3f')} on {original.what} ({original.tokens:,} tokens). "
        "The errors of perplexity are those of the text, and common to all rows."
    ]


def _sentence(view: RunView, name: str, targets: Sequence[str]) -> str:
    plan = view.plan(name)
    assert plan is not None
    text = f"Recommended: {_size(view, plan)}, {plan.row.shares_text}"
    quality = _quality(view, name, targets) or _held_out(plan)
    speed = _speed(view, name, targets)
    return f"{text}{quality}{speed}."


def _kept(view: RunView, name: str, targets: Sequence[str], max_drop: float) -> list[str]:
    """Whether the limit that the plan was made for holds on the evaluation text."""
    original = _value(view, Subject(ORIGINAL), "perplexity", "token_perplexity")
    lines = []
    for target in targets:
        change = _value(view, _subject(target, name), "perplexity", "token_perplexity_change")
        if change is not None and original is not None:
            rise, error = change.value / original.value, change.standard_error / original.value
            verdict = "kept" if rise <= max_drop else "NOT kept"
            lines.append(
                f"--max-drop {max_drop:.1%} {verdict} by {target}/{name} on the evaluation text: perplexity "
                f"rises by {rise:.2%} ± {error:.2%}."
            )
    return lines


def _size(view: RunView, plan: PlanView) -> str:
    return f"{human_bytes(plan.bytes)}, {plan.bytes / view.fp16_bytes:.0%} of FP16's"


def _quality(view: RunView, name: str, targets: Sequence[str]) -> str:
    original = _value(view, Subject(ORIGINAL), "perplexity", "token_perplexity")
    for target in targets:
        found = _value(view, _subject(target, name), "perplexity", "token_perplexity")
        if found is not None and original is not None:
            return f"; token perplexity {found.value:.3f} in {target} against {original.value:.3f}"
    return ""


def _held_out(plan: PlanView) -> str:
    if plan.perplexity is None or plan.original_perplexity is None:
        return ""
    return f"; token perplexity {plan.perplexity.value:.3f} against {plan.original_perplexity:.3f} ({plan.measured_on})"


def _speed(view: RunView, name: str, targets: Sequence[str]) -> str:
    found = []
    for target in targets:
        profile = _profile(view, _subject(target, name))
        ratio = None if profile is None else speed_ratio(profile)
        if profile is not None and ratio is not None:
            speed = profile.timings["tokens_per_second"].median
            found.append(f"{speed:.0f} tokens/s in {target} ({ratio.median:.2f} × FP16)")
    return "; " + ", ".join(found) if found else ""


def _subject(target: str, plan: str) -> Subject:
    return Subject(PLAN, plan) if target == "torch" else Subject(ARTIFACT, plan, target)


def _score(view: RunView, subject: Subject, kind: str) -> Score | None:
    found = [s for s in view.scores if s.subject.key == subject.key and s.kind == kind]
    return found[-1] if found else None


def _value(view: RunView, subject: Subject, kind: str, name: str) -> Estimate | None:
    score = _score(view, subject, kind)
    return None if score is None else score.values.get(name)


def _profile(view: RunView, subject: Subject) -> Profile | None:
    found = [p for p in view.profiles if p.subject.key == subject.key and p.protocol == "use"]
    return found[-1] if found else None


def _shown(estimate: Estimate | None, pattern: str) -> str:
    if estimate is None:
        return ""
    if estimate.standard_error != estimate.standard_error:  # not known
        return format(estimate.value, pattern)
    error = format(estimate.standard_error, ".0e" if "e" in pattern else pattern)
    return f"{format(estimate.value, pattern)} ± {error}"
