"""The stages that write files."""

from __future__ import annotations

from kl_lens.base.errors import TargetError, UnsupportedError
from kl_lens.base.units import human_bytes
from kl_lens.study import export
from kl_lens.study.run.costs import Cost, Costs
from kl_lens.study.run.job import UNIFORM_FP16, Job
from kl_lens.study.run.stage import Basis, OfTarget
from kl_lens.targets import earlier_artifact, read_artifact


class Export(OfTarget):
    """An architecture that the runtime does not support is not a failure."""

    verb = "export"

    def plans(self, job: Job) -> list[str]:
        raise NotImplementedError

    def basis(self, job: Job) -> Basis:
        plans = self.plans(job)
        folder = job.folder / "artifacts" / self.target
        return Basis(
            f"export {self.target} {plans[-1]}",
            plans,
            job.files_digest([f"plans/{name}.json" for name in plans]),
            # Runs with other limits write the files of stock recipes again; their weights are the same.
            [f"artifacts/{self.target}/{plans[-1]}/artifact.json"],
            lost=not all(earlier_artifact(folder / name) for name in plans),
        )

    def work(self, job: Job) -> object:
        files = export.Files(self.target, job.events)
        return files.of_plans(job.journal, job.model, self.plans(job))

    def is_survived(self, job: Job, error: Exception) -> bool:
        if not isinstance(error, TargetError | RuntimeError):
            return False
        target = self.target
        job.events.tell(f"not exported to {target}: {error}")
        if job.settings.target is None and isinstance(error, UnsupportedError):
            job.left_out[target] = str(error)
            return True
        job.failed.append(f"export --target {target}")
        if self.plans(job)[-1] in (UNIFORM_FP16, job.settings.recommended(target)):
            job.without_file[target] = str(error)
        return True


class ExportFP16(Export):
    def plans(self, job: Job) -> list[str]:
        return [UNIFORM_FP16]

    def is_survived(self, job: Job, error: Exception) -> bool:
        survived = super().is_survived(job, error)
        if survived:
            job.targets.remove(self.target)
            job.refuse_without_target()
        return survived

    def finish(self, job: Job) -> None:
        """The limit may allow no file, which is known before anything is measured."""
        if (why := job.too_small(self.target)) is not None:
            job.give_up(self.target, f"plan --target {self.target}", why)
            job.refuse_without_target()

    def cost(self, costs: Costs) -> Cost:
        return costs.exporting(1, 2.0)


class ExportStock(Export):
    def applies(self, job: Job) -> bool:
        return self.target in job.early

    def plans(self, job: Job) -> list[str]:
        return [job.early[self.target]]

    def is_survived(self, job: Job, error: Exception) -> bool:
        survived = super().is_survived(job, error)
        if survived:
            del job.early[self.target]
        return survived


class ExportRecommended(Export):
    """A file that can be used, at once: who stops here keeps it."""

    def plans(self, job: Job) -> list[str]:
        return [job.settings.recommended(self.target)]

    def finish(self, job: Job) -> None:
        (name,) = self.plans(job)
        folder = job.folder / "artifacts" / self.target / name
        size = human_bytes(read_artifact(folder).realised_bytes)
        loss = job.plans()[name].measured
        quality = (
            "" if loss is None else f", KL about {loss.kl.value:.2g} on held-out text"
        )
        job.events.tell(
            f"{folder}: {size}{quality}; it can be used while what follows proves it"
        )
        job.exported[self.target] = folder

    def cost(self, costs: Costs) -> Cost:
        return costs.exporting(1, 0.8)


class ExportRivals(Export):
    def plans(self, job: Job) -> list[str]:
        early = job.early.get(self.target)
        return [name for name in job.compared(self.target)[1:-1] if name != early]

    def applies(self, job: Job) -> bool:
        return self.target in job.exported and bool(self.plans(job))

    def prepare(self, job: Job) -> None:
        job.session.drop_meters()  # all plans are made

    def cost(self, costs: Costs) -> Cost:
        return costs.exporting(costs.rivals, 0.8)
