"""The interface of a target: everything that other code needs from a runtime and its files.

To add a target, write one class in one folder and one line in `registry.py`. Code outside `targets/` names none.
"""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kl_lens.base.errors import TargetError, UnsupportedError
from kl_lens.base.files import replacing
from kl_lens.run.records import Artifact, Component, Plan
from kl_lens.run.subjects import file_digest
from kl_lens.targets.exporting import earlier_artifact, read_artifact, write_record
from kl_lens.targets.session import CACHES, Session, SessionSettings
from kl_lens.weights.formats import Format
from kl_lens.weights.recipes import Recipe, fitting_recipe, preferred

if TYPE_CHECKING:  # running an exported model must not load what exporting needs
    from kl_lens.model import LoadedModel
    from kl_lens.model.carried import Carried
    from kl_lens.targets.dissection import Dissection


FLOATS = ("fp16", "fp32", "f16", "f32", "bf16")


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
    """What a runtime holds in memory beside states and caches. Prompts are computed in parts of 512 tokens."""

    process: int = (
        0  # with its libraries, and what does not depend on the model; 0: not measured
    )
    copies: float = 1.0  # of the file's bytes
    widths: float = 0.0  # float32 vectors of the model's width, for each token of a part
    states: float = 0.0  # float32 states of one block, for each token of a part
    scores: float = 0.0  # bytes for each token of a part and each token of the context
    head_scores: float = 0.0  # the same for each head
    cache_bits: int = 16  # of keys and values, where the target has no formats for them

    def bytes(self, carried: Carried, use: Usage) -> int:
        attending = use.context * (
            self.scores * min(1, carried.heads) + self.head_scores * carried.heads
        )
        floats = self.widths * carried.width + self.states * carried.states / max(
            1, carried.blocks
        )
        return int(self.process + PART * (4 * floats + attending))


PART = 512
# (target, whether weights are quantized) → fitted to the peak memory of fresh processes (`kl_lens.profiling.memory`,
# one thread) that fill a context: hybrids of 6 and 113 million weights, contexts of 512 to 8,192; docs/states.md has
# predictions and peaks. llama.cpp: xllamacpp 2026.10. OpenVINO 2026.4.1 makes the products of inputs and states for all
# tokens of a part. On ARM it makes scores several times; with integers it computes in float32, and keeps the file
# besides its own copy. On x86 compiling takes several copies of the file.
FOOTPRINTS = {
    ("gguf", True): Footprint(56_300_000, widths=16.3, scores=2.3),
    ("gguf", False): Footprint(56_300_000, widths=16.3, scores=2.3),
    ("openvino", True): Footprint(
        109_000_000, 2.1, states=0.55, head_scores=53, cache_bits=32
    ),
    ("openvino", False): Footprint(145_000_000, 1.44, states=0.83, head_scores=18.5),
}
ON_X86 = {
    ("openvino", True): Footprint(162_000_000, 2.85, states=0.55, head_scores=8),
    ("openvino", False): Footprint(160_000_000, 4.5, states=0.83, head_scores=8),
}


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


@dataclass(frozen=True)
class ExportOption:
    """A setting of a target's export: a keyword of `export`, and a flag of the command line."""

    keyword: str
    flag: str  # --static-tokens
    help: str
    kind: str = "switch"  # switch, text, number or size
    given: Any = True  # a switch: what the keyword becomes when the flag is there


@dataclass(frozen=True)
class Health:
    """Whether a runtime works on this machine."""

    runtime: str  # library and version; empty: not installed
    facts: tuple[str, ...] = ()
    problem: str = ""  # empty: none
    mend: str = ""  # the command that fixes it


