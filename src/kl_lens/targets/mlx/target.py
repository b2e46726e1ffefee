"""MLX as a target: folders that mlx-lm loads, and sessions on the CPU or on an Apple GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from kl_lens.base.errors import TargetError, UnsupportedError
from kl_lens.base.lazy import lazy_modules
from kl_lens.run.records import Plan
from kl_lens.targets.abilities import Health, StockRecipe
from kl_lens.targets.exporting import CONFIG_FILE, choices
from kl_lens.targets.folders import SUFFIX, FolderContents, FolderTarget, folder_of
from kl_lens.targets.session import SessionSettings
from kl_lens.targets.tokenizer import read_json
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.affine import BITS
from kl_lens.weights.formats.integer import GROUPS
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.dissection import Dissection
    from kl_lens.targets.mlx import layout, session
else:  # they load MLX and torch
    layout, session = lazy_modules(__package__, "layout", "session")

CPU = "CPU"
GPU = "GPU"
_BEGINNING = 1 << 16  # bytes of a file; its metadata are among them
_LISTED_BYTES = 140  # of one tensor in a file's header: a little more than was seen


class MLXTarget(FolderTarget):
    name = "mlx"
    title = "MLX"
    extra = "mlx"
    packages = ("mlx.core", "mlx_lm")
    made_for = "mlx"
    written_with = ("mlx", "mlx-lm")

    def __init__(self) -> None:
        self._layouts: dict[str, layout.Layout] = {}  # by fingerprint, the last one only

    # -- what it can hold ----------------------------------------------------------------------------------

    @property
    def formats(self) -> tuple[str, ...]:
        return (*(f"affine{bits}-g{group}" for bits in BITS for group in GROUPS), FP16)

    @property
    def short_menu(self) -> tuple[Recipe, ...]:
        return self.recipes(
            (
                "affine3-g128",
                "affine4-g128",
                "affine4-g64",
                "affine5-g128",
                "affine6-g128",
                "affine8-g64",
            )
        )

    @property
    def small_formats(self) -> tuple[str, ...]:
        return ("affine2-g128", "affine2-g64")

    def stock_recipes(self, model: LoadedModel) -> tuple[StockRecipe, ...]:
        return layout.stock_recipes(model, self._layout(model))

    def _layout(self, model: LoadedModel) -> layout.Layout:
        if model.fingerprint not in self._layouts:
            self._layouts = {model.fingerprint: layout.layout_of(model)}
        return self._layouts[model.fingerprint]

    # -- files ---------------------------------------------------------------------------------------------

    def folder_contents(self, model: LoadedModel, plan: Plan) -> FolderContents:
        if model.classifier is not None:
            raise UnsupportedError("mlx-lm runs language models only")
        chosen = choices(model, plan, self.fit)
        plain = self._layout(model)
        config = plain.config | layout.quantization(plain, chosen)
        pieces = layout.pieces(plain, chosen, model.weights)
        if model.tokenizer is not None:
            return FolderContents(pieces, config)
        note = "mlx_lm.load wants a tokenizer, and the checkpoint has none; kl-lens opens the folder"
        return FolderContents(pieces, config, {"notes": [note]})

    def overhead(self, fmt: Format) -> int:
        """Scales and biases are two more tensors of the file's list."""
        return 0 if fmt.name == FP16 else 2 * _LISTED_BYTES

    def dissects(self, path: Path) -> bool:
        """A checkpoint of transformers has files of the same names: only MLX's say `mlx`."""
        folder = folder_of(path)
        file = min(folder.glob(f"model*{SUFFIX}"), default=None)
        if file is None or not (folder / CONFIG_FILE).is_file():
            return False
        with file.open("rb") as content:
            return b'"format":"mlx"' in content.read(_BEGINNING).replace(b" ", b"")

    def dissect(self, path: Path) -> Dissection:
        return session.MLXDissection(folder_of(path), self._layout)

    def is_all_floating(self, path: Path) -> bool:
        """From the configuration: a folder may have no record."""
        config = read_json(folder_of(path) / CONFIG_FILE)
        return not config.get("quantization") and not config.get("quantization_config")

    # -- running -------------------------------------------------------------------------------------------

    def open(self, path: Path, settings: SessionSettings) -> session.MLXSession:
        return session.MLXSession(
            folder_of(path), device=settings.device, exact=settings.exact
        )

    @property
    def version(self) -> str:
        try:
            return f"{metadata.version('mlx')}, mlx-lm {metadata.version('mlx-lm')}"
        except metadata.PackageNotFoundError:
            return "none"

    def health(self) -> Health:
        return super().health() if self.lacks() else Health(f"mlx {self.version}")

    def require_device(self, device: str) -> None:
        import mlx.core as mx

        if device not in (CPU, GPU):
            raise TargetError(f"--device {device}: MLX runs on CPU or GPU")
        if device == GPU and not mx.is_available(mx.gpu):
            raise TargetError(
                "--device GPU: MLX finds no GPU on this machine; it runs on CPU"
            )

    def for_text(self, settings: SessionSettings) -> SessionSettings:
        import mlx.core as mx

        return replace(settings, device=GPU) if mx.metal.is_available() else settings

    def in_float32(self, settings: SessionSettings) -> SessionSettings | None:
        return (
            None
            if settings.exact or settings.device == CPU
            else replace(settings, exact=True)
        )
