"""llama.cpp as a target: writes a plan as a GGUF file and runs it with the llama.cpp library that is found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import TargetError
from kl_lens.base.lazy import lazy_modules
from kl_lens.base.system import MACOS
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets import quarantine
from kl_lens.targets.abilities import (
    FLOATS,
    Contents,
    ExportOption,
    Footprint,
    Health,
    StockRecipe,
    Target,
)
from kl_lens.targets.exporting import earlier_artifact
from kl_lens.targets.gguf import library
from kl_lens.targets.gguf.header import parts_of, read_header
from kl_lens.targets.session import ALL_LAYERS, CACHES, Session, SessionSettings
from kl_lens.weights.formats import Format
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.dissection import Dissection
    from kl_lens.targets.gguf import (
        activations,
        architectures,
        dissection,
        export,
        session,
        stock,
    )
else:  # they load torch, or what is not installed
    activations, architectures, dissection, export, session, stock = lazy_modules(
        __package__,
        "activations",
        "architectures",
        "dissection",
        "export",
        "session",
        "stock",
    )

SUFFIX = ".gguf"
BUILDING = "https://kl-lens.github.io/kl-lens/targets/#llamacpp"


class GGUFTarget(Target):
    name = "gguf"
    title = "llama.cpp"
    extra = "gguf"
    packages = ("gguf",)
    loads = (SUFFIX,)
    besides = "the header (settings, vocabulary)"
    streams = True
    cache_formats = (FP16, "q8_0", "q5_1", "q4_0", "iq4_nl")
    methods = ("gptq", "imatrix")
    exact_options = "run it with --flash-attn off --cache-type-k f32 --cache-type-v f32"
    options = (
        ExportOption(
            "include_tokenizer",
            "--without-tokenizer",
            "a file that works with token ids only",
            given=False,
        ),
        ExportOption(
            "part_bytes",
            "--part-size",
            "split files with more weights than this (default: 50GB)",
            "size",
        ),
    )

    def prepare(self) -> None:
        self.require()
        library.find_library()

    # -- what it can hold ----------------------------------------------------------------------------------

    def stores(self, fmt: Format) -> str | None:
        return None if export.is_stored(fmt.name) else super().stores(fmt)

    formats = (
        "q2_0",
        "q3_k",
        "mxfp4",
        "iq4_xs",
        "q4_k",
        "q5_k",
        "q6_k",
        "q8_0",
        FP16,
    )

    @property
    def short_menu(self) -> tuple[Recipe, ...]:
        return (*self.recipes(("iq4_xs", "q4_k", "q5_k", "q6_k")), Recipe("q8_0"))

    # Q2_K and Q3_K lose to IQ2_S and IQ3_S.
    small_formats = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")

    def unsupported(self, model_type: str, template: str | None = None) -> str | None:
        return None if template else architectures.why_unknown(model_type)

    def stock_recipes(self, model: LoadedModel) -> tuple[StockRecipe, ...]:
        return stock.stock_recipes(model)

    # -- files ---------------------------------------------------------------------------------------------

    def write(
        self, model: LoadedModel, plan: Plan, folder: Path, **options: Any
    ) -> Artifact:
        return export.export(model, plan, folder, **options)

    def try_out(self, path: Path) -> str | None:
        """In another process: on some files llama.cpp aborts or hangs."""
        try:
            library.find_library()
        except TargetError:
            return "no llama.cpp is installed here, so the file was not opened; kl-lens doctor says what to install"
        quarantine.require_opens(
            session.try_out, path, self.loaded_files(path), self.title
        )
        return None

    def file_bytes(self, model: LoadedModel, plan: Plan, *, exact: bool = False) -> int:
        """Exact, from the header."""
        return export.file_bytes(model, plan)

    def loaded_files(self, path: Path) -> list[Path]:
        """All parts, even if only one is given."""
        return list(parts_of(path)) if self.owns(path) else super().loaded_files(path)

    def how_to_run(self, repository: str, artifact: Artifact) -> str:
        file = next(name for name in artifact.files if name.endswith(SUFFIX))
        server = f"llama-server --hf-repo {repository} --hf-file {file}"
        if caches := artifact.settings.get(CACHES):  # as this file was measured
            names = (
                caches.get(kind, FP16).replace(FP16, "f16") for kind in ("keys", "values")
            )
            server += " --flash-attn on --cache-type-k {} --cache-type-v {}".format(
                *names
            )
        return f"{server}\n\n# or, on a small board, without a server:\n{super().how_to_run(repository, artifact)}"

    def beside(self, artifact: Artifact) -> dict[str, str]:
        """For Ollama, which takes no file in parts."""
        files = [name for name in artifact.files if name.endswith(SUFFIX)]
        return {"Modelfile": f"FROM ./{files[0]}\n"} if len(files) == 1 else {}

    def is_all_floating(self, path: Path) -> bool:
        """From the file itself, which may have no record."""
        return all(
            entry.type.lower() in FLOATS
            for entry in read_header(self.loaded_files(path)[0]).tensors
        )

    def contents(self, path: Path) -> Contents:
        return read_header(self.loaded_files(path)[0]).contents()

    def footprint(self, *, quantized: bool = True) -> Footprint:
        """Of xllamacpp 2026.10."""
        return Footprint(56_300_000, widths=16.3, scores=2.3)

    # -- running -------------------------------------------------------------------------------------------

    def open(self, path: Path, settings: SessionSettings) -> Session:
        record = earlier_artifact(path)
        file = self.loaded_files(path)[0]
        return session.GGUFSession(
            file, settings, record.settings.get(CACHES) if record else None
        )

    def dissects(self, path: Path) -> bool:
        return self.owns(path) or (path.is_dir() and any(path.glob(f"*{SUFFIX}")))

    def dissect(self, path: Path) -> Dissection:
        return dissection.GGUFDissection(
            parts_of(path if self.owns(path) else min(path.glob(f"*{SUFFIX}")))[0]
        )

    @property
    def version(self) -> str:
        """xllamacpp's version, and the library named instead of it, if any."""
        try:
            version = metadata.version("xllamacpp")
        except metadata.PackageNotFoundError:
            version = "none"
        return f"{version} {os.environ.get(library.ENVIRONMENT_VARIABLE, '')}"

    def check_device(self, settings: SessionSettings) -> None:
        if settings.device != "CPU":
            raise TargetError(
                f"--device {settings.device}: llama.cpp runs on CPU; --gpu-layers N puts layers on a GPU"
            )
        if settings.gpu_layers:
            library.find_library().require_gpu(settings.gpu_layers)

    def for_text(self, settings: SessionSettings) -> SessionSettings:
        metal = MACOS and not settings.gpu_layers and library.find_library().has_gpu
        return replace(settings, gpu_layers=ALL_LAYERS) if metal else settings

    def health(self) -> Health:
        basic = super().health()
        if basic.problem:
            return basic
        try:
            llama = library.find_library()
        except TargetError as error:
            return Health("", problem=str(error), mend="pip install 'kl-lens[gguf]'")
        facts = [f"from {llama.origin}: {llama.path}"]
        if llama.has_gpu:
            facts.append("has a GPU (--gpu-layers)")
        if llama.origin == library.WHEEL:
            facts.append(f"a llama.cpp built for this processor is faster: {BUILDING}")
        return Health(llama.version, tuple(facts))

    def fewest_threads(self, path: Path) -> int:
        return 1

    # -- what its kernels do -------------------------------------------------------------------------------

    def models_activations(
        self, settings: SessionSettings, recipes: Mapping[str, Recipe]
    ) -> bool:
        return not settings.gpu_layers

    def activations(
        self, model: LoadedModel, recipes: Mapping[str, Recipe]
    ) -> AbstractContextManager[None]:
        shapes = {c.name: c.shape for c in model.anatomy.components}
        realised = {
            name: export.fitting(recipe, shapes[name])[0]
            for name, recipe in recipes.items()
        }
        return activations.as_deployed(model.model, realised)
