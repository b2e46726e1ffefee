"""What can be scored: the original, a plan computed in PyTorch, an exported file; and how a command chooses among them.

Each has a subject, the record that its scores are about, and an identity for the journal: a hash of everything its
numbers depend on. An edited plan or a new export has another identity and is scored again; two plans with the same
weights have the same identity and are scored once.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from kl_lens.base.errors import (
    FormatError,
    KLLensError,
    PlanError,
    TargetError,
    UnlearntError,
)
from kl_lens.base.files import RECORD_FILE
from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.judging.torch_session import TorchSession
from kl_lens.model import ImageTask, LanguageTask, LoadedModel, Task
from kl_lens.model.files import read_config
from kl_lens.model.images import IMAGE
from kl_lens.run.folder import ALL_PLANS, Run, named_plans
from kl_lens.run.records import ORIGINAL, PLAN, Plan, Subject
from kl_lens.run.subjects import (
    artifact_subject,
    content_digest,
    file_digest,
    is_current,
    plan_digest,
)
from kl_lens.targets import Session, SessionSettings, Target, exported_places
from kl_lens.targets.registry import get_target, locate, target_of
from kl_lens.targets.session import CACHES
from kl_lens.targets.tokenizer import artifact_tokenizer
from kl_lens.text.windows import beginning_of
from kl_lens.weights.recipes import FP16, Recipe, parsed

TORCH = "torch"
SAMPLE_TOKENS = 32  # in the report's samples of text
# What a runtime may raise for a damaged or missing file, besides our own errors.
RUNTIME_ERRORS = (KLLensError, OSError, RuntimeError)


class Judged(ABC):
    """Something that can be opened as a session."""

    subject: Subject

    identity: str

    @property
    def label(self) -> str:
        return self.subject.label

    @abstractmethod
    def open(self) -> Session: ...

    def check(self) -> None:  # noqa: B027 - a model in memory cannot change
        """Raises TargetError if the files are gone or have changed."""


class JudgedModel(Judged):
    """The checkpoint in PyTorch, quantized by recipes; without recipes, the original. `deployed`: with activations as
    this target's kernels see them."""

    def __init__(
        self,
        model: LoadedModel,
        recipes: Mapping[str, Recipe] | None = None,
        subject: Subject | None = None,
        deployed: Target | None = None,
        caches: Mapping[str, str] | None = None,
        memory_budget: int = DEFAULT_MEMORY,
    ) -> None:
        self._memory_budget = memory_budget
        self.model = model
        self.recipes = dict(recipes or {})
        self.deployed = deployed
        self.caches = dict(caches or {})
        digest = plan_digest({}, model.fingerprint)
        self.subject = subject or Subject(ORIGINAL, digest=digest)

    @classmethod
    def of_plan(
        cls, model: LoadedModel, plan: Plan, name: str | None = None
    ) -> JudgedModel:
        """Raises if the model has other statistics than the plan was made with."""
        assignment = plan.assignment
        learnt = model.weights.learnt_by(parsed(assignment).values(), plan.statistics)
        digest = plan_digest(assignment, model.fingerprint, learnt)
        subject = Subject(PLAN, name or plan.name, digest=digest)
        return cls(model, planned_recipes(model, assignment), subject, caches=plan.caches)

    @cached_property
    def _weights(self) -> object:
        return self.model.weights.digests(self.recipes)

    @property
    def identity(self) -> str:  # type: ignore[override]
        parameter = next(self.model.model.parameters())
        fast = self.model.chain.uses_kernels()
        return content_digest(
            {
                "model": self.model.fingerprint,
                "weights": self._weights,
                "dtype": str(parameter.dtype),
                "deployed": self.deployed and self.deployed.name,
                **({"caches": self.caches} if self.caches else {}),
                "runtime": [torch.__version__, parameter.device.type, platform.machine()],
                **({} if fast else {"kernels": "transformers"}),
            }
        )

    def open(self) -> Session:
        """The original keeps outputs, for comparing several subjects."""
        return TorchSession(
            self.model,
            self.recipes,
            deployed=self.deployed,
            memory_budget=self._memory_budget if self.subject.what == ORIGINAL else 0,
            caches=self.caches,
        )


