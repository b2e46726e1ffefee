"""`inspect`: a model's components and their bytes at each precision."""

from __future__ import annotations

from dataclasses import dataclass

from kl_lens.model import LoadedModel
from kl_lens.run.records import Component
from kl_lens.study.session import Session
from kl_lens.study.settings import Model, Opening, Settings, group, of_model, option
from kl_lens.weights.formats import FP16, get_format

PRECISIONS = (FP16, "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class InspectSettings(Settings):
    model: Model = of_model()
    opening: Opening = group(Opening)
    components: bool = option(False, "one row per component instead of per block")


@dataclass(frozen=True)
class InspectResult:
    model: LoadedModel
    by_component: bool


def inspect(settings: InspectSettings, session: Session) -> InspectResult:
    return InspectResult(session.model(settings.model, settings.opening), settings.components)


def stored_bytes(component: Component, precision: str) -> int:
    """Counts weights that are not quantized as FP16; a target may keep them in FP32."""
    if not component.quantizable or precision == FP16:
        return 2 * component.parameters
    return get_format(precision).bytes(component.shape)
