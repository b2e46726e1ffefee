"""`kl-lens run`: what it says in the end. One table, one sentence, the next command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rich.table import Table

from kl_lens.cli.console import console, new_table
from kl_lens.pipeline.planning import USUAL
from kl_lens.pipeline.running import SHORT, UNIFORM_FP16, RunResult, RunSettings
from kl_lens.records import ARTIFACT, ORIGINAL, PLAN, Estimate, Profile, Score, Subject
from kl_lens.reporting.answer import speed_ratio
from kl_lens.reporting.data import RunView, collect
from kl_lens.reporting.plans import PlanView
from kl_lens.runs import Run
from kl_lens.units import human_bytes


def show(result: RunResult) -> None:
    with Run.open(result.folder) as run:
        view = collect(run)
    out = console()
    out.print()
    out.print(_table(view, result.plans))
    lines = _remarks(view)
    for target, names in result.plans.items():
        lines += [_sentence(view, names[-1], target), *_kept(view, names[-1], target, result.settings)]
    spent = ", ".join(f"{verb} {used:.0f} s" for verb, used in result.stage_seconds.items() if used >= 1)
    lines.append(f"Done in {result.seconds:.0f} s ({spent}).")
    lines += [f"Failed, see above: kl-lens {command}" for command in result.failed]
    if (report := result.folder / "report.html").is_file():
        lines.append(f"Report: {report}")
    for place in list(result.exported.values())[: int(result.generates)]:
        lines.append(f'Next: kl-lens generate {shlex.quote(str(place))} --prompt "The history of the city"')
    for line in [*lines, _shortened(result.settings, result.window)]:
        out.print(line, soft_wrap=True)


def _shortened(settings: RunSettings, window: str) -> str:
    menu = "short menus (--menu full has all formats), " if settings.menu == SHORT else ""
    rivals = "a few rivals (--rivals all), " if settings.rivals == USUAL else ""
    return (
        f"Short for a first look: {menu}{rivals}{settings.windows} calibration windows (kl-lens measure takes 64), "
        f"{settings.evaluation_windows} of {window} for evaluation (evaluate takes the whole "
        f"text in windows of 2048), {settings.held_out_windows} held-out ones (plan takes 32), {settings.repeats} "
        "rounds of timing with 32 new tokens (benchmark takes 5 with 64). The flags of kl-lens run raise them."
    )


def _table(view: RunView, plans: Mapping[str, Sequence[str]]) -> Table:
    numbers = ("size", "of FP16", "token perplexity", "KL from the original", "× FP16 speed", "peak memory")
    table = new_table(f"{view.model}: plans as files", ("plan", "runtime"), numbers)
    for target, names in plans.items():
        base = view.subject_bytes(_subject(target, UNIFORM_FP16))
        for name in names:
            subject = _subject(target, name)
            size = view.subject_bytes(subject)
            profile = _profile(view, subject)
            ratio = None if profile is None else speed_ratio(profile)
            table.add_row(
                _name(name, target),
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


def _name(plan: str, target: str) -> str:
    """As people say it: `FP16`, `Q4_K_M`; the runtime has a column of its own."""
    for prefix in ("uniform_", "stock."):
        if plan.startswith(prefix):
            return plan.removeprefix(prefix).upper()
    return plan.replace(f"-{target}", "")


def _remarks(view: RunView) -> list[str]:
    original = _score(view, Subject(ORIGINAL), "perplexity")
    if original is None:
        return []
    value = original.values["token_perplexity"]
    return [
        f"The original's token perplexity is {_shown(value, '.3f')} on {original.what} ({original.tokens:,} tokens). "
        "The errors of perplexity are those of the text, and common to all rows."
    ]


def _sentence(view: RunView, name: str, target: str) -> str:
    plan = view.plan(name)
    assert plan is not None
    subject = _subject(target, name)
    size, base = view.subject_bytes(subject) or plan.bytes, view.subject_bytes(_subject(target, UNIFORM_FP16))
    share = f", {size / base:.0%} of FP16's" if base else ""
    quality = _quality(view, subject) or _held_out(plan)
    contest = plan.plan.notes.get("contest")
    beside = f" Beside the runtime's own mixtures: {contest}." if contest else ""
    return (
        f"Recommended for {target}: {human_bytes(size)}{share}, {plan.row.shares_text}{quality}"
        f"{_speed(view, subject)}.{beside}"
    )


def _kept(view: RunView, name: str, target: str, settings: RunSettings) -> list[str]:
    """What was asked for, and whether it holds on the evaluation text."""
    subject = _subject(target, name)
    if settings.max_drop is not None:
        original = _value(view, Subject(ORIGINAL), "perplexity", "token_perplexity")
        change = _value(view, subject, "perplexity", "token_perplexity_change")
        if change is None or original is None:
            return []
        rise, error = change.value / original.value, change.standard_error / original.value
        verdict = "kept" if rise <= settings.max_drop else "NOT kept"
        return [
            f"--max-drop {settings.max_drop:.1%} {verdict} by {subject.label} on the evaluation text: perplexity "
            f"rises by {rise:.2%} ± {error:.2%}."
        ]
    if settings.max_bytes is not None or settings.budget is not None:
        return []
    lost = _value(view, subject, "divergence", "kl_mean")
    measured = "" if lost is None else f"; on the evaluation text it loses {_shown(lost, '.4f')}"
    return [
        f"It is the smallest file found that loses at most {settings.max_loss:g} nats of KL per token, about "
        f"{settings.max_loss:.0%} of perplexity, on held-out text{measured} (--max-loss, --max-drop, --budget and "
        "--max-bytes ask for another)."
    ]


def _quality(view: RunView, subject: Subject) -> str:
    original = _value(view, Subject(ORIGINAL), "perplexity", "token_perplexity")
    own = _value(view, subject, "perplexity", "token_perplexity")
    if own is None or original is None:
        return ""
    return f"; token perplexity {own.value:.3f} against {original.value:.3f}"


def _held_out(plan: PlanView) -> str:
    if plan.perplexity is None or plan.original_perplexity is None:
        return ""
    return f"; token perplexity {plan.perplexity.value:.3f} against {plan.original_perplexity:.3f} ({plan.measured_on})"


def _speed(view: RunView, subject: Subject) -> str:
    profile = _profile(view, subject)
    ratio = None if profile is None else speed_ratio(profile)
    if profile is None or ratio is None:
        return ""
    return f"; {profile.timings['tokens_per_second'].median:.0f} tokens/s ({ratio.median:.2f} × FP16)"


def _subject(target: str, plan: str) -> Subject:
    return Subject(PLAN, plan) if target == "torch" else Subject(ARTIFACT, plan, target)


def _score(view: RunView, subject: Subject, kind: str) -> Score | None:
    scores = [s for s in view.scores if s.subject.key == subject.key and s.kind == kind]
    return scores[-1] if scores else None


def _value(view: RunView, subject: Subject, kind: str, name: str) -> Estimate | None:
    score = _score(view, subject, kind)
    return None if score is None else score.values.get(name)


def _profile(view: RunView, subject: Subject) -> Profile | None:
    profiles = [p for p in view.profiles if p.subject.key == subject.key and p.protocol == "use"]
    return profiles[-1] if profiles else None


def _shown(estimate: Estimate | None, pattern: str) -> str:
    if estimate is None:
        return ""
    if estimate.standard_error != estimate.standard_error:  # not known
        return format(estimate.value, pattern)
    error = format(estimate.standard_error, ".0e" if "e" in pattern else pattern)
    return f"{format(estimate.value, pattern)} ± {error}"
