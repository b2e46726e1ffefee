"""Exports of tiny models, made once and shared: the conversion is what takes time here."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kl_lens.model import LoadedModel
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets import get_target
from kl_lens.weights.recipes import FP16
from tests.families import in_turn, plain, tiny_model

pytest.importorskip("openvino", reason="needs the extra kl-lens[openvino]")


def export(model: LoadedModel, plan: Plan, folder: Path, **options: Any) -> Artifact:
    return get_target("openvino").export(model, plan, folder, **options)


@dataclass
class Exported:
    model: LoadedModel
    artifact: Artifact
    folder: Path


def loaded(family: str) -> LoadedModel:
    model = tiny_model(family)
    if getattr(model.config, "rescale_every", 0):
        model.config.rescale_every = 0  # as `load` does in float32
    return plain(LoadedModel(family, Path(), model, None))


@functools.cache
def untouched(family: str) -> LoadedModel:
    """One model for all who only read it: its graph is traced once, whatever the plan."""
    return loaded(family)


# Integers; zero points and small floats.
MIXED = ("int4", "int8", "fp16", "int4-g32", "int8")
UNSIGNED = ("uint4-g32", "nf4-g32", "uint4", "nf4", "uint2-g64", "mxfp4", "uint4-g64")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """exported(family, "original" | "mixed" | "unsigned" | …): the family's tiny model as an OpenVINO folder."""
    cache: dict[Any, Exported] = {}

    def make(family: str, kind: str = "original", **options: Any) -> Exported:
        key = (family, kind, *sorted(options.items()))
        if key not in cache:
            model = untouched(family)
            formats = {"mixed": MIXED, "unsigned": UNSIGNED}.get(kind, (FP16,))
            plan = in_turn(model, formats)
            folder = tmp_path_factory.mktemp(f"{family}-{kind}")
            options = {"unplanned": "fp32", **options}
            cache[key] = Exported(model, export(model, plan, folder, **options), folder)
        return cache[key]

    return make


def reference(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    """transformers' own full forward: the one thing that is right for every family."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0].numpy()


def assert_same_logits(
    logits: np.ndarray, expected: np.ndarray, share: float = 1e-3
) -> None:
    """Within a share of the logit range; the same most likely token except on near-ties."""
    limit = share * float(np.ptp(expected))
    assert np.abs(logits - expected).max() <= limit
    for row, right in zip(logits, expected, strict=True):
        if row.argmax() != right.argmax():
            assert right.max() - right[row.argmax()] <= 2 * limit
