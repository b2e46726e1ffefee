"""`kl-lens run`: what it says in the end, on one screen: the answers, a small table, the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kl_lens.base.units import human_bytes
from kl_lens.cli.console import Row, console, table
from kl_lens.cli.progress import clock_time, show_estimate
from kl_lens.reporting.answer import measured_of, speed_ratio, target_of, unmeasurable, value_of
from kl_lens.reporting.data import RunView, collect
from kl_lens.reporting.names import plan_title, runtime_title
from kl_lens.reporting.numbers import percent, with_error
from kl_lens.run.folder import Run
from kl_lens.run.records import ARTIFACT, ORIGINAL, PLAN, Subject
from kl_lens.study.events import JobEstimate
from kl_lens.study.run import UNIFORM_FP16, RunResult

RIVALS = 3  # shown beside each recommendation; the report has all


def show(result: RunResult | JobEstimate) -> None:
    if isinstance(result, JobEstimate):
        show_estimate(result)
        return
    with Run.open(result.folder) as run:
        view = collect(run)
    out = console()
    answers: list[str] = []
    rows: list[Row | None] = []
    for target, names in result.plans.items():
        answers += _answer(view, names[-1], target)
        for name in _nearest(view, names, target):
            row = row_of(view, name, target)
            rows.append({h: f"[bold]{cell}[/]" for h, cell in row.items()} if name == names[-1] else row)
        rows.append(None)
    used = [p for p in view.profiles if p.protocol == "use"]
    lines = [*_protocol(view, result), *unmeasurable(used)]
    lines += [f"Failed, see the log: kl-lens {command}" for command in result.failed]
    if (result.folder / "report.html").is_file():
        lines.append(f"Report: kl-lens report --run {shlex.quote(str(result.folder))} --open")
    for place in list(result.exported.values())[: int(result.generates)]:
        lines.append(f'Next: kl-lens generate {shlex.quote(str(place))} --prompt "The history of the city"')
    out.print()
    for line in answers:
        out.print(line, soft_wrap=True)
    out.print(table("", rows))
    for line in [f"Done in {clock_time(result.seconds)}.", *lines]:
        out.print(line, soft_wrap=True)


def _answer(view: RunView, name: str, target: str) -> list[str]:
    """Size and perplexity; the target and whether it is met."""
    plan = view.plan(name)
    assert plan is not None
    subject = _subject(target, name)
    size, base = view.subject_bytes(subject) or plan.bytes, view.subject_bytes(_subject(target, UNIFORM_FP16))
    original, own = (
        value_of(view, each, "perplexity", "token_perplexity") for each in (Subject(ORIGINAL), subject)
    )
    stock = plan.plan.notes.get("taken_over")
    words = [
        f"{runtime_title(target)}: {f'{plan_title(str(stock))}, ' if stock else ''}{human_bytes(size)}",
        f"{percent(size / base)} of FP16" if base else "",
        f"perplexity {own.value:.2f} (original {original.value:.2f})" if own and original else "",
    ]
    return [", ".join(filter(None, words)) + ".", f"  {target_of(plan, view.unit)}{measured_of(view, plan)}"]


def _nearest(view: RunView, names: Sequence[str], target: str) -> list[str]:
    """The recommendation and the rivals whose files are nearest in size, largest first."""
    size = {name: view.subject_bytes(_subject(target, name)) or 0 for name in names}
    own = size[names[-1]]
    rivals = sorted((n for n in names[:-1] if n != UNIFORM_FP16), key=lambda n: abs(size[n] - own))[:RIVALS]
    return sorted([*rivals, names[-1]], key=lambda n: -size[n])


def row_of(view: RunView, name: str, target: str) -> Row:
    subject = _subject(target, name)
    size = view.subject_bytes(subject)
    kl = value_of(view, subject, "divergence", "kl_mean")
    perplexity = value_of(view, subject, "perplexity", "token_perplexity")
    timed = [p for p in view.profiles if p.subject.key == subject.key and p.protocol == "use"]
    ratio = speed_ratio(timed[-1]) if timed else None
    return {
        "for": runtime_title(target),
        "file": plan_title(name),
        "size": human_bytes(size) if size else "",
        "KL, nats": with_error(kl) if kl else "",
        "perplexity": f"{perplexity.value:.2f}" if perplexity else "",
        "speed, × FP16": ratio.brief if ratio else "",
    }


def _protocol(view: RunView, result: RunResult) -> list[str]:
    """What the numbers rest on."""
    scores = [s for s in view.scores if s.kind == "perplexity" and s.subject.what == ORIGINAL]
    if not scores:
        return []
    test, settings = scores[-1], result.settings
    return [
        f"Test {view.unit.text}: {test.what}, {test.tokens:,} {view.unit.one}s; KL is from the original, per "
        f"{view.unit.one}.",
        f"Small samples: {settings.calibration.windows} calibration and {settings.evaluation_windows} test windows. "
        "For more: --windows, --evaluation-windows.",
    ]


def _subject(target: str, plan: str) -> Subject:
    return Subject(PLAN, plan) if target == "torch" else Subject(ARTIFACT, plan, target)
