"""The targets by name. To add one, write a class and one entry here; its libraries load on first use."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import TargetError
from kl_lens.base.files import RECORD_FILE
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.abilities import Target
from kl_lens.targets.exporting import earlier_artifact, read_artifact, require_exported
from kl_lens.targets.session import Session, SessionSettings
from kl_lens.targets.tokenizer import read_json
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:  # opening a session must not load what exporting needs
    from kl_lens.model import LoadedModel
    from kl_lens.targets.dissection import Dissection

# Name → "module:class", in the order in which they are listed for users.
TARGETS = {
    "openvino": "kl_lens.targets.openvino.target:OpenVINOTarget",
    "gguf": "kl_lens.targets.gguf.target:GGUFTarget",
    "mlx": "kl_lens.targets.mlx.target:MLXTarget",
    "compressed-tensors": "kl_lens.targets.compressed_tensors.target:CompressedTensorsTarget",
    "vllm": "kl_lens.targets.compressed_tensors.target:VLLMTarget",
    "vllm-cpu": "kl_lens.targets.compressed_tensors.target:VLLMCPUTarget",
}


def register(name: str, location: str) -> None:
    """Makes a target known: `register("toy", "my_package.toy:ToyTarget")`."""
    TARGETS[name] = location


@cache
def _instance(location: str) -> Target:
    module, _, name = location.partition(":")
    target: Target = getattr(importlib.import_module(module), name)()
    return target


def describe_target(name: str) -> Target:
    """A target, whether or not its packages are installed."""
    if name not in TARGETS:
        raise TargetError(f"no target is called {name!r}; there are {', '.join(TARGETS)}")
    return _instance(TARGETS[name])


def get_target(name: str) -> Target:
    """A target that can be used, or UnsupportedError that says what to install."""
    target = describe_target(name)
    target.require()
    return target


def usual_targets() -> tuple[str, ...]:
    """The targets of a run that names none; where none of them is installed, another that is."""
    installed = [name for name in TARGETS if not describe_target(name).lacks()]
    usual = tuple(name for name in TARGETS if describe_target(name).usual)
    return usual if set(usual) & set(installed) else tuple(installed[:1]) or usual


def target_of(path: Path | str) -> Target:
    """The target of an exported folder or a bare file."""
    return get_target(_owner(Path(path)) or read_artifact(Path(path)).target)


def locate(path: Path | str) -> tuple[Path, Artifact | None]:
    """The exported folder and its record, or a bare file and None. A file of an exported folder means the folder; a
    folder that someone else made means its first file.

    Every command that opens files calls this, and nothing else guards it. Raises TargetError if files differ from what
    was exported, or if the runtime crashes on a file without a record.
    """
    path = Path(path)
    if path.is_file():
        _refuse_unnamed(path)
        folder = path.parent
        artifact = earlier_artifact(path.parent)
        if artifact is None or path.name not in artifact.files:
            if owner := _owner(path):
                get_target(owner).try_out(path)
            return path, None
    elif _owner(path) or (path.suffix and not path.is_dir()):
        raise TargetError(f"{path}: no such file")
    elif (file := _foreign(path)) is not None:
        return locate(file)
    else:
        folder = path
        artifact = read_artifact(path)
    require_exported(folder, artifact)
    return folder, artifact


def dissected(path: Path) -> tuple[Target, Dissection]:
    """Any file of a target, taken apart. Unlike `locate`, it takes files that were changed or made elsewhere."""
    for name in TARGETS:
        if (target := describe_target(name)).dissects(path):
            target.require()
            for file in sorted(path.glob("*.json")) if path.is_dir() else ():
                read_json(file)
            return target, target.dissect(path)
    if not path.exists():
        raise TargetError(f"{path}: no such file")
    if path.is_file():
        _refuse_unnamed(path)
    titles = ", ".join(describe_target(name).title for name in TARGETS)
    raise TargetError(
        f"{path} holds no model that KL Lens can take apart; it takes files for {titles}"
    )


def _refuse_unnamed(path: Path) -> None:
    """Raises for a file that lost its suffix, by which files are told apart."""
    with path.open("rb") as file:
        unnamed = file.read(4) == b"GGUF" and path.suffix != ".gguf"
    if unnamed:
        raise TargetError(f"{path} is a GGUF file: rename it to {path.name}.gguf")


def _owner(path: Path) -> str | None:
    """Of a bare file. Several runtimes load safetensors; what is in the folder tells which one."""
    owners = [name for name in TARGETS if describe_target(name).owns(path)]
    return next(
        (name for name in owners if describe_target(name).dissects(path)),
        next(iter(owners), None),
    )


def _foreign(folder: Path) -> Path | None:
    """The first file of a folder without a record that some runtime loads."""
    if (folder / RECORD_FILE).exists() or not folder.is_dir():
        return None
    for target in map(describe_target, TARGETS):
        if target.dissects(folder):
            files = [path for path in target.loaded_files(folder) if target.owns(path)]
            if set(files) - set(target.loaded_files(files[0])):
                raise TargetError(
                    f"{folder} holds several models; name the file, such as {files[0]}"
                )
            return files[0]
    return None


def export(
    model: LoadedModel, plan: Plan, target: str, folder: Path, **options: Any
) -> Artifact:
    """Writes the plan as files of a target, with their record."""
    return get_target(target).export(model, plan, Path(folder), **options)


def open_session(
    path: Path | str,
    *,
    device: str = "CPU",
    threads: int | None = None,
    gpu_layers: int = 0,
    exact: bool = False,
    load: str = "auto",
    context: int | None = None,
    batch: int = 1,
) -> Session:
    """A session of an exported folder or a bare file. `device`: auto is where people write text, the GPU of a Mac;
    `exact`: in float32; `load`: llama.cpp only. `context`, `batch`:
    the tokens and sequences that memory is kept for."""
    located, _ = locate(path)
    settings = SessionSettings(device, threads, gpu_layers, exact, load, context, batch)
    target = target_of(located)
    if device == "auto":
        settings = target.for_text(replace(settings, device="CPU"))
    target.check_device(settings)
    return target.open(located, settings)


def menu_of(
    target: Target,
    shapes: Collection[tuple[int, ...]] = (),
    *,
    full: bool = False,
    small: bool = False,
) -> tuple[Recipe, ...]:
    """The recipes that plans for a target choose from besides FP16: the short menu or the full one, and (`small`) its
    formats below four bits, with what else fits those of `shapes` that none of these fits."""
    below: tuple[Recipe, ...] = ()
    if small:
        below = target.recipes(target.small_formats)
        left = [shape for shape in shapes if all(r.grid.fits(shape) for r in below)]
        others = target.recipes(target.formats if below else ())
        below += tuple(r for r in others if not all(map(r.grid.fits, left)))
    menu = target.recipes(target.formats) if full else target.short_menu
    return tuple(recipe for recipe in dict.fromkeys((*below, *menu)) if recipe != FP16)


def computed_as(target: Target) -> str | None:
    """The target's name if its kernels' effect on activations is modelled; None: only weights are."""
    recipes: dict[str, Recipe] = {
        recipe: recipe for recipe in target.recipes(target.formats)
    }
    return target.name if target.models_activations(SessionSettings(), recipes) else None


def deployed(target: str | None) -> Target | None:
    """The target whose `activations` a PyTorch model computes with, or None."""
    return get_target(target) if target else None