class JudgedArtifact(Judged):
    """An exported folder, or a file without a record. `plan`: its plan in the run; without one it is named by its
    path."""

    def __init__(
        self, path: Path, settings: SessionSettings | None = None, plan: str | None = None
    ) -> None:
        self.settings = settings or SessionSettings()
        self.path, self.artifact = locate(path)
        self._plan = plan
        self.target = (
            get_target(self.artifact.target) if self.artifact else target_of(self.path)
        )
        self.target.check_device(self.settings)  # the label says where it ran
        self.subject = artifact_subject(
            self.path, self.artifact, self.target.name, plan, self.settings.unusual
        )
        # The files that hold weights and graph.
        paths = (
            self.target.loaded_files(self.path)
            if self.artifact is None
            else [self.path / name for name in self.artifact.files]
        )
        self.files = tuple(path for path in paths if path.is_file())
        self._stamps = self._read_stamps()
        self.bytes = sum(size for size, _ in self._stamps)
        self.identity = content_digest(
            {
                "files": [file_digest(file) for file in self.files],
                "settings": self.settings.unusual,
                "runtime": [self.target.name, self.target.version, platform.machine()],
            }
        )

    def open(self, threads: int | None = None) -> Session:
        settings = self.settings
        if threads is not None:
            settings = replace(settings, threads=threads)
        return self.target.open(self.path, settings)

    def check(self) -> None:
        if self._read_stamps() != self._stamps:
            raise TargetError(
                f"{self.path}: its files changed during the evaluation; evaluate it again"
            )

    def _read_stamps(self) -> list[tuple[int, int]]:
        try:
            stats = [path.stat() for path in self.files]
            return [(stat.st_size, stat.st_mtime_ns) for stat in stats]
        except OSError as error:
            raise TargetError(
                f"{error.filename} is gone; export {self.label} again"
            ) from None

    def counterpart(self, model: LoadedModel) -> JudgedModel | None:
        """The same weights in PyTorch, `torch/PLAN as TARGET`: those in the file, which may differ from the planned
        ones. None for a file without a record."""
        if self.artifact is None:
            return None
        if self.artifact.model_fingerprint not in ("", model.fingerprint):
            raise TargetError(
                f"it was exported from another model ({self.artifact.model}) than the one it is compared with "
                f"({model.name})"
            )
        candidates = {c.name for c in model.anatomy.candidates}
        recipes = dict[str, Recipe]()
        for tensor in self.artifact.tensors:
            with suppress(FormatError):  # a type without a recipe, such as float32
                if tensor.component in candidates:
                    recipes[tensor.component] = Recipe.parse(tensor.realised)
        for tensor in self.artifact.tensors:
            name = tensor.component
            checked = tensor.weights and name in recipes
            if checked and model.weights.digest(name, recipes[name]) != tensor.weights:
                raise TargetError(
                    f"{tensor.component} in {tensor.realised} is not the exported weight (another quantizer version or "
                    "other statistics); export it again"
                )
        return JudgedModel(
            model, recipes, self._stand_in(), caches=self.artifact.settings.get(CACHES)
        )

    def emulated(self, plain: JudgedModel) -> JudgedModel | None:
        """The counterpart with the runtime's activations; None if those are not modelled."""
        if not self.target.models_activations(self.settings, plain.recipes):
            return None
        subject = self._stand_in(activations="deployed")
        return JudgedModel(plain.model, plain.recipes, subject, self.target, plain.caches)

    def in_float32(self) -> JudgedArtifact | None:
        """The same file computed in float32; None if the runtime cannot, or already does."""
        settings = self.target.in_float32(self.settings)
        if settings is None:
            return None
        return JudgedArtifact(self.path, settings, self._plan)

    def _stand_in(self, **settings: str) -> Subject:
        subject = self.subject
        outside = {} if self._plan else {"path": subject.settings["path"]}
        target = self.target.name
        return Subject(PLAN, subject.plan, target, outside | settings, subject.digest)


def planned_recipes(
    model: LoadedModel, assignment: Mapping[str, str]
) -> dict[str, Recipe]:
    """The recipe of every quantizable component under a plan."""
    recipes = parsed(assignment)
    return {c.name: recipes.get(c.name, FP16) for c in model.anatomy.candidates}


# -- which of them -------------------------------------------------------------------------------------------


