"""A target: what other code may ask of a runtime and its files, one small class for each subject.

Every answer besides those of `required.py` has a default, so a target overrides only what its runtime does differently.
To add one, write its class and one line in `registry.py`. Code outside `targets/` names no target.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kl_lens.base.errors import TargetError, UnsupportedError
from kl_lens.base.files import replacing, require_own_folder
from kl_lens.run.records import Artifact, Component, Plan
from kl_lens.run.subjects import file_digest
from kl_lens.targets.exporting import earlier_artifact, read_artifact, write_record
from kl_lens.targets.required import Required
from kl_lens.targets.session import CACHES, SessionSettings
from kl_lens.weights.formats import Format
from kl_lens.weights.recipes import Recipe, fitting_recipe, preferred

if TYPE_CHECKING:  # running an exported model must not load what exporting needs
    from kl_lens.model import LoadedModel
    from kl_lens.model.carried import Carried
    from kl_lens.targets.dissection import Dissection

FLOATS = ("fp16", "fp32", "f16", "f32", "bf16")
_PROMPT_PART = 512  # tokens


# -- whether it runs here ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Health:
    """Whether a runtime works on this machine."""

    runtime: str  # library and version; empty: not installed
    facts: tuple[str, ...] = ()
    problem: str = ""  # empty: none
    mend: str = ""  # the command that fixes it


class Installing(Required):
    """Its packages and their versions."""

    # `kl-lens run` makes its files unasked, where its packages are installed.
    usual: ClassVar[bool] = True

    def lacks(self) -> str | None:
        """None, or that packages are missing and what to type."""
        try:
            for package in self.packages:
                importlib.import_module(package)
        except ImportError:
            return f"target {self.name} needs more packages: {self._installation}"
        return None

    @property
    def _installation(self) -> str:
        return f"pip install 'kl-lens[{self.extra}]'"

    def require(self) -> None:
        """Raises UnsupportedError, with what to install, if packages are missing."""
        if reason := self.lacks():
            raise UnsupportedError(reason)

    def prepare(self) -> None:
        """Loads its libraries, so that memory measured afterwards is the model's alone."""
        self.require()

    @property
    def version(self) -> str:
        """The runtime's version; another one may give other numbers."""
        try:
            return metadata.version(self.packages[-1])
        except metadata.PackageNotFoundError:
            return "none"

    def health(self) -> Health:
        """Whether it runs here; on most machines nobody misses a target that is not usual."""
        if not self.lacks():
            return Health(f"{self.packages[-1]} {self.version}")
        if self.usual:
            return Health("", problem="not installed", mend=self._installation)
        return Health("not installed", (f"if you want it: {self._installation}",))


class Devices(Required):
    """Where and with what arithmetic it computes."""

    def check_device(self, settings: SessionSettings) -> None:
        """Raises TargetError if its runtime lacks the device that these settings name: results are labelled with it."""
        if settings.gpu_layers:
            raise TargetError(
                f"--gpu-layers: {self.title} runs a file on one device; choose it with --device"
            )
        self.require_device(settings.device)

    def require_device(self, device: str) -> None:
        """Raises TargetError if its runtime does not have this device."""
        if device != "CPU":
            raise TargetError(f"--device {device}: {self.title} runs on CPU only")

    def for_text(self, settings: SessionSettings) -> SessionSettings:
        """These settings with the device that people write text on, where it is not the CPU."""
        return settings

    def fewest_threads(self, path: Path) -> int | None:
        """The fewest threads from which on only speed changes, for several sessions at once; None: one at a time."""
        return None

    def in_float32(self, settings: SessionSettings) -> SessionSettings | None:
        """These settings with float32 arithmetic. None: the runtime has none, or they have it already."""
        return None


# -- what it can hold ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StockRecipe:
    """A well-known recipe (`Q4_K_M`, NNCF's INT4_SYM), as component → format for one model."""

    name: str
    assignment: Mapping[str, Recipe]
    origin: str  # the tool or rule that it comes from
    usual: bool = False  # one of the few that most people try first

    @property
    def plan_name(self) -> str:
        return f"stock.{self.name.lower()}"


class Menu(Required):
    """What plans choose from."""

    # Quantization methods, best first.
    methods: ClassVar[tuple[str, ...]] = ()

    @property
    def small_formats(self) -> tuple[str, ...]:
        """Formats below four bits, small ones first: slow to make, so only where asked or needed."""
        return ()

    @property
    def short_menu(self) -> tuple[Recipe, ...]:
        """A shorter menu for a first look; 8 bits are rounded to nearest, because learning hardly helps there."""
        return self.recipes(self.formats)

    def recipes(self, formats: Sequence[str]) -> tuple[Recipe, ...]:
        """Each format with its best method."""
        return tuple(preferred(name, self.methods) for name in formats)

    def stock_recipes(self, model: LoadedModel) -> tuple[StockRecipe, ...]:
        """The runtime's stock recipes for this model."""
        return ()