class Target(ABC):
    """One runtime: what it holds, how its files are written and opened, and how its kernels round.

    `stores`, `formats`, `write` and `open` are required, the rest has defaults. Its module imports without the
    runtime's packages; methods import them when needed.
    """

    name: ClassVar[str]  # gguf: as typed
    title: ClassVar[str]  # llama.cpp: as shown
    extra: ClassVar[str]  # of `pip install kl-lens[EXTRA]`
    packages: ClassVar[
        tuple[str, ...]
    ]  # required; the last one's version is the runtime's
    loads: ClassVar[
        tuple[str, ...]
    ]  # suffixes of the files that the runtime loads; only these count as size
    methods: ClassVar[
        tuple[str, ...]
    ] = ()  # quantization methods of its menu, best first
    options: ClassVar[
        tuple[ExportOption, ...]
    ] = ()  # of its export, besides model, plan and folder
    usual: ClassVar[bool] = (
        True  # `kl-lens run` makes its files unasked, where its packages are installed
    )
    writing_bytes: ClassVar[float] = (
        0.0  # of memory for each weight of the model, while files are written and tried
    )
    recipe_tool: ClassVar[str | None] = (
        None  # of `handover.TOOLS`: the runtime's own quantizer
    )
    streams: ClassVar[bool] = (
        False  # whether `export` also takes a model whose weights stay on disk
    )
    published: ClassVar[Any] = (
        None  # the benchmark program that publications quote, as `openvino.target.BenchmarkApp`
    )
    besides: ClassVar[str] = "the header"  # what its files hold besides weights
    cache_formats: ClassVar[
        tuple[str, ...]
    ] = ()  # of keys and values, its default first; empty: no choice
    exact_options: ClassVar[str] = (
        ""  # how its users get the arithmetic of an exact session
    )

    def footprint(self, *, quantized: bool = True) -> Footprint:
        footprints = FOOTPRINTS | (ON_X86 if platform.machine() == "x86_64" else {})
        return footprints.get((self.name, quantized), Footprint())

    # -- what it can hold ----------------------------------------------------------------------------------

    @abstractmethod
    def stores(self, fmt: Format) -> str | None:
        """None, or why it has no such format, whatever the shape."""

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

    @property
    @abstractmethod
    def formats(self) -> tuple[str, ...]:
        """Formats that its kernels run well, small ones first."""

    @property
    def small_formats(self) -> tuple[str, ...]:
        """Formats below four bits, small ones first: slow to make, so only where asked or needed."""
        return ()

    @property
    def menu(self) -> tuple[Recipe, ...]:
        """What a plan for this target chooses from by default: each format with its best method."""
        return self.recipes(self.formats)

    @property
    def short_menu(self) -> tuple[Recipe, ...]:
        """A shorter menu for a first look; 8 bits are rounded to nearest, because learning hardly helps there."""
        return self.menu

    def recipes(self, formats: Sequence[str]) -> tuple[Recipe, ...]:
        return tuple(preferred(name, self.methods) for name in formats)

    def stock_recipes(self, model: LoadedModel) -> tuple[StockRecipe, ...]:
        """The runtime's stock recipes for this model."""
        return ()

    def unsupported(self, model_type: str) -> str | None:
        """Why this runtime cannot run such models. None: it can, or only trying shows it (`UnsupportedError`)."""
        return None

    # -- files ---------------------------------------------------------------------------------------------

    @abstractmethod
    def write(
        self, model: LoadedModel, plan: Plan, folder: Path, **options: Any
    ) -> Artifact:
        """Writes only the files, to an empty folder. `exporting.py` has what targets share."""

    def try_out(self, place: Path) -> str | None:
        """Opens and runs new files, or files without a record; TargetError if that fails, a note without runtime."""
        with closing(self.open(place, SessionSettings())) as session:
            session.step(0)
        return None

    def export(
        self, model: LoadedModel, plan: Plan, folder: Path, **options: Any
    ) -> Artifact:
        """Writes the files and their record (`artifact.json`), in place of an earlier export's.

        On an error, or if the runtime cannot open the files, the folder stays as it was.
        """
        earlier = earlier_artifact(folder)
        if earlier is None and (folder / "config.json").exists():
            raise TargetError(
                f"{folder} holds a model (config.json); export to another folder"
            )
        with replacing(folder) as place:
            artifact = self.write(model, plan, place, **options)
            digests = {name: file_digest(place / name) for name in artifact.files}
            settings = artifact.settings | ({CACHES: plan.caches} if plan.caches else {})
            size = self.loaded_bytes(place)
            artifact = replace(
                artifact, digests=digests, realised_bytes=size, settings=settings
            )
            write_record(place, artifact)
            try:
                unopened = self.try_out(place)
            except TargetError as error:
                reason = (
                    str(error)
                    .replace(f"{place}{os.sep}", "")
                    .replace(str(place), str(folder))
                )
                failed = (
                    f"{self.title} cannot open the files exported to {folder}: {reason}"
                )
                raise TargetError(failed) from error
            notes = [] if unopened is None else [unopened]
            if model.further_heads and not artifact.settings.get("further_heads"):
                notes.append(
                    f"left out: heads for further tokens ({len(model.further_heads)} tensors mtp.*), for which KL Lens "
                    f"knows no place in files for {self.title}. Text stays the same; speculative decoding with them is "
                    "lost"
                )
            if notes:
                notes = [*artifact.settings.get("notes", ()), *notes]
                artifact = replace(
                    artifact, settings=artifact.settings | {"notes": notes}
                )
                write_record(place, artifact)
        for name in set(earlier.files if earlier else ()) - set(artifact.files):
            (folder / name).unlink(missing_ok=True)
        return artifact

    def owns(self, path: Path) -> bool:
        """Whether a bare file is this target's, judged by its name only."""
        return path.suffix in self.loads

    def loaded_files(self, place: Path) -> list[Path]:
        """The files that its runtime loads, of an exported folder or a bare file."""
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        return [path for path in files if path.name.endswith(self.loads)]

    def loaded_bytes(self, place: Path) -> int:
        """The "size" of an exported folder or a bare file."""
        return sum(path.stat().st_size for path in self.loaded_files(place))

    def file_bytes(self, model: LoadedModel, plan: Plan, *, exact: bool = False) -> int:
        """`loaded_bytes` of the files that `export` would write for a plan; unless `exact`, an upper bound will do."""
        with tempfile.TemporaryDirectory() as folder:
            self.write(model, plan, Path(folder))
            return self.loaded_bytes(Path(folder))

    def overhead(self, fmt: Format) -> int:
        """Bytes that a matrix in this format adds to the files beyond its own, compared with FP16."""
        return 0

    def is_all_floating(self, place: Path) -> bool:
        """Whether nothing in it is quantized, so that it can serve as the FP16 baseline."""
        if self.owns(place):
            return False  # not known
        return all(
            tensor.realised.lower() in FLOATS for tensor in read_artifact(place).tensors
        )

    def contents(self, place: Path) -> Contents | None:
        """The weights and states that one token reads, for the memory bound; None: not known."""
        return None

    def dissects(self, path: Path) -> bool:
        """Whether `dissect` takes this file or folder, judged by names only."""
        return False

    def dissect(self, place: Path) -> Dissection:
        """Takes any of its files apart, whoever made it, for an autopsy."""
        raise NotImplementedError

    def how_to_run(self, repository: str, artifact: Artifact) -> str:
        """Shell commands that generate text with files from a repository on the hub."""
        folder = repository.rpartition("/")[2]
        return (
            f"pip install 'kl-lens[{self.extra}]'\n"
            f"hf download {repository} --local-dir {folder}\n"
            f'kl-lens generate {folder} --prompt "The history of the city"'
        )

    # -- running -------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, place: Path, settings: SessionSettings) -> Session:
        """Opens a session: with the runtime's defaults and what the file says, unless asked otherwise."""

    def lacks(self) -> str | None:
        """None, or that packages are missing and what to type."""
        try:
            for package in self.packages:
                importlib.import_module(package)
        except ImportError:
            return f"target {self.name} needs more packages: pip install 'kl-lens[{self.extra}]'"
        return None

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
        """Whether it runs here."""
        mend = f"pip install 'kl-lens[{self.extra}]'"
        if self.lacks():  # on most machines nobody misses a target that is not usual
            wanted = Health("not installed", (f"if you want it: {mend}",))
            return (
                Health("", problem="not installed", mend=mend) if self.usual else wanted
            )
        return Health(f"{self.packages[-1]} {self.version}")

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

    def fewest_threads(self, place: Path) -> int | None:
        """The fewest threads from which on only speed changes, for several sessions at once; None: one at a time."""
        return None

    def in_float32(self, settings: SessionSettings) -> SessionSettings | None:
        """These settings with float32 arithmetic. None: the runtime has none, or they have it already."""
        return None

    # -- what its kernels do -------------------------------------------------------------------------------

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
