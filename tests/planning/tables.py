"""Small sensitivity tables with real shapes and real formats, for the tests of planning."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kl_lens.planning import BudgetSolution, build_problem, plan_for_budget
from kl_lens.run.records import Component, Estimate, Measurement, SensitivityTable

SEED_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "seed_sensitivity"


def component(name: str, shape: tuple[int, ...] = (64, 64), **more: Any) -> Component:
    kind = name.rpartition(".")[2]
    size = math.prod(shape)
    more = {
        key: tuple(value) if key in ("tied_with", "fused_with") else value
        for key, value in more.items()
    }
    if not more.get("quantizable", True):
        more["reason"] = "runtimes need it in full precision"
    return Component(name, f"{name}.weight", kind, "ssm", None, shape, size, **more)


def measurement(name: str, format_name: str, **metrics: float | Estimate) -> Measurement:
    estimates = {
        k: v if isinstance(v, Estimate) else Estimate(v, 0.0) for k, v in metrics.items()
    }
    return Measurement(name, format_name, estimates, 1024, 8, "float32", 0.1)


def table_of(
    components: Sequence[Component],
    kls: Mapping[tuple[str, str], float],
    *,
    head: str = "head",
    embedding: str | None = None,
    model_type: str = "mamba",
) -> SensitivityTable:
    """Both KLs, the MSE and ΔCE of a measurement are the same number here, and SQNR its negative."""
    metrics = (
        "kl_teacher_to_student",
        "kl_student_to_teacher",
        "mse",
        "delta_cross_entropy",
    )
    measurements = tuple(
        measurement(name, fmt, **dict.fromkeys(metrics, kl), sqnr_db=-kl)
        for (name, fmt), kl in kls.items()
    )
    return SensitivityTable(
        "org/tiny-model",
        model_type,
        tuple(components),
        head,
        embedding or head,
        measurements,
    )


LIMITS = ("max_bytes", "max_bpw", "max_kl", "min_speed", "minimise", "name")


def best(table: SensitivityTable, **options: Any) -> BudgetSolution:
    """The best plan of a table: limits, and what there is to choose from."""
    limits = {name: options.pop(name) for name in LIMITS if name in options}
    return plan_for_budget(build_problem(table, **options), **limits)


def seed_lists() -> dict[int, dict[str, dict[str, float]]]:
    """The published per-layer results of mamba-130m, or a skip."""
    files = {bits: SEED_FOLDER / f"mamba-130m_{bits}bit.json" for bits in (4, 8)}
    for path in files.values():
        if not path.is_file():
            pytest.skip(f"the published sensitivity lists are not here ({path.name})")
    return {bits: json.loads(path.read_text()) for bits, path in files.items()}


def mamba_130m_components() -> list[Component]:
    """mamba-130m's weights: 24 blocks, and a head that is the embedding."""
    components = [component("lm_head", (50280, 768), tied_with=["backbone.embeddings"])]
    for i in range(24):
        mixer = f"backbone.layers.{i}.mixer"
        components += [
            component(f"{mixer}.conv1d", (1536, 1, 4), quantizable=False),
            component(f"{mixer}.A_log", (1536, 16), quantizable=False),
            component(f"{mixer}.in_proj", (3072, 768)),
            component(f"{mixer}.x_proj", (80, 1536)),
            component(f"{mixer}.dt_proj", (1536, 48)),
            component(f"{mixer}.out_proj", (768, 1536)),
        ]
    return components


def seed_table(model_type: str = "mamba") -> SensitivityTable:
    lists = seed_lists()
    measurements = tuple(
        measurement(
            name, f"int{bits}", **{k: v for k, v in metrics.items() if k != "perplexity"}
        )
        for bits, layers in lists.items()
        for name, metrics in layers.items()
    )
    return SensitivityTable(
        "state-spaces/mamba-130m-hf",
        model_type,
        tuple(mamba_130m_components()),
        "lm_head",
        "lm_head",
        measurements,
    )