class Storage(Menu):
    """What a file of it can hold, and in how many bytes."""

    def unsupported(self, model_type: str, template: str | None = None) -> str | None:
        """Why this runtime cannot run such models. None: it can, or only trying shows it (`UnsupportedError`).
        `template`: a file that shows it how."""
        return None

    def stores(self, fmt: Format) -> str | None:
        """None, or why it has no such format, whatever the shape."""
        if fmt.name in (*self.formats, *self.small_formats):
            return None
        return (
            f"{self.title} has no format {fmt.name!r}; it has {', '.join(self.formats)}"
        )

    def holds(self, fmt: Format, shape: Sequence[int]) -> str | None:
        """None, or why a weight of this shape cannot be stored in this format."""
        return self.stores(fmt) or fmt.fits(shape)

    def keeps(self, component: Component) -> str | None:
        """Why this runtime reads a component in 16 bits only, whatever the format; None: it does not."""
        return None

    def fit(self, recipe: Recipe, shape: Sequence[int]) -> tuple[Recipe, str | None]:
        """For `exporting.choices`: what a weight of this shape gets, and why it is not what was planned (or None)."""
        if reason := self.stores(recipe.grid):
            raise TargetError(
                f"{reason}. Make a plan for it with: kl-lens plan --target {self.name}"
            )
        return fitting_recipe(recipe, shape)

    def overhead(self, fmt: Format) -> int:
        """Bytes that a matrix in this format adds to the files beyond its own, compared with FP16."""
        return 0


# -- files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExportOption:
    """A setting of a target's export: a keyword of `export`, and a flag of the command line."""

    keyword: str
    flag: str  # --static-tokens
    help: str
    kind: str = "switch"  # switch, text, number or size
    given: Any = True  # a switch: what the keyword becomes when the flag is there


class Files(Required):
    """Which files it loads, and how large they are."""

    # Of its export, besides model, plan and folder.
    options: ClassVar[tuple[ExportOption, ...]] = ()
    # Keywords of those that change how fast a file is: a plan for speed has those of the files it was predicted from.
    speed_options: ClassVar[tuple[str, ...]] = ()
    # Whether `export` also takes a model whose weights stay on disk.
    streams: ClassVar[bool] = False
    # What its files hold besides weights.
    besides: ClassVar[str] = "the header"

    def try_out(self, path: Path) -> str | None:
        """Opens and runs new files, or files without a record; TargetError if that fails, a note without runtime."""
        with closing(self.open(path, SessionSettings())) as session:
            session.step(0)
        return None

    def owns(self, path: Path) -> bool:
        """Whether a bare file is this target's, judged by its name only."""
        return path.suffix in self.loads

    def loaded_files(self, path: Path) -> list[Path]:
        """The files that its runtime loads, of an exported folder or a bare file."""
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return [file for file in files if file.name.endswith(self.loads)]

    def loaded_bytes(self, path: Path) -> int:
        """The "size" of an exported folder or a bare file."""
        return sum(file.stat().st_size for file in self.loaded_files(path))

    def file_bytes(self, model: LoadedModel, plan: Plan, *, exact: bool = False) -> int:
        """`loaded_bytes` of the files that `export` would write for a plan; unless `exact`, an upper bound will do."""
        with tempfile.TemporaryDirectory() as folder:
            self.write(model, plan, Path(folder))
            return self.loaded_bytes(Path(folder))

    def is_all_floating(self, path: Path) -> bool:
        """Whether nothing in it is quantized, so that it can serve as the FP16 baseline."""
        if self.owns(path):
            return False  # not known
        return all(
            tensor.realised.lower() in FLOATS for tensor in read_artifact(path).tensors
        )


class Publishing(Required):
    """What people are told who get its files."""

    def how_to_run(self, repository: str, artifact: Artifact) -> str:
        """Shell commands that generate text with files from a repository on the hub."""
        folder = repository.rpartition("/")[2]
        return (
            f"pip install 'kl-lens[{self.extra}]'\n"
            f"hf download {repository} --local-dir {folder}\n"
            f'kl-lens generate {folder} --prompt "The history of the city"'
        )

    def beside(self, artifact: Artifact) -> dict[str, str]:
        """What other programs want beside published files: name → text."""
        return {}


class Dissecting(Required):
    """Files of it, whoever made them, taken apart for an autopsy."""

    # How its users get the arithmetic of an exact session.
    exact_options: ClassVar[str] = ""

    def dissects(self, path: Path) -> bool:
        """Whether `dissect` takes this file or folder, judged by names only."""
        return False

    def dissect(self, path: Path) -> Dissection:
        raise NotImplementedError


# -- what running it takes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """The bytes on disk that one token reads: of an untied embedding one row, of experts the chosen ones."""

    weight_bytes: float
    state_bytes: int  # of a fixed size: convolutions and states
    kv_bytes_per_position: float  # what attention reads for every earlier token

    def bytes_per_token(self, context: float) -> float:
        return self.weight_bytes + self.state_bytes + self.kv_bytes_per_position * context