@dataclass
class Selection:
    """The subjects to score, in order."""

    subjects: list[Judged] = field(default_factory=list)
    failures: dict[str, str] = field(
        default_factory=dict
    )  # subject → why it cannot be scored
    notes: list[str] = field(default_factory=list)  # subjects left out on purpose

    def add_artifact(
        self,
        path: Path,
        settings: SessionSettings,
        model: LoadedModel | None,
        run: Run | None = None,
        key: tuple[str, str] | None = None,
    ) -> None:
        """Adds an exported folder or file; `key`: its target and plan if it belongs to the run."""
        try:
            judged = JudgedArtifact(path, settings, key and key[1])
            exported = {} if judged.artifact is None else judged.artifact.settings
            if exported.get("static_tokens") or not exported.get("with_head", True):
                reason = "it has a static shape or no head, for benchmark_app"
                self.notes.append(f"{judged.label} is not evaluated: {reason}")
                return
            if model is not None:
                judged.counterpart(model)
        # A file from outside the run: scored, but not compared.
        except UnlearntError as error:
            self.notes.append(f"{path} is not compared with PyTorch: {error}")
        except (KLLensError, OSError) as error:
            self.failures["/".join(key) if key else str(path)] = str(error)
            return
        if run is not None and key is not None and not is_current(run, judged.subject):
            reason = "was exported from an older version of its plan"
            if judged.artifact is None:
                reason = f"has lost its record ({RECORD_FILE})"
            self.notes.append(f"{judged.label} {reason}; export it again")
        self.subjects.append(judged)


def given_subjects(
    paths: Sequence[Path],
    settings: SessionSettings,
    model: LoadedModel | None = None,
    run: Run | None = None,
) -> Selection:
    """Files given by path."""
    selection = Selection()
    folders = {} if run is None else exported_places(run)
    keys = {folder.resolve(): key for key, folder in folders.items()}
    for path in paths:
        key = keys.get((path.parent if path.is_file() else path).resolve())
        selection.add_artifact(path, settings, model, run, key)
    return selection


def run_subjects(
    run: Run,
    model: LoadedModel,
    settings: SessionSettings,
    stored: Mapping[str, Plan | KLLensError],
    *,
    plans: str = ALL_PLANS,
    targets: Sequence[str] | None = None,
) -> Selection:
    """A run's plans in PyTorch (target `torch`) and its exported files. `stored`: the run's plans, or why one cannot be
    read; `plans`: of them, separated by commas, or `all`."""
    selection = Selection()
    read = dict[str, Plan]()
    for name, plan in stored.items():
        if isinstance(plan, KLLensError):
            selection.failures[f"{TORCH}/{name}"] = str(plan)
        else:
            read[name] = plan
    names = named_plans(plans)
    for name in names or ():
        if name not in read:
            raise PlanError(
                selection.failures.get(f"{TORCH}/{name}")
                or f"{run.folder} has no plan {name!r}; it has {', '.join(sorted(read)) or 'none'}"
            )
    for name in read if names is None else names:
        if targets is None or TORCH in targets:
            try:
                selection.subjects.append(JudgedModel.of_plan(model, read[name], name))
            except FormatError as error:  # made with other statistics than the run has
                selection.failures[f"{TORCH}/{name}"] = str(error)
    for key, folder in exported_places(run).items():
        target, name = key
        of_target = targets is None or target in targets
        if of_target and (names is None or name in names):
            selection.add_artifact(folder, settings, model, run, key)
    return selection


def artifact_task(
    judged: JudgedArtifact, tokenizer: str | None = None, images: str | None = None
) -> Task:
    """The task of a file without its model; the record says text or images."""
    settings = {} if judged.artifact is None else judged.artifact.settings
    if settings.get("task") == IMAGE:
        return ImageTask.of(judged.path, read_config(judged.path), images)
    return LanguageTask(
        artifact_tokenizer(judged.path, judged.open, tokenizer), judged.label
    )


# -- samples of text -----------------------------------------------------------------------------------------


def likeliest(
    session: Session, ids: Sequence[int], end: int | None, most: int
) -> Iterator[int]:
    """The likeliest tokens after these, until the end of text."""
    session.reset()
    logits = session.prefill(ids)
    for _ in range(most):
        token = int(logits.argmax())
        if token == end:
            return
        yield token
        logits = session.step(token)


def store_continuations(
    run: Run,
    model: LoadedModel,
    artifacts: Sequence[JudgedArtifact],
    prompts: Sequence[str],
) -> None:
    """Stores continuations of each prompt by the original and by each artifact."""
    tokenizer = model.require_tokenizer()
    begins = {beginning_of(tokenizer)} - {None}
    # Shown side by side, so all must have the same prompts.
    run.forget_results("generation")
    for judged in (JudgedModel(model), *artifacts):
        with closing(judged.open()) as session:
            for prompt in prompts:
                ids = [*begins, *tokenizer.encode(prompt, add_special_tokens=False)]
                new = list(likeliest(session, ids, tokenizer.eos_token_id, SAMPLE_TOKENS))
                value = {
                    "prompt": prompt,
                    "text": tokenizer.decode(new),
                    "runtime": session.description,
                }
                run.store_result("generation", judged.subject, prompt, value)
