"""What can be scored: the original, a plan computed in PyTorch, an exported file.

Each has a subject, the record that its scores are about, and an identity for the journal: a hash of everything its
numbers depend on. An edited plan or a new export has another identity and is scored again; two plans with the same
weights have the same identity and are scored once.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from kl_lens.base.errors import FormatError, KLLensError, TargetError
from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.model import LoadedModel
from kl_lens.run.records import ARTIFACT, ORIGINAL, PLAN, Artifact, Subject
from kl_lens.run.subjects import artifact_digest, content_digest, file_digest, outside_path, plan_digest
from kl_lens.targets import Session, Target
from kl_lens.targets.registry import get_target, locate, target_of
from kl_lens.targets.session import SessionSettings
from kl_lens.weights.recipes import FP16, Recipe, parsed

# Bytes of the original's outputs that are kept for comparing several subjects.
REMEMBERED = 2 * 10**9
# What a runtime may raise for a damaged or missing file, besides our own errors.
RUNTIME_ERRORS = (KLLensError, OSError, RuntimeError)


class Judged(ABC):
    """Something that can be opened as a session."""

    subject: Subject

    @property
    def label(self) -> str:
        return self.subject.label

    @property
    @abstractmethod
    def identity(self) -> str:
        """A hash of everything its numbers depend on."""

    @abstractmethod
    def open(self) -> Session:
        """A new session; the caller closes it."""

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
    ) -> None:
        self.model, self.recipes, self.deployed = model, dict(recipes or {}), deployed
        self.subject = subject or Subject(ORIGINAL, digest=plan_digest({}, model.fingerprint))

    @classmethod
    def of_plan(
        cls, model: LoadedModel, name: str, assignment: Mapping[str, str], statistics: str | None = None
    ) -> JudgedModel:
        """`statistics`: the digest in the plan. Raises if the model has others."""
        learnt = model.weights.learnt_by(parsed(assignment).values(), statistics)
        subject = Subject(PLAN, name, digest=plan_digest(assignment, model.fingerprint, learnt))
        return cls(model, planned_recipes(model, assignment), subject)

    @cached_property
    def _weights(self) -> object:
        return self.model.weights.digests(self.recipes)

    @property
    def identity(self) -> str:
        parameter, fast = next(self.model.model.parameters()), self.model.chain.uses_kernels()
        return content_digest(
            {
                "model": self.model.fingerprint,
                "weights": self._weights,
                "dtype": str(parameter.dtype),
                "deployed": self.deployed and self.deployed.name,
                "runtime": [torch.__version__, parameter.device.type, platform.machine()],
                **({} if fast else {"kernels": "transformers"}),
            }
        )

    def open(self) -> Session:
        remember = REMEMBERED if self.subject.what == ORIGINAL else 0
        return TorchSession(self.model, self.recipes, deployed=self.deployed, remember=remember)


class JudgedArtifact(Judged):
    """An exported folder, or a file without a record.

    Args:
        path: a folder, a file in it, or a file without a record.
        settings: how it is run.
        plan: its plan in the run; without one it is named by its path.
    """

    def __init__(self, path: Path, settings: SessionSettings | None = None, plan: str | None = None) -> None:
        self.settings = settings or SessionSettings()
        self.path, self.artifact = locate(path)
        self._plan = plan
        self.target = get_target(self.artifact.target) if self.artifact else target_of(self.path)
        self.target.check_device(self.settings)  # the label says where it ran
        outside = {} if plan is not None else {"path": outside_path(self.path)}
        self.subject = Subject(
            ARTIFACT,
            plan or (self.artifact.plan if self.artifact else None),
            self.target.name,
            outside | self.settings.unusual,
            artifact_digest(self.artifact) if self.artifact else file_digest(self.path),
        )
        # The files that hold weights and graph.
        names = [self.path] if self.artifact is None else [self.path / name for name in self.artifact.files]
        self.files = tuple(path for path in names if path.is_file())
        self._seen = self._stamps()
        self._identity = content_digest(
            {
                "files": [file_digest(file) for file in self.files],
                "settings": self.settings.unusual,
                "runtime": [self.target.name, self.target.version, platform.machine()],
            }
        )

    @property
    def identity(self) -> str:
        return self._identity

    def open(self, threads: int | None = None) -> Session:
        """With `threads`, the compiled model is not cached."""
        if threads is None:
            return self.target.open(self.path, self.settings)
        return self.target.open(self.path, replace(self.settings, threads=threads), cold=True)

    def check(self) -> None:
        if self._stamps() != self._seen:
            raise TargetError(f"{self.path}: its files changed during the evaluation; evaluate it again")

    def _stamps(self) -> list[tuple[int, int]]:
        try:
            return [(status.st_size, status.st_mtime_ns) for status in map(Path.stat, self.files)]
        except OSError as error:
            raise TargetError(f"{error.filename} is gone; export {self.label} again") from None

    def counterpart(self, model: LoadedModel) -> JudgedModel | None:
        """The same weights in PyTorch, `torch/PLAN as TARGET`: those in the file, which may differ from the planned
        ones. None for a file without a record."""
        if self.artifact is None:
            return None
        recipes = _realised_recipes(model, self.artifact)
        for tensor in self.artifact.tensors:
            known = recipes.get(tensor.component) if tensor.weights else None
            if known is not None and model.weights.digest(tensor.component, known) != tensor.weights:
                raise TargetError(
                    f"{tensor.component} in {tensor.realised} is not the exported weight (another quantizer version or "
                    "other statistics); export it again"
                )
        return JudgedModel(model, recipes, self._stand_in())

    def emulated(self, plain: JudgedModel) -> JudgedModel | None:
        """The counterpart with the runtime's activations; None if those are not modelled."""
        if not self.target.models_activations(self.settings, plain.recipes):
            return None
        return JudgedModel(plain.model, plain.recipes, self._stand_in(activations="deployed"), self.target)

    def in_float32(self) -> JudgedArtifact | None:
        """The same file computed in float32; None if the runtime cannot, or already does."""
        settings = self.target.in_float32(self.settings)
        return None if settings is None else JudgedArtifact(self.path, settings, self._plan)

    def _stand_in(self, **settings: str) -> Subject:
        outside = {} if self._plan else {"path": self.subject.settings["path"]}
        return Subject(PLAN, self.subject.plan, self.target.name, outside | settings, self.subject.digest)


def planned_recipes(model: LoadedModel, assignment: Mapping[str, str]) -> dict[str, Recipe]:
    """The recipe of every quantizable component under a plan."""
    recipes = parsed(assignment)
    return {c.name: recipes.get(c.name, FP16) for c in model.anatomy.candidates}


def _realised_recipes(model: LoadedModel, artifact: Artifact) -> dict[str, Recipe]:
    """The recipe of every quantizable component in an artifact, without those kept in float32."""
    if artifact.model_fingerprint and artifact.model_fingerprint != model.fingerprint:
        raise TargetError(
            f"it was exported from another model ({artifact.model}) than the one it is compared with ({model.name})"
        )
    candidates = {component.name for component in model.anatomy.candidates}
    held = {}
    for tensor in artifact.tensors:
        with suppress(FormatError):  # a type without a recipe
            if tensor.component in candidates:
                held[tensor.component] = Recipe.parse(tensor.realised)
    return held
