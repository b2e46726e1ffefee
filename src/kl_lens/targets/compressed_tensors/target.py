"""The targets `compressed-tensors`, for transformers, and `vllm` and `vllm-cpu`, whose kernels hold less of it.

All write the same kind of folder, and transformers opens it on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kl_lens.base.errors import UnsupportedError
from kl_lens.base.lazy import lazy_modules
from kl_lens.run.records import Artifact, Component, Plan
from kl_lens.targets.abilities import StockRecipe
from kl_lens.targets.exporting import CONFIG_FILE
from kl_lens.targets.folders import FolderContents, FolderTarget, folder_of
from kl_lens.targets.session import Session, SessionSettings
from kl_lens.targets.tokenizer import read_json
from kl_lens.weights.formats import Format
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.compressed_tensors import export, schemes, session
    from kl_lens.targets.dissection import Dissection
else:  # they load torch, transformers and compressed-tensors
    export, schemes, session = lazy_modules(__package__, "export", "schemes", "session")

_LISTED_BYTES = 130  # of one tensor in a file's header: a little more than was seen


class CompressedTensorsTarget(FolderTarget):
    name = "compressed-tensors"
    title = "compressed-tensors"
    extra = "compressed"
    packages = ("compressed_tensors", "transformers")
    made_for = "pt"
    written_with = ("transformers", "compressed-tensors")
    formats: ClassVar[tuple[str, ...]] = (
        "int3-g128",
        "int4-g128",
        "uint4-g128",
        "int4-g32",
        "uint4-g32",
        "int5-g128",
        "int6-g128",
        "int8",
        FP16,
    )
    small_formats: ClassVar[tuple[str, ...]] = ("uint2-g64",)

    def stores(self, fmt: Format) -> str | None:
        return None if schemes.is_packed(fmt) else super().stores(fmt)

    def holds(self, fmt: Format, shape: Sequence[int]) -> str | None:
        if fmt.name != FP16 and len(shape) != 2:
            return "experts that are one tensor cannot be packed"
        if not fmt.symmetric and shape[0] * fmt.bits <= 32:
            return "compressed-tensors cannot read the zero points of so few rows"
        return super().holds(fmt, shape)

    def fit(self, recipe: Recipe, shape: Sequence[int]) -> tuple[Recipe, str | None]:
        fitting, reason = super().fit(recipe, shape)
        if why := self.holds(fitting.grid, shape):
            return FP16, f"{recipe}: {why}; stored as {FP16}"
        return fitting, reason

    def unsupported(self, model_type: str, template: str | None = None) -> str | None:
        reason = "transformers keeps gpt2's matrices transposed, which compressed-tensors does not read"
        return reason if model_type == "gpt2" else None

    def keeps(self, component: Component) -> str | None:
        if component.kind == "embedding" or component.tied_with:
            return "transformers and vLLM read embeddings, and weights that are tied to others, in 16 bits"
        return None

    @property
    def short_menu(self) -> tuple[Recipe, ...]:
        learnt = [name for name in self.formats if re.match("int(?!8)", name)]
        return (*self.recipes(learnt), *map(Recipe, {"int8"}.intersection(self.formats)))

    def stock_recipes(self, model: LoadedModel) -> tuple[StockRecipe, ...]:
        return schemes.stock_recipes(self, model)

    def folder_contents(self, model: LoadedModel, plan: Plan) -> FolderContents:
        return export.folder_contents(self, self._checked(model), plan)

    def _checked(self, model: LoadedModel) -> LoadedModel:
        if model.classifier is not None or not type(model.model).__module__.startswith(
            "transformers."
        ):
            raise UnsupportedError(
                f"transformers has no language model of type {model.anatomy.model_type}"
            )
        return model

    def overhead(self, fmt: Format) -> int:
        """Scales, zero points and shapes are more tensors of the file's list; a shape is two numbers."""
        return 0 if fmt.name == FP16 else (2 if fmt.symmetric else 3) * _LISTED_BYTES + 16

    def dissects(self, path: Path) -> bool:
        quantization = read_json(folder_of(path) / CONFIG_FILE).get("quantization_config")
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else ""
        )
        return method == "compressed-tensors"

    def dissect(self, path: Path) -> Dissection:
        return session.CompressedTensorsDissection(folder_of(path))

    def open(self, path: Path, settings: SessionSettings) -> Session:
        return session.TransformersSession(folder_of(path), settings.threads)


class VLLMTarget(CompressedTensorsTarget):
    """What vLLM's Marlin kernels run on an NVIDIA GPU."""

    name = "vllm"
    title = "vLLM"
    formats: ClassVar[tuple[str, ...]] = (
        "int4-g128",
        "uint4-g128",
        "int4-g32",
        "uint4-g32",
        "int8-g128",
        "int8",
        FP16,
    )
    small_formats = ()
    bits: ClassVar[tuple[int, ...]] = (4, 8)
    rows: ClassVar[int] = 8  # the zero points of fused layers begin at whole words
    columns: ClassVar[int] = 32

    def stores(self, fmt: Format) -> str | None:
        runs = fmt.bits in self.bits and (fmt.bits == 4 or fmt.symmetric)
        missing = None if runs else f"{self.title} has no kernel for {fmt.name}"
        return super().stores(fmt) or (None if fmt.name == FP16 else missing)

    def holds(self, fmt: Format, shape: Sequence[int]) -> str | None:
        if fmt.name != FP16 and (shape[-2] % self.rows or shape[-1] % self.columns):
            return f"{self.title} needs rows divisible by {self.rows} and columns by {self.columns}"
        return super().holds(fmt, shape)

    def keeps(self, component: Component) -> str | None:
        if component.family == "head":
            return "vLLM reads the heads of most hybrids in 16 bits"
        return super().keeps(component)

    def _checked(self, model: LoadedModel) -> LoadedModel:
        checked = super()._checked(model)
        if any(len(component.shape) == 3 for component in checked.anatomy.candidates):
            raise UnsupportedError(
                "vLLM reads experts one by one, and KL Lens does not write them so"
            )
        return checked

    def how_to_run(self, repository: str, artifact: Artifact) -> str:
        return f"pip install {self.name}\nvllm serve {repository}"

    def unsupported(self, model_type: str, template: str | None = None) -> str | None:
        mamba1 = model_type in ("mamba", "falcon_mamba", "jamba")
        if mamba1:
            return "vLLM does not quantize Mamba-1 layers"
        return super().unsupported(model_type)


class VLLMCPUTarget(VLLMTarget):
    """What vLLM's kernel for CPUs runs."""

    name = "vllm-cpu"
    title = "vLLM on a CPU"
    formats = ("int4-g128", "uint4-g128", "int4-g32", "uint4-g32", FP16)
    bits = (4,)
    rows = 32