@dataclass(frozen=True)
class Usage:
    """How a model is used: sequences at once, and tokens of each."""

    context: int = 4096
    batch: int = 1


@dataclass(frozen=True)
class Footprint:
    """What a runtime holds in memory beside states and caches. Prompts are computed in parts of 512 tokens.

    Fitted to the peak memory of fresh processes (`kl_lens.profiling.memory`, one thread) that fill a context: hybrids
    of 6 and 113 million weights, contexts of 512 to 8,192; docs/states.md has predictions and peaks.
    """

    # With its libraries, and what does not depend on the model; 0: not measured.
    process: int = 0
    copies: float = 1.0  # of the file's bytes
    widths: float = 0.0  # float32 vectors of the model's width, for each token of a part
    states: float = 0.0  # float32 states of one block, for each token of a part
    scores: float = 0.0  # bytes for each token of a part and each token of the context
    head_scores: float = 0.0  # the same for each head
    cache_bits: int = 16  # of keys and values, where the target has no formats for them

    def bytes(self, carried: Carried, use: Usage) -> int:
        scores = self.scores * min(1, carried.heads) + self.head_scores * carried.heads
        states = self.states * carried.states / max(1, carried.blocks)
        floats = self.widths * carried.width + states
        return int(self.process + _PROMPT_PART * (4 * floats + use.context * scores))


class Memory(Required):
    """What running its files takes."""

    # Of memory for each weight of the model, while files are written and tried.
    writing_bytes: ClassVar[float] = 0.0
    # Of keys and values, its default first; empty: no choice.
    cache_formats: ClassVar[tuple[str, ...]] = ()

    def footprint(self, *, quantized: bool = True) -> Footprint:
        """What its runtime holds beside a file whose weights are `quantized` or not."""
        return Footprint()

    def contents(self, path: Path) -> Contents | None:
        """The weights and states that one token reads, for the memory bound; None: not known."""
        return None


class Kernels(Required):
    """What its kernels do to activations."""

    def models_activations(
        self, settings: SessionSettings, recipes: Mapping[str, Recipe]
    ) -> bool:
        """Whether `activations` describes what happens with these settings on this machine."""
        return False

    def activations(
        self, model: LoadedModel, recipes: Mapping[str, Recipe]
    ) -> AbstractContextManager[None]:
        """Within, the named components' inputs (not weights) are rounded as this runtime's kernels round them."""
        raise UnsupportedError(
            f"KL Lens does not model what {self.title} does to activations"
        )


class Target(
    Storage,
    Files,
    Installing,
    Devices,
    Memory,
    Kernels,
    Dissecting,
    Publishing,
):
    """One runtime: what it holds, how its files are written and opened, and how its kernels round."""

    def export(
        self, model: LoadedModel, plan: Plan, folder: Path, **options: Any
    ) -> Artifact:
        """Writes the files and their record (`artifact.json`), in place of an earlier export's.

        On an error, or if the runtime cannot open the files, the folder stays as it was.
        """
        earlier = earlier_artifact(folder)
        require_own_folder(folder)
        model.beginning.settle(model)  # the files say it
        with replacing(folder) as draft:
            artifact = self.write(model, plan, draft, **options)
            settings = artifact.settings | ({CACHES: plan.caches} if plan.caches else {})
            artifact = replace(
                artifact,
                digests={name: file_digest(draft / name) for name in artifact.files},
                realised_bytes=self.loaded_bytes(draft),
                settings=settings,
            )
            write_record(draft, artifact)
            if notes := [*self._tried(draft, folder), *self._left_out(model, artifact)]:
                notes = [*settings.get("notes", ()), *notes]
                artifact = replace(artifact, settings=settings | {"notes": notes})
                write_record(draft, artifact)
        for name in set(earlier.files if earlier else ()) - set(artifact.files):
            (folder / name).unlink(missing_ok=True)
        return artifact

    def _tried(self, draft: Path, folder: Path) -> Iterator[str]:
        """A note where there is no runtime; TargetError, about the folder of the export, if the files do not open."""
        try:
            note = self.try_out(draft)
        except TargetError as error:
            reason = str(error).replace(f"{draft}{os.sep}", "")
            raise TargetError(
                f"{self.title} cannot open the files exported to {folder}: "
                + reason.replace(str(draft), str(folder))
            ) from error
        if note is not None:
            yield note

    def _left_out(self, model: LoadedModel, artifact: Artifact) -> Iterator[str]:
        if model.further_heads and not artifact.settings.get("further_heads"):
            yield (
                f"left out: heads for further tokens ({len(model.further_heads)} tensors mtp.*), for which KL Lens "
                f"knows no place in files for {self.title}. Text stays the same; speculative decoding with them is "
                "lost"
            )
