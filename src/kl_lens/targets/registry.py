"""The targets by name. A new one is one new folder and one entry here; its libraries load when it is first used."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.errors import TargetError, UnsupportedError
from kl_lens.formats import Format, Quantized
from kl_lens.recipes import resolve
from kl_lens.records import Artifact, Plan
from kl_lens.targets.session import Session
from kl_lens.writing import write_text

if TYPE_CHECKING:  # opening a session must not load what exporting needs
    import torch

    from kl_lens.checkpoints import LoadedModel

RECORD_FILE = "artifact.json"
# Target → (module, the extra that brings its libraries, a package that must be there).
TARGETS = {
    "openvino": ("kl_lens.targets.openvino", "openvino", "openvino"),
    "gguf": ("kl_lens.targets.gguf", "gguf", "gguf"),
}


def target_module(name: str) -> Any:
    """The room of a target, or an error that says what to install."""
    if name not in TARGETS:
        raise TargetError(f"no target is called {name!r}; there are {', '.join(TARGETS)}")
    module, extra, package = TARGETS[name]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UnsupportedError(
            f"target {name} needs more packages: pip install 'kl-lens[{extra}]'"
        ) from error
    return importlib.import_module(module)


def export(model: LoadedModel | Path, plan: Plan, target: str, folder: Path, **options: Any) -> Artifact:
    """Writes the plan as files of a target, with the record of what became of every component beside them.

    GGUF also takes a checkpoint folder in place of an opened model, and reads it one tensor at a time.
    """
    artifact: Artifact = target_module(target).export(model, plan, folder, **options)
    write_text(folder / RECORD_FILE, json.dumps(artifact.to_json(), indent=1) + "\n")
    return artifact


def read_artifact(folder: Path) -> Artifact:
    """The record of an exported folder."""
    path = folder / RECORD_FILE
    if not path.is_file():
        raise TargetError(f"{folder} is no exported model: it has no {RECORD_FILE}; run `kl-lens export`")
    try:
        artifact = Artifact.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise TargetError(f"{path} cannot be read ({error}); export the model again") from error
    missing = [name for name in artifact.files if not (folder / name).exists()]
    if missing:
        raise TargetError(f"{folder}: {missing[0]} is missing; export the model again")
    return artifact


def open_session(
    path: Path | str,
    *,
    device: str = "CPU",
    threads: int | None = None,
    gpu_layers: int = 0,
    exact: bool = False,
) -> Session:
    """A running session of an exported folder or a .gguf file.

    `exact` asks for float32 arithmetic where the runtime would use something faster.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        module = target_module("gguf")
        return module.open_session(path, threads=threads, gpu_layers=gpu_layers, exact_attention=exact)
    artifact = read_artifact(path)
    module = target_module(artifact.target)
    if artifact.target == "gguf":
        file = path / next(name for name in artifact.files if name.endswith(".gguf"))
        return module.open_session(file, threads=threads, gpu_layers=gpu_layers, exact_attention=exact)
    return module.open_session(path, device=device, threads=threads, exact=exact)


class _Kernels:
    """What a target's kernels do, for PyTorch."""

    def __init__(self, target: str) -> None:
        self._target = target
        target_module(target)

    def kernel_values(self, fmt: Format, quantized: Quantized) -> torch.Tensor:
        if self._target == "openvino":
            from kl_lens.targets.openvino.deployed import kernel_values

            return kernel_values(fmt, quantized)
        return fmt.dequantize(quantized)

    def activations(self, model: LoadedModel, recipes: Mapping[str, str]) -> AbstractContextManager[None]:
        if self._target == "openvino":
            from kl_lens.targets.openvino.deployed import as_deployed

            return as_deployed(model.model, recipes)
        from kl_lens.targets.gguf.activations import as_deployed as as_llama

        shapes = {c.name: c.shape for c in model.anatomy.components}
        return as_llama(model.model, {n: str(resolve(r, shapes[n])[0]) for n, r in recipes.items()})


def deployed(target: str) -> _Kernels:
    """What a PyTorch model needs to compute with the weights and activations that the target's kernels see."""
    return _Kernels(target)
