"""The stages that show what the files are worth: judge, time, report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kl_lens import judging
from kl_lens.judging.evaluator import DIVERGENCE, PERPLEXITY
from kl_lens.judging.judged import store_continuations
from kl_lens.planning import stored_plans
from kl_lens.profiling.benchmark import UseSettings
from kl_lens.reporting import write_report
from kl_lens.run.records import ARTIFACT, Subject
from kl_lens.study import benchmark, evaluate
from kl_lens.study.run.costs import Cost, Costs
from kl_lens.study.run.exporting import (
    ExportFP16,
    ExportRecommended,
    ExportRivals,
    ExportStock,
)
from kl_lens.study.run.job import UNIFORM_FP16, Job
from kl_lens.study.run.stage import Basis, Stage
from kl_lens.targets import get_target

PROMPTS = ("The history of the city", "In the early years of the war ,")
NARROW = 1.05  # ends of a speed's interval: closer together, it is timed no longer


class Compare(Stage):
    """A window of each FP16 file beside PyTorch: a runtime that computes something else shows early."""

    verb = "evaluate"
    optional = True

    def begin(self, job: Job, passed: Stage | None) -> None:
        if isinstance(passed, ExportFP16) and passed.target in job.targets:
            job.read_ahead(passed.target, UNIFORM_FP16, whole=False)

    def work(self, job: Job) -> object:
        judge = _judge(job, [UNIFORM_FP16], job.targets)
        judge.text(job.settings.evaluation_text, (), **job.judging(whole=False))
        return judge.result

    def cost(self, costs: Costs) -> Cost:
        return costs.comparing()


class Judge(Stage):
    """What each file loses on the whole text."""

    verb = "evaluate"
    optional = True

    def begin(self, job: Job, passed: Stage | None) -> None:
        match passed:
            case ExportStock(target) if target in job.early:
                job.read_ahead(target, job.early[target])
            case ExportRecommended(target) if target in job.exported:
                job.read_ahead(target, job.settings.recommended(target))
            case ExportRivals(target) if target in job.exported:
                deciding = job.deciding(target) - {job.settings.recommended(target)}
                for name in sorted(deciding):
                    job.read_ahead(target, name)

    def prepare(self, job: Job) -> None:
        job.session.drop_meters()  # all plans are made

    def work(self, job: Job) -> object:
        settings = job.settings
        targets = [*job.exported] or [evaluate.TORCH]
        stock = {t: job.stock_losses(t) for t in job.exported}
        plans = dict.fromkeys(name for t in job.targets for name in job.compared(t))
        judge = _judge(
            job,
            [*plans],
            targets,
            again=settings.again,
            others=_keys({t: [UNIFORM_FP16, *names] for t, names in stock.items()}),
            deciding=lambda: _keys({t: job.deciding(t) for t in stock}),
        )
        extent = job.judging(whole=True)
        judge.text(settings.evaluation_text, {PERPLEXITY, DIVERGENCE}, **extent)
        judge.tasks(settings.tasks, extent["window"])
        return judge.result

    def cost(self, costs: Costs) -> Cost:
        return costs.judging()


def _judge(
    job: Job, plans: Sequence[str], targets: Sequence[str], **how: Any
) -> evaluate.Judge:
    if job.settings.threads is not None:
        torch.set_num_threads(job.settings.threads)
    selection = judging.run_subjects(
        job.journal,
        job.model,
        job.runtime().session(),
        stored_plans(job.folder / "plans", job.journal.components),
        plans=",".join(plans),
        targets=targets,
    )
    if job.background.files is not None:
        how["ahead"] = job.background.files.take
    model = job.model
    return evaluate.Judge(job.journal, job.session, selection, model.task, model, **how)


def _keys(files: Mapping[str, Iterable[str]]) -> list[str]:
    return [
        Subject(ARTIFACT, name, target).key
        for target, names in files.items()
        for name in names
    ]


def _working(job: Job) -> list[str]:
    """Targets whose recommended file was not seen to fail."""
    return [target for target in job.exported if target not in job.without_file]


class Samples(Stage):
    """Text by the original and by the recommended files, for the report."""

    verb = "generate"
    optional = True

    def obstacle(self, job: Job) -> str | None:
        if not job.model.task.generates:
            return "no text samples: this model classifies images"
        residency = job.model.residency
        if residency is not None and not residency.cached:
            return "no text samples: every token would read the whole model from disk"
        return None

    def work(self, job: Job) -> object:
        judged = [
            judging.JudgedArtifact(job.exported[target], plan=job.exported[target].name)
            for target in _working(job)
        ]
        store_continuations(job.journal, job.model, judged, PROMPTS)
        return None

    def cost(self, costs: Costs) -> Cost:
        return costs.writing_samples()


class Benchmark(Stage):
    """Times the files that decide, FP16, and the smallest, so that speeds between them can be predicted."""

    verb = "benchmark"
    optional = True

    def applies(self, job: Job) -> bool:
        return bool(_working(job))

    def obstacle(self, job: Job) -> str | None:
        writes = job.model.task.generates
        return None if writes else "no timing: this model classifies images"

    def basis(self, job: Job) -> Basis:
        files = self._files(job)
        records = job.files_digest([f"{file}/artifact.json" for file in files])
        # Another version may have another speed.
        versions = [get_target(target).version for target in _working(job)]
        return Basis(
            f"benchmark {files[-1]}",
            (files, job.settings.repeats, job.settings.threads),
            " ".join([records, *versions]),
        )

    def work(self, job: Job) -> object:
        use = UseSettings(
            (32, 128), 32, job.settings.repeats, job.runtime().session(), narrow=NARROW
        )
        files = [job.folder / file for file in self._files(job)]
        return benchmark.time_files(files, job.journal, job.session, use)

    def _files(self, job: Job) -> list[str]:
        files = []
        for target in _working(job):
            sizes = job.sizes(target)
            smallest = min(sizes, key=sizes.__getitem__)
            timed = job.deciding(target) | {UNIFORM_FP16, smallest}
            files += [f"artifacts/{target}/{plan}" for plan in sizes if plan in timed]
        return files

    def cost(self, costs: Costs) -> Cost:
        return costs.timing()


class Report(Stage):
    verb = "report"

    def work(self, job: Job) -> object:
        return write_report(job.journal)

    def cost(self, costs: Costs) -> Cost:
        return Cost(2.0)
