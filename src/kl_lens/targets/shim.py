"""Targets as objects over the functions of their rooms, until those are objects themselves."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.errors import TargetError
from kl_lens.formats import Format
from kl_lens.records import Artifact, Plan
from kl_lens.targets.base import RuntimeSettings, Target
from kl_lens.targets.session import Session

if TYPE_CHECKING:
    from kl_lens.checkpoints import LoadedModel


class _Module(Target):
    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]
        self.title = {"gguf": "llama.cpp", "openvino": "OpenVINO"}[name]  # type: ignore[misc]

    def holds(self, fmt: Format, shape: Sequence[int]) -> str | None:
        return fmt.fits(tuple(shape))

    @property
    def menu(self) -> tuple[str, ...]:
        return ()

    def unsupported(self, model_type: str) -> str | None:
        return None

    def export(self, model: LoadedModel | Path, plan: Plan, folder: Path, **options: Any) -> Artifact:
        from kl_lens.targets.registry import export

        return export(model, plan, self.name, folder, **options)

    def owns(self, path: Path) -> bool:
        return self.name == "gguf" and path.suffix == ".gguf"

    def weight_file(self, place: Path) -> Path:
        return place if place.is_file() else max(place.iterdir(), key=lambda file: file.stat().st_size)

    def shipped_digests(self, place: Path) -> dict[str, str]:
        return {}

    def open(self, place: Path, settings: RuntimeSettings, *, cold: bool = False) -> Session:
        from kl_lens.targets.registry import open_session

        return open_session(
            place,
            device=settings.device,
            threads=settings.threads,
            gpu_layers=settings.gpu_layers,
            exact=settings.exact,
        )

    @property
    def version(self) -> str:
        from kl_lens.targets.gguf.library import ENVIRONMENT_VARIABLE

        try:
            found = metadata.version({"gguf": "xllamacpp"}.get(self.name, self.name))
        except metadata.PackageNotFoundError:
            found = "none"
        return found if self.name != "gguf" else f"{found} {os.environ.get(ENVIRONMENT_VARIABLE, '')}"

    def in_float32(self, settings: RuntimeSettings) -> RuntimeSettings | None:
        return None if self.name != "openvino" or settings.exact else replace(settings, exact=True)

    def models_activations(self, settings: RuntimeSettings, recipes: Mapping[str, str]) -> bool:
        if self.name == "gguf":
            return not settings.gpu_layers
        usual = not settings.exact and settings.device == "CPU" and not settings.gpu_layers
        arm = platform.machine() in ("aarch64", "arm64")
        return usual and arm and not set(recipes.values()) <= {"fp16"}

    def activations(self, model: LoadedModel, recipes: Mapping[str, str]) -> AbstractContextManager[None]:
        from kl_lens.targets.registry import deployed

        return deployed(self.name)(model, recipes)

    __call__ = activations


def get_target(name: str) -> _Module:
    if name not in ("gguf", "openvino"):
        raise TargetError(f"no target is called {name!r}; there are openvino, gguf")
    return _Module(name)


def target_of(path: Path) -> _Module:
    from kl_lens.targets.registry import TARGETS, read_artifact

    if path.is_dir():
        return get_target(read_artifact(path).target)
    for name in TARGETS:
        if get_target(name).owns(path):
            return get_target(name)
    raise TargetError(f"{path} is no file of any target")
