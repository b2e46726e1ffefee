"""What the stages of one run share: its settings and folder, the model, and which targets still get a file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kl_lens import judging, planning
from kl_lens.base.errors import TargetError
from kl_lens.base.units import human_bytes
from kl_lens.judging import choosing
from kl_lens.judging.scoring import COMPARED_WINDOWS
from kl_lens.model import LoadedModel
from kl_lens.run.folder import SCREENED, Run, recommended_name
from kl_lens.run.readings import KL
from kl_lens.run.records import Plan
from kl_lens.run.subjects import current_results
from kl_lens.study import measure, settings as of
from kl_lens.study.planner import TargetPlanner
from kl_lens.study.run.background import Background
from kl_lens.study.run.settings import RunSettings
from kl_lens.study.session import Session
from kl_lens.study.settings import Limits
from kl_lens.targets import TARGETS, describe_target, earlier_artifact, get_target
from kl_lens.text.windows import Windows

UNIFORM_FP16 = "uniform_fp16"
FIRST_LOOK = 1  # window that shows whether a runtime computes what PyTorch does; a wrong weight shows in each


class Job:
    def __init__(
        self, settings: RunSettings, session: Session, journal: Run, model: LoadedModel
    ) -> None:
        self.settings = settings
        self.session = session
        self.journal = journal
        self.events = session.events
        self.folder = journal.folder
        self.background = Background(model, settings.opening, journal.folder)
        self.targets = [*settings.wanted]  # those that still get a file
        self.exported: dict[str, Path] = {}  # target → folder of the recommendation
        self.early: dict[str, str] = {}  # target → stock plan that was exported ahead
        self.failed: list[str] = []  # stages that others did not depend on
        self.without_file: dict[str, str] = {}  # target → why
        self.left_out: dict[str, str] = {}  # the same, of targets that nobody asked for
        self.hire = partial(
            measure.workers_for,
            settings.processes,
            model,
            settings.opening,
            session.events,
        )
        self._opened = model
        self._stock: dict[str, list[Plan]] = {}

    @property
    def model(self) -> LoadedModel:
        """With the run's own weights and statistics."""
        return self.session.in_run(self._opened, self.folder)

    # -- targets ------------------------------------------------------------------------------------------------

    def give_up(self, target: str, command: str, reason: str) -> None:
        """A target gets no file; the others go on."""
        self.without_file[target] = reason
        self.failed.append(command)
        self.events.tell(f"{describe_target(target).title}: {reason}")
        self.targets.remove(target)

    def too_small(self, target: str) -> str | None:
        """Why the limit allows no file, which is known before anything is measured."""
        limits = self.limits(target)
        if limits.bytes is None:
            return None
        least = self.planner(target, limits).smallest(self.menu(target))
        if least <= limits.bytes:
            return None
        share = self.settings.budget is not None
        flag = "--budget" if share else "--memory" if limits.memory else "--max-bytes"
        size = human_bytes(limits.bytes)
        return (
            f"{flag} {size} cannot be met: the smallest possible is {human_bytes(least)}"
        )

    def refuse_without_target(self) -> None:
        """Raises if no target can be served, and says which would."""
        if self.targets:
            return
        tried = self.left_out | self.without_file
        whole = "; ".join(f"{name}: {why}" for name, why in tried.items())
        suitable = [name for name in TARGETS if self._would_do(name)]
        advice = (
            f"--target {','.join(suitable)} would do"
            if suitable
            else "no target would do"
        )
        reasons = whole or "no target is installed: pip install 'kl-lens[gguf]'"
        raise TargetError(
            f"no file can be written, so nothing was measured ({reasons}); {advice}"
        )

    def _would_do(self, target: str) -> bool:
        target_facts = describe_target(target)
        if target in self.left_out | self.without_file or target_facts.lacks():
            return False
        if target_facts.unsupported(
            self._opened.anatomy.model_type, self._opened.template
        ):
            return False
        limits = self.limits(target)
        with suppress(Exception):  # whatever its libraries raise, it would not do
            least = self.planner(target, limits).smallest(self.menu(target))
            return least <= (limits.bytes or math.inf)
        return False

    # -- what stages are done with ------------------------------------------------------------------------------

    def menu(self, target: str) -> Sequence[str]:
        return self.settings.menu_of(target, self._opened.anatomy)

    def limits(self, target: str) -> Limits:
        limits = self.settings.limits
        share = self.settings.budget
        if share is None:
            instead = limits.max_drop is not None or limits.bytes is not None
            return replace(limits, max_loss=None) if instead else limits
        whole = sum(2 * c.parameters for c in self._opened.anatomy.components)
        folder = self.folder / "artifacts" / target / UNIFORM_FP16
        if (artifact := earlier_artifact(folder)) is not None:
            whole = artifact.realised_bytes
        return Limits(max_bytes=int(share * whole))

    def planner(
        self, target: str | None = None, limits: Limits | None = None
    ) -> TargetPlanner:
        held_out = self.settings.held_out
        return TargetPlanner(
            self.session, self.journal, target, held_out, lambda: self.model, limits
        )

    def runtime(self) -> of.Runtime:
        return of.Runtime(threads=self.settings.threads)

    def draw_windows(self) -> Windows:
        """To measure on."""
        return self.session.calibration_windows(
            self.settings.calibration, self._opened.task
        )

    def judging(self, *, whole: bool) -> dict[str, int]:
        """The length and number of windows that files are judged on; not `whole`: compared with PyTorch alone."""
        windows = self.settings.evaluation_windows or COMPARED_WINDOWS
        length = self.settings.calibration.window_length or self.model.task.window_length
        return {"window": length, "limit": windows if whole else FIRST_LOOK}

    # -- plans and their files ----------------------------------------------------------------------------------

    def plans(self) -> dict[str, Plan]:
        components = self.journal.components
        paths = sorted((self.folder / "plans").glob("*.json"))
        return {path.stem: planning.read_plan(path, components) for path in paths}

    def is_planned(self, target: str) -> bool:
        return (
            self.folder / "plans" / f"{self.settings.recommended(target)}.json"
        ).is_file()

    def stock(self, target: str) -> list[Plan]:
        """The usual stock recipes."""
        if target not in self._stock:
            planner = self.planner(target)
            table = self.journal.table()
            self._stock[target] = planner.rivals(table, None, everything=False)
        return self._stock[target]

    def compared(self, target: str) -> list[str]:
        """The plans to export and compare for a target, the recommendation last."""
        plans = self.plans()
        name = self.settings.recommended(target)
        # What runs with other limits recommended stays as it is.
        of_runs = recommended_name(target)
        own_names = (name, f"{name}.own")
        candidates = [p for p in plans.values() if p.target == target]
        candidates = [
            p for p in candidates if p.name in own_names or not p.name.startswith(of_runs)
        ]
        candidates.sort(key=lambda p: -(p.file_bytes or 0))
        names = [UNIFORM_FP16, *(p.name for p in candidates)]
        return [*(n for n in dict.fromkeys(names) if n in plans and n != name), name]

    def deciding(self, target: str) -> set[str]:
        """The plans whose files prove the answer, so that only their runtime may judge them: the recommendation, of the
        stock files that are no larger the nearest and the best, the next larger one, and our own plan if it lost to
        one of them."""
        sizes = self.sizes(target)
        losses = self.stock_losses(target)
        recommended = self.settings.recommended(target)
        stock = [name for name in sizes if name in losses]
        contender = choosing.Contender(recommended, sizes[recommended], math.nan, None)
        rivals = [
            choosing.Contender(name, sizes[name], losses[name], None) for name in stock
        ]
        always = {name for name in sizes if name != UNIFORM_FP16 and name not in stock}
        return always | choosing.deciding(contender, rivals)

    def stock_losses(self, target: str) -> dict[str, float]:
        """What stock files lose on test text, where they were judged, or else their plans on held-out text."""
        plans = self.plans()
        stock = [plans[name] for name in self.compared(target)[:-1]]
        losses = {
            p.name: p.measured.kl.value
            for p in stock
            if p.family == "stock" and p.measured
        }
        for score in judging.read_scores(self.journal, "divergence"):
            if score.subject.target == target and score.subject.plan in losses:
                losses[score.subject.plan] = score.values["kl_mean"].value
        return losses

    def sizes(self, target: str) -> dict[str, int]:
        """Bytes of the files to compare, of those that could be written."""
        folder = self.folder / "artifacts" / target
        records = {
            name: earlier_artifact(folder / name) for name in self.compared(target)
        }
        return {
            name: artifact.realised_bytes
            for name, artifact in records.items()
            if artifact
        }

    def read_ahead(self, target: str, plan: str, *, whole: bool = True) -> None:
        """Begins to compute a file's logits for `evaluate`, where a GPU leaves the processors time."""
        files = self.background.files
        compared = [
            result.subject for result in current_results(self.journal, "agreement")
        ]
        is_compared = any(
            (subject.target, subject.plan) == (target, plan) for subject in compared
        )
        if files is None or is_compared:
            return
        model = self.model
        get_target(target).prepare()  # here, not in a thread
        text = judging.prepare(
            self.settings.evaluation_text, model.task, **self.judging(whole=whole)
        )
        columns = model.anatomy.component(model.anatomy.head).shape[-2]
        folder = self.folder / "artifacts" / target / plan
        files.read(folder, self.runtime().session(), text, columns)

    # -- digests ------------------------------------------------------------------------------------------------

    def measurements_digest(self, target: str) -> str:
        """Of the measurements for a target, of a staged search what it chose. What was measured besides, for other
        limits or targets, is no reason to do a stage again."""
        role = self.journal.measured_role(target)
        chosen = (self.journal.load(SCREENED, role) or {}).get("chosen")
        rows = [
            (m.component, m.format, m.windows, m.metrics[KL].value)
            for m in self.journal.measurements(role)
            if chosen is None or [m.component, m.format] in chosen
        ]
        return _digest(json.dumps(sorted(rows)).encode())

    def files_digest(self, patterns: Sequence[str]) -> str:
        """Of the matching files of the run."""
        paths = sorted(path for pattern in patterns for path in self.folder.glob(pattern))
        return _digest(
            *(
                str(path.relative_to(self.folder)).encode() + path.read_bytes()
                for path in paths
            )
        )


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]
