"""`inspect`: a model's components and their bytes at each precision."""

from __future__ import annotations

from dataclasses import dataclass

from kl_lens.model import LoadedModel
from kl_lens.run.records import Component
from kl_lens.study.session import Session
from kl_lens.study.settings import Model, Opening, Settings, group, of_model
from kl_lens.weights.formats import FP16, get_format

PRECISIONS = (FP16, "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class InspectSettings(Settings):
    model: Model = of_model()
    opening: Opening = group(Opening)


def inspect(settings: InspectSettings, session: Session) -> LoadedModel:
    return session.model(settings.model, settings.opening)


def stored_bytes(component: Component, precision: str) -> int:
    """Counts weights that are not quantized as FP16; a target may keep them in FP32."""
    if not component.quantizable or precision == FP16:
        return 2 * component.parameters
    return get_format(precision).bytes(component.shape)
