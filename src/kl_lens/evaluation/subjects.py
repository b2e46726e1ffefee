"""Who is judged: the original, a plan computed in PyTorch, an exported file.

A subject has a name for people and an identity for the journal: a hash of everything that makes its numbers. A plan
that was edited, or a folder that was exported again, has another identity under the same name, and is judged afresh.
"""

from __future__ import annotations

import hashlib
import json
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import TargetError
from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.formats import known_formats
from kl_lens.records import Artifact
from kl_lens.sensitivity.perturbation import Kernels
from kl_lens.subjects import bracketed
from kl_lens.targets import RuntimeSettings, Session, Target, deployed, locate, target_of

ORIGINAL = "original"
# Final states of the original that are kept between students.
REMEMBERED = 2 * 10**9


class Subject(ABC):
    """Something that can be opened as a session."""

    name: str
    identity: str

    @abstractmethod
    def open(self) -> Session:
        """A session of its own; whoever opens it closes it."""

    def check(self) -> None:  # noqa: B027 - a model in memory does not vanish
        """Raises TargetError when what was opened is no longer there, or has changed."""


class TorchSubject(Subject):
    """The checkpoint, with the weights that some formats leave of it."""

    def __init__(
        self,
        model: LoadedModel,
        name: str = ORIGINAL,
        formats: Mapping[str, str] | None = None,
        as_deployed: str | None = None,
    ) -> None:
        self.model = model
        self.name = name
        self.formats = dict(formats or {})
        self.as_deployed = as_deployed
        parameter = next(model.model.parameters())
        self.identity = _hash(
            {
                "model": model.fingerprint,
                "dtype": str(parameter.dtype),
                "formats": sorted(self.formats.items()),
                "deployed": as_deployed,
                "runtime": [torch.__version__, parameter.device.type, platform.machine()],
            }
        )

    def open(self) -> Session:
        context: Kernels | None = deployed(self.as_deployed) if self.as_deployed else None
        remember = REMEMBERED if self.name == ORIGINAL else 0
        return TorchSession(self.model, self.formats, deployed=context, remember=remember)


class ArtifactSubject(Subject):
    """An exported folder or a bare file."""

    def __init__(self, path: Path, settings: RuntimeSettings | None = None, name: str | None = None) -> None:
        self.settings = settings or RuntimeSettings()
        self.path, self.artifact = locate(path)
        self._target: Target = target_of(self.path)
        self._plain_name = name or str(path)
        self.name = self._plain_name + bracketed(self.settings.unusual)
        self.files = _files(self.path, self.artifact)
        self._seen = _stamps(self.name, self.files)
        self.identity = _hash(
            {
                "files": [_file_hash(file) for file in self.files],
                "device": self.settings.device,
                "gpu_layers": self.settings.gpu_layers,
                "exact": self.settings.exact,
                "runtime": [self._target.version, platform.machine()],
            }
        )

    @property
    def target(self) -> str:
        return self._target.name

    def open(self) -> Session:
        return self._target.open(self.path, self.settings)

    def check(self) -> None:
        if _stamps(self.name, self.files) != self._seen:
            raise TargetError(f"its files changed while it was evaluated ({self.path}); evaluate it again")

    def counterpart(self, model: LoadedModel, plan: Mapping[str, str] | None = None) -> TorchSubject | None:
        """The same weights in PyTorch: those that the file *holds*, which may differ from those planned.

        With the formats of its plan (given as `plan`) it is that plan's own subject, `torch/PLAN`; with others (a map
        to GGUF's formats, fallbacks) it is called `torch/PLAN as TARGET`. None for a file without a record.
        """
        if self.artifact is None:
            return None
        formats = realised_formats(model, self.artifact)
        name = f"torch/{self.artifact.plan}"
        if plan is None or planned_formats(model, plan) != formats:
            name += f" as {self.target}"
        return TorchSubject(model, name, formats)

    def emulated(self, model: LoadedModel) -> TorchSubject | None:
        """The counterpart with the runtime's activations too; None where those are not modelled."""
        if self.artifact is None:
            return None
        formats = realised_formats(model, self.artifact)
        if not self._target.models_activations(self.settings, formats):
            return None
        name = f"torch/{self.artifact.plan} as {self.target} deployed"
        return TorchSubject(model, name, formats, as_deployed=self.target)

    def in_float32(self) -> ArtifactSubject | None:
        """The same file, computed in float32; None where the runtime has no such arithmetic, or this one is it."""
        exact = self._target.in_float32(self.settings)
        return None if exact is None else ArtifactSubject(self.path, exact, self._plain_name)


def planned_formats(model: LoadedModel, assignment: Mapping[str, str]) -> dict[str, str]:
    """A plan's formats, those of every quantizable component."""
    return {c.name: assignment.get(c.name, "fp16") for c in model.anatomy.candidates}


def realised_formats(model: LoadedModel, artifact: Artifact) -> dict[str, str]:
    """What an artifact holds of every quantizable component; a component it keeps in float32 is not named."""
    if artifact.model_fingerprint and artifact.model_fingerprint != model.fingerprint:
        raise TargetError(
            f"it was exported from another model ({artifact.model}) than the one it is compared with ({model.name})"
        )
    held = {tensor.component: tensor.realised for tensor in artifact.tensors}
    names = {c.name for c in model.anatomy.candidates}
    return {name: held[name] for name in sorted(names) if held.get(name) in known_formats()}


def _files(path: Path, artifact: Artifact | None) -> tuple[Path, ...]:
    """The files that hold weights and graph."""
    if artifact is None:
        return (path,)
    return tuple(path / name for name in artifact.files if (path / name).is_file())


def _stamps(name: str, files: tuple[Path, ...]) -> list[tuple[int, int]]:
    stamps = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            raise TargetError(f"{file} is gone; export {name} again") from None
        stamps.append((status.st_size, status.st_mtime_ns))
    return stamps


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _hash(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()
