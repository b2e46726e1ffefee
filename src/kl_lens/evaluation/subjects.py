"""Who is judged: the original, a plan computed in PyTorch, an exported file.

A subject has a name for people and an identity for the journal: a hash of everything that makes its numbers. A plan
that was edited, or a folder that was exported again, has another identity under the same name, and is judged afresh.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import TargetError
from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.formats import known_formats
from kl_lens.records import Artifact
from kl_lens.sensitivity.perturbation import Kernels
from kl_lens.targets import Session, deployed, open_session, read_artifact
from kl_lens.targets.gguf.library import ENVIRONMENT_VARIABLE

ORIGINAL = "original"
# Final states of the original that are kept between students.
REMEMBERED = 2 * 10**9


@dataclass(frozen=True)
class RuntimeSettings:
    """How artifacts are run."""

    device: str = "CPU"  # OpenVINO's
    threads: int | None = None
    gpu_layers: int = 0  # llama.cpp's
    exact: bool = False  # float32 arithmetic in place of what a deployment uses

    @property
    def label(self) -> str:
        """What sets these apart from the usual ones, for names; threads change speed only."""
        parts = [f"on {self.device}"] if self.device != "CPU" else []
        parts += [f"{self.gpu_layers} GPU layers"] if self.gpu_layers else []
        parts += ["exact"] if self.exact else []
        return f" ({', '.join(parts)})" if parts else ""


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
    """An exported folder or a .gguf file."""

    def __init__(self, path: Path, settings: RuntimeSettings | None = None, name: str | None = None) -> None:
        self.settings = settings or RuntimeSettings()
        self.path, self.artifact = _located(path)
        self._plain_name = name or str(path)
        self.name = self._plain_name + self.settings.label
        self.files = _files(self.path, self.artifact)
        self._seen = _stamps(self.name, self.files)
        self.identity = _hash(
            {
                "files": [_file_hash(file) for file in self.files],
                "device": self.settings.device,
                "gpu_layers": self.settings.gpu_layers,
                "exact": self.settings.exact,
                "runtime": [_library_version(self.target), platform.machine()],
            }
        )

    @property
    def target(self) -> str:
        return "gguf" if self.artifact is None else self.artifact.target

    def open(self) -> Session:
        settings = self.settings
        return open_session(
            self.path,
            device=settings.device,
            threads=settings.threads,
            gpu_layers=settings.gpu_layers,
            exact=settings.exact,
        )

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
        """The counterpart with the runtime's activations too; None where those are not modelled.

        They are modelled for llama.cpp on CPU, and for OpenVINO's deployed settings on ARM CPUs.
        """
        if self.artifact is None or self.settings.gpu_layers:
            return None
        if self.target == "openvino" and (
            self.settings.exact
            or self.settings.device != "CPU"
            or platform.machine() not in ("aarch64", "arm64")
        ):
            return None
        formats = realised_formats(model, self.artifact)
        if self.target == "openvino" and set(formats.values()) <= {"fp16"}:
            return None  # no integer kernels, but half-precision arithmetic, which is not modelled
        name = f"torch/{self.artifact.plan} as {self.target} deployed"
        return TorchSubject(model, name, formats, as_deployed=self.target)

    def in_float32(self) -> ArtifactSubject | None:
        """The same file, computed in float32; None where the runtime always rounds (llama.cpp), or this one is it."""
        if self.target != "openvino" or self.settings.exact:
            return None
        return ArtifactSubject(self.path, replace(self.settings, exact=True), self._plain_name)


def _library_version(target: str) -> str:
    """Another version of the runtime may give other numbers: they must not be mixed."""
    package = {"openvino": "openvino", "gguf": "xllamacpp"}[target]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "none"
    return version if target != "gguf" else f"{version} {os.environ.get(ENVIRONMENT_VARIABLE, '')}"


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


def _located(path: Path) -> tuple[Path, Artifact | None]:
    """The folder and its record, or a .gguf file that has none; a file of an exported folder stands for the folder."""
    if path.suffix != ".gguf":
        return path, read_artifact(path)
    try:
        artifact = read_artifact(path.parent)
    except TargetError:
        artifact = None
    if artifact is not None and artifact.target == "gguf" and path.name in artifact.files:
        return path.parent, artifact
    if not path.is_file():
        raise TargetError(f"{path}: no such file")
    return path, None


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
