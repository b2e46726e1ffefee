"""`kl-lens run`: one line for each stage while it works; in the end the answers, a small table, the next command."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from io import StringIO
from pathlib import Path
from typing import Any

from kl_lens.base.errors import printable
from kl_lens.base.progress import Progress
from kl_lens.base.units import human_bytes
from kl_lens.cli.progress import (
    TITLE_WIDTH,
    Forecast,
    clock_time,
    shown_progress,
    stage_title,
)
from kl_lens.cli.terminal import Bold, Red, Row, Shown, Terminal, table, wrapped
from kl_lens.reporting.answer import (
    closest_files,
    measured_of,
    plainly,
    speed_ratio,
    target_of,
    unmeasurable,
)
from kl_lens.reporting.data import Judged, RunView, collect
from kl_lens.reporting.names import percent, plan_title, runtime_title, with_error
from kl_lens.run.folder import Run
from kl_lens.run.records import ARTIFACT, ORIGINAL, Subject
from kl_lens.study.events import JobEstimate
from kl_lens.study.run import UNIFORM_FP16, RunResult

LINE_INTERVAL = 60.0  # seconds between two lines of progress where there is no terminal
BUSY = 0.2  # share of the processors that is worth a sentence
RIVALS = 3  # shown beside each recommendation; the report has all


class Screen(Terminal):
    """Stages with their time on standard error; everything else goes to `RUN/log/`."""

    def __init__(self, verb: str, show: Callable[[Terminal, Any], None]) -> None:
        super().__init__(verb)
        self._show = show  # prints the result of a stage
        self._log: Path | None = None
        self._early = ""  # said before there was a folder
        self._progress: Progress | None = None  # of the stage
        self._forecast = Forecast()

    def expect(self, estimate: JobEstimate) -> None:
        self._forecast.expect(estimate.stages)
        self._write("\n")
        self.note(f"== {_in_all(estimate)}")
        self._say(_in_all(estimate))

    def keep_in(self, folder: Path) -> None:
        self._log = folder / "log" / time.strftime("run-%Y%m%d-%H%M%S.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._write(self._early)
        self._say(printable(f"Log: {self._log}"))

    def note(self, text: str) -> None:
        self._write(printable(text) + "\n")

    def tell(self, text: str) -> None:
        self.warn(text)
        self._say(printable(f"kl-lens {self.verb}: {text}"))

    def progress(self, title: str) -> AbstractContextManager[Progress]:
        if self._progress is None:  # before the first stage
            return shown_progress(title.capitalize(), LINE_INTERVAL, details=False)
        return nullcontext(self._progress)

    @contextmanager
    def stage(self, verb: str, target: str | None) -> Iterator[None]:
        title = stage_title(verb, target)
        outer = self.verb
        begin = time.monotonic()
        self._write("\n")
        self.note(f"== {title}")
        self.verb = verb
        self._forecast.begin(verb, target)
        try:
            shown = shown_progress(
                title, LINE_INTERVAL, details=False, forecast=self._forecast
            )
            with shown as self._progress:
                yield
        finally:
            self._progress = None
            self.verb = outer
        self._forecast.end()
        self._say_done(title, clock_time(time.monotonic() - begin))

    def skipped(self, verb: str, target: str | None) -> None:
        self._forecast.begin(verb, target)
        self._forecast.end(counts=False)
        self._say_done(stage_title(verb, target), "already done")

    def _say_done(self, title: str, spent: str) -> None:
        seconds = self._forecast.left
        remaining = f"  about {clock_time(seconds)} left" if seconds else ""
        self._say(f"{title:{TITLE_WIDTH}} {spent}{remaining}")

    def result(self, result: object) -> None:
        if result is not None:
            with redirect_stdout(StringIO()) as shown:
                self._show(self, result)
            self._write(shown.getvalue())

    def _say(self, text: str) -> None:
        print(wrapped(text, sys.stderr), file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if self._log is None:
            self._early += text
            return
        with self._log.open("a", encoding="utf-8") as file:
            file.write(text)


# -- in the end ----------------------------------------------------------------------------------------------


def show_run(result: RunResult | JobEstimate) -> Shown:
    if isinstance(result, JobEstimate):
        rows = [
            _cost(stage_title(s.verb, s.target), s.seconds, s.disk) for s in result.stages
        ]
        total = _cost("in all", result.seconds, result.disk)
        yield table(
            f"Estimate for {result.windows} calibration windows", [*rows, None, total]
        )
        yield f"{_in_all(result)} Memory: about {human_bytes(result.memory)}. Nothing was measured."
        return
    with Run.open(result.folder) as run:
        view = collect(run)
    files: list[Row | None] = []
    yield ""
    for target, reason in result.without_file.items():
        problem = "the file does not work" if target in result.exported else "no file"
        yield Red(f"{runtime_title(target)}: {problem}: {reason}")
    for target in result.exported:
        names = result.plans[target]
        yield from _answer(view, names[-1], target, result.exported[target])
        quantized = [name for name in names if name != UNIFORM_FP16]
        recommended = row_of(view, names[-1], target)
        files.append({heading: Bold(cell) for heading, cell in recommended.items()})
        for name in closest_files(view, quantized, target, RIVALS):
            if name != names[-1]:
                files.append(row_of(view, name, target))
        files.append(None)
    yield table("", files)
    evaluates = "evaluate" not in result.failed
    if evaluates and any("*" in str(row["KL, nats"]) for row in files if row):
        again = f"kl-lens evaluate --run {shlex.quote(str(result.folder))}"
        yield f"* in PyTorch, as deployed. To judge every file in its runtime: {again}"
    yield f"Done in {clock_time(result.seconds)}."
    yield from _protocol(view, result)
    if result.original:
        yield f"Note: {result.original}."
    yield from unmeasurable(view.profiles)
    if result.failed:
        yield f"Failed, see the log: {', '.join(dict.fromkeys(result.failed))}."
    if (result.folder / "report.html").is_file():
        yield f"Report: kl-lens report --run {shlex.quote(str(result.folder))} --open"
    for target, path in result.exported.items():
        if target in result.without_file or not result.generates:
            continue
        yield f'Next: kl-lens generate {shlex.quote(str(path))} --prompt "The history of the city"'
        return


def _in_all(estimate: JobEstimate) -> str:
    compiling = (
        f", with {clock_time(estimate.compiling)} to compile kernels, once"
        if estimate.compiling
        else ""
    )
    busy = (
        f" Other programs use {percent(estimate.busy)} of the processors now: it takes longer beside them."
        if estimate.busy >= BUSY
        else ""
    )
    return f"About {clock_time(estimate.seconds)} in all{compiling}.{busy}"


def _cost(title: str, seconds: float, disk: int) -> Row:
    return {
        "stage": title,
        "time": clock_time(seconds),
        "disk": human_bytes(disk) if disk else "",
    }


def _answer(view: RunView, name: str, target: str, path: Path) -> list[str]:
    """What everybody understands; the target, and whether it is met; where the file is."""
    plan = view.plan(name)
    assert plan is not None
    judged = view.judged(plan, target)
    perplexity = (
        f" Perplexity {judged.perplexity.value:.2f} (original {judged.original:.2f})."
        if judged.perplexity and judged.original
        else ""
    )
    stock = plan.notes.get("taken_over")
    taken = f" It is {plan_title(str(stock))}." if stock else ""
    return [
        f"{plainly(view, plan)}{taken}",
        f"  {target_of(plan, view.unit)}{measured_of(view, plan)}{perplexity}",
        f"  {next(iter(sorted(path.glob('*.gguf'))), path)}",
    ]


def row_of(view: RunView, name: str, target: str) -> Row:
    subject = _subject(target, name)
    size = view.subject_bytes(subject)
    plan = view.plan(name)
    judged = Judged() if plan is None else view.judged(plan, target)
    if not judged.is_test:
        judged = Judged()
    kl = judged.kl
    perplexity = judged.perplexity
    timed = [p for p in view.profiles if p.subject.key == subject.key]
    ratio = speed_ratio(timed[-1]) if timed else None
    return {
        "for": runtime_title(target),
        "file": plan_title(name),
        "size": human_bytes(size) if size else "",
        "KL, nats": with_error(kl) + " *" * judged.stands_in if kl else "",
        "perplexity": f"{perplexity.value:.2f}" if perplexity else "",
        "speed, × FP16": ratio.brief if ratio else "",
    }


def _protocol(view: RunView, result: RunResult) -> list[str]:
    """What the numbers rest on."""
    scores = [
        s for s in view.scores if s.kind == "perplexity" and s.subject.what == ORIGINAL
    ]
    if not scores:
        return []
    test = scores[-1]
    settings = result.settings
    return [
        f"Test {view.unit.text}: {test.what}, {test.tokens:,} {view.unit.one}s; KL is from the original, per "
        f"{view.unit.one}.",
        f"Small samples: {settings.calibration.windows} calibration and {settings.evaluation_windows} test windows. "
        "For more: --windows, --evaluation-windows.",
    ]


def _subject(target: str, plan: str) -> Subject:
    return Subject(ARTIFACT, plan, target)
