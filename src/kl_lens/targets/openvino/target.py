"""The OpenVINO target: IRs with NNCF's integer formats, and sessions on OpenVINO's devices."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.lazy import lazy_modules
from kl_lens.base.system import ON_ARM, ON_X86
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.abilities import (
    Contents,
    ExportOption,
    Footprint,
    StockRecipe,
    Target,
)
from kl_lens.targets.exporting import read_artifact
from kl_lens.targets.openvino.folder import (
    IR_FILE,
    TOKENIZER_FILE,
    WEIGHT_FILE,
    graph_file,
)
from kl_lens.targets.session import Session, SessionSettings
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat
from kl_lens.weights.formats.tables import MicroscalingFormat, NormalFloatFormat
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe, parsed

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.dissection import Dissection
    from kl_lens.targets.openvino import convert, dissection, kernels, session, stock
else:  # they load OpenVINO and torch
    convert, dissection, kernels, session, stock = lazy_modules(
        __package__, "convert", "dissection", "kernels", "session", "stock"
    )

_KINDS = (SignedScaleFormat, ZeroPointFormat, NormalFloatFormat, MicroscalingFormat)
_BITS = (2, 4, 8)
# Bytes that a quantized matrix adds to the .xml, compared with an FP16 one: its decompression nodes. (symmetric, in
# groups) → a little more than was seen (1.3, 2.3 and 3.7 kB), so that no file is larger than predicted.
_GRAPH_BYTES = {
    (True, False): 1550,
    (True, True): 2700,
    (False, False): 3200,
    (False, True): 4400,
}
_WRITTEN_TO_BE_SIZED = 200_000_000  # parameters; writing larger models takes too long
# (x86, whether weights are quantized) → of OpenVINO 2026.4.1, which makes the products of inputs and states for all
# tokens of a part. On ARM it makes scores several times; with integers it computes in float32, and keeps the file
# besides its own copy. On x86 compiling takes several copies of the file.
_FOOTPRINTS = {
    (False, True): Footprint(
        109_000_000, 2.1, states=0.55, head_scores=53, cache_bits=32
    ),
    (False, False): Footprint(145_000_000, 1.44, states=0.83, head_scores=18.5),
    (True, True): Footprint(162_000_000, 2.85, states=0.55, head_scores=8),
    (True, False): Footprint(160_000_000, 4.5, states=0.83, head_scores=8),
}


class OpenVINOTarget(Target):
    name = "openvino"
    title = "OpenVINO"
    extra = "openvino"
    packages = ("openvino",)
    loads = (WEIGHT_FILE, IR_FILE)  # and not the graphs of the tokenizer
    besides = f"the graph ({IR_FILE})"
    # On ARM the plugin keeps keys and values as it computes them.
    cache_formats = () if ON_ARM else ("u8", FP16, "u4", "u4-32")
    methods = ("gptq", "search")
    # Float32 graphs beside PyTorch: 17 and 18 were seen, with mamba-wiki and hybrid-wiki.
    writing_bytes = 18.0
    speed_options = ("activation_groups",)
    exact_options = "set INFERENCE_PRECISION_HINT and KV_CACHE_PRECISION to f32, DYNAMIC_QUANTIZATION_GROUP_SIZE to 0"
    options = (
        ExportOption(
            "static_tokens", "--static-tokens", "a static forward without state", "number"
        ),
        ExportOption(
            "with_head",
            "--without-head",
            "end in the last hidden states (static only)",
            given=False,
        ),
        ExportOption(
            "activation_groups",
            "--activation-groups",
            "how many activations share a scale where they are rounded: 0 (no rounding), 32, 64, 128 or row; written "
            "into the file (default: the runtime's)",
            "text",
        ),
    )

    def __init__(self) -> None:
        # Model and formats → bytes.
        self._sizes: dict[tuple[str, frozenset[tuple[str, str]]], int] = {}

    # -- what it can hold ----------------------------------------------------------------------------------

    def stores(self, fmt: Format) -> str | None:
        asymmetric8 = fmt.bits == 8 and not fmt.symmetric
        integer = isinstance(fmt, _KINDS) and fmt.bits in _BITS and not asymmetric8
        if fmt.name == FP16 or integer:
            return None
        return f"OpenVINO has no {fmt.name}: it stores FP16, NNCF's integers, uint2, NF4 and MXFP4"

    def holds(self, fmt: Format, shape: Sequence[int]) -> str | None:
        return self.stores(fmt) or self.fit(Recipe(fmt.name), shape)[1]

    def fit(self, recipe: Recipe, shape: Sequence[int]) -> tuple[Recipe, str | None]:
        if len(shape) not in (2, 3) and self.stores(recipe.grid) is None:
            return FP16, f"{recipe}: no matrix; stored as {FP16}"
        fitting, reason = super().fit(recipe, shape)
        if fitting.grid.bits == 4 and shape[-1] % 2:
            # Seen on 2026.4.1: wrong results of the right size, and no error.
            fitting = Recipe("int8")
            reason = (
                f"{recipe}: {shape[-1]} columns, and OpenVINO's ARM kernels give wrong results for an odd number "
                f"of four-bit columns; stored as {fitting}"
            )
        return fitting, reason

    @property
    def formats(self) -> tuple[str, ...]:
        small = () if "uint2-g64" in kernels.expanded() else ("uint2-g64",)
        # On ARM there are integer kernels for symmetric weights only.
        asymmetric = () if ON_ARM else ("uint4-g128", "uint4-g64")
        return (*small, *asymmetric, "int4-g128", "int4-g64", "int4-g32", "int8", FP16)

    @property
    def short_menu(self) -> tuple[Recipe, ...]:
        return (*self.recipes(("int4-g128", "int4-g32")), Recipe("int8"))

    def stock_recipes(self, model: LoadedModel) -> tuple[StockRecipe, ...]:
        return stock.stock_recipes(model)

    # -- files ---------------------------------------------------------------------------------------------

    def write(
        self, model: LoadedModel, plan: Plan, folder: Path, **options: Any
    ) -> Artifact:
        return convert.export(self, model, plan, folder, convert.Options(**options))

    def try_out(self, path: Path) -> None:
        """Opens our own graph in this process: another one would take longer."""
        settings = SessionSettings()
        if self.owns(path) or not read_artifact(path).settings.get("static_tokens"):
            self.open(path, settings)
        else:  # for benchmark_app alone
            session.compile_graph(session.read_graph(graph_file(path)), settings)

    def file_bytes(self, model: LoadedModel, plan: Plan, *, exact: bool = False) -> int:
        """The FP16 artifact's size, with every quantized matrix's bytes and decompression nodes put in its place; the
        size of a written file if `exact` is asked for and does not take minutes."""
        recipes: Mapping[str, Recipe] = parsed(plan.assignment)
        parameters = sum(c.parameters for c in model.anatomy.components)
        if exact and parameters <= _WRITTEN_TO_BE_SIZED:
            # Only formats count, except that OpenVINO stores two matrices once if they stay equal (a repeated layer).
            originals = {c.name: FP16 for c in model.anatomy.candidates}
            digests = model.weights.digests(originals).values()
            if len(set(digests)) == len(originals):
                recipes = {name: Recipe(r.grid.name) for name, r in recipes.items()}
            grids = Plan(plan.name, dict(recipes), plan.made_by)
            return self._written_bytes(model, grids)
        size = self._written_bytes(model, Plan("fp16", {}, "fp16"))
        for component in model.anatomy.candidates:
            shape = component.shape
            recipe, _ = fitting_recipe(recipes.get(component.name, FP16), shape)
            grid = recipe.grid
            size += grid.bytes(shape) - 2 * component.parameters + self.overhead(grid)
        return size

    def _written_bytes(self, model: LoadedModel, plan: Plan) -> int:
        quantized = (item for item in plan.assignment.items() if item[1] != FP16)
        key = (model.fingerprint, frozenset(quantized))
        if key not in self._sizes:
            with tempfile.TemporaryDirectory() as folder:
                self.write(model, plan, Path(folder), with_tokenizer=False)
                self._sizes[key] = self.loaded_bytes(Path(folder))
        return self._sizes[key]

    def overhead(self, fmt: Format) -> int:
        grouped = fmt.group_size is not None
        return 0 if fmt.name == FP16 else _GRAPH_BYTES[fmt.symmetric, grouped]

    def how_to_run(self, repository: str, artifact: Artifact) -> str:
        if TOKENIZER_FILE not in artifact.files:  # GenAI cannot open it
            return super().how_to_run(repository, artifact)
        folder = repository.rpartition("/")[2]
        return (
            f"pip install openvino-genai huggingface_hub\nhf download {repository} --local-dir {folder}\n"
            f'python -c \'import openvino_genai as og\npipe = og.LLMPipeline("{folder}", "CPU")\n'
            'print(pipe.generate("The history of the city", max_new_tokens=40))\''
        )

    def owns(self, path: Path) -> bool:
        return path.suffix == ".xml"

    def loaded_files(self, path: Path) -> list[Path]:
        """A bare graph with its weights."""
        bare = [path, path.with_suffix(".bin")]
        return bare if self.owns(path) else super().loaded_files(path)

    def contents(self, path: Path) -> Contents | None:
        if self.owns(path):
            return None
        return dissection.graph_contents(path, read_artifact(path))

    def footprint(self, *, quantized: bool = True) -> Footprint:
        return _FOOTPRINTS[ON_X86, quantized]

    # -- running -------------------------------------------------------------------------------------------

    def open(self, path: Path, settings: SessionSettings) -> Session:
        if self.owns(path):
            return session.open_foreign(path, settings)
        return session.open_session(path, settings)

    def dissects(self, path: Path) -> bool:
        return path.suffix == ".xml" or (path / IR_FILE).is_file()

    def dissect(self, path: Path) -> Dissection:
        return dissection.OpenVINODissection(path)

    def require_device(self, device: str) -> None:
        session.require_device(device)

    def fewest_threads(self, path: Path) -> int:
        return session.fewest_threads(session.read_graph(graph_file(path)))

    def in_float32(self, settings: SessionSettings) -> SessionSettings | None:
        return None if settings.exact else replace(settings, exact=True)

    # -- what its kernels do -------------------------------------------------------------------------------

    def models_activations(
        self, settings: SessionSettings, recipes: Mapping[str, Recipe]
    ) -> bool:
        """True for kernels that multiply integers. Half precision is not modelled."""
        deployed = settings.device == "CPU" and not settings.exact
        integers = any(kernels.is_integer(recipe.grid) for recipe in recipes.values())
        return deployed and integers and session.rounds_in_groups()

    def activations(
        self, model: LoadedModel, recipes: Mapping[str, Recipe]
    ) -> AbstractContextManager[None]:
        return kernels.as_deployed(model, recipes)
