"""Would rows of a fused matrix with recipes of their own pay? Mamba-2's `in_proj` holds z, x, B, C and dt; Hymba's
holds queries, keys, values, x and the gate.

    python benchmarks/rows.py [--models reference:mamba2,…] [--device cuda] [--write docs/results/rows.csv]

The model is measured as it is and with each such matrix cut into its parts, and planned exactly for the same bytes of
weights (`ratio`), or of an OpenVINO file with the operations that the parts add to its graph (`ratio_file`). Plans are
judged on WikiText-2 test.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common import machine
from kl_lens import planning
from kl_lens.checkpoints import LoadedModel, load
from kl_lens.errors import KLLensError
from kl_lens.pipeline import Study
from kl_lens.sensitivity.joint import PlanMeter
from kl_lens.targets import get_target
from kl_lens.text import evaluation_windows
from result_files import Row, add_option, provenance, write

RECIPES = ("int4-g128+gptq", "int4-g64+gptq", "int4-g32+gptq", "int8+gptq")
SIZES = (4.3, 4.5, 4.8, 5.2, 5.8, 6.5, 7.5)  # bits per weight, all weights of the model
JOIN_BYTES = 4000  # of a concatenation and four more products in the .xml, as seen


class Cut(nn.Module):
    """A linear layer as one layer for each run of its rows."""

    def __init__(self, whole: nn.Linear, sizes: dict[str, int]) -> None:
        super().__init__()
        assert whole.bias is None
        for name, rows in zip(sizes, whole.weight.detach().split(list(sizes.values())), strict=True):
            part = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
            part.weight = nn.Parameter(rows.clone())
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.children()], -1)


def parts_of(mixer: Any) -> dict[str, int] | None:
    """Names and sizes of the parts of its `in_proj`."""
    if not isinstance(getattr(mixer, "in_proj", None), nn.Linear):
        return None
    if hasattr(mixer, "n_groups"):
        state, inner = mixer.n_groups * mixer.ssm_state_size, mixer.intermediate_size
        return {"z": inner, "x": inner, "B": state, "C": state, "dt": mixer.num_heads}
    if (sizes := getattr(mixer, "sizes", None)) is None:
        return None
    names = ("query", "key", "value", "x", "gate") if len(sizes) == 5 else ("query", "x", "gate")
    return dict(zip(names, sizes, strict=True))


def opened(name: str, device: str, cut: bool) -> LoadedModel:
    model = load(name, device=device)
    for module in list(model.model.modules()) if cut else []:
        if sizes := parts_of(module):
            module.in_proj = Cut(module.in_proj, sizes)
    return LoadedModel(name, model.folder, model.model, model.tokenizer)


def planned(model: LoadedModel, sizes: list[float], arguments: argparse.Namespace) -> list[list[Any]]:
    """KLs by window of the plans for these bytes of weights, and of a file; None where no plan is that small."""
    joins = sum(isinstance(module, Cut) for module in model.model.modules()) * JOIN_BYTES
    in_file = {"target": get_target("openvino"), "fixed_bytes": joins}
    with tempfile.TemporaryDirectory() as folder:
        study = Study(model, folder=folder)
        study.calibrate(windows=32)
        table = study.measure(windows=arguments.windows, formats=RECIPES)
        tokenizer = model.require_tokenizer()
        text = evaluation_windows("wikitext2:test", tokenizer, length=512, limit=arguments.test_windows)
        judge = PlanMeter(study.bench.in_run(model, Path(folder)), text)

        def judged(size: float, **how: Any) -> Any:
            try:
                plan = planning.plan_for_budget(table, max_bytes=size, keep_fused=False, **how).plan
            except KLLensError:
                return None
            return judge.measure(dict(plan.assignment)).windows

        return [[judged(size) for size in sizes], [judged(size, **in_file) for size in sizes]]


def compare(name: str, arguments: argparse.Namespace) -> list[Row]:
    whole = opened(name, arguments.device, cut=False)
    sizes = [whole.anatomy.parameters * bits / 8 for bits in SIZES]
    found = planned(whole, sizes, arguments)
    found += planned(opened(name, arguments.device, cut=True), sizes, arguments)
    rows = []
    for bits, size, one, one_file, other, other_file in zip(SIZES, sizes, *found, strict=True):
        if one is None or other is None:
            continue
        error = np.std(one - other, ddof=1) / len(one) ** 0.5
        in_file = (
            "" if one_file is None or other_file is None else f"{other_file.mean() / one_file.mean():.3f}"
        )
        row = {
            "model": name, "bits": str(bits), "mb": f"{size / 1e6:.3f}", "kl": f"{one.mean():.4f}",
            "kl_cut": f"{other.mean():.4f}", "difference_se": f"{error:.0e}",
            "ratio": f"{other.mean() / one.mean():.3f}", "ratio_file": in_file,
            "windows": str(arguments.windows), "test_windows": str(arguments.test_windows), **provenance(),
        }  # fmt: skip
        rows.append(row)
        print(", ".join(row.values()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="reference:mamba2,reference:hybrid,reference:hymba")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens, to measure sensitivity on")
    parser.add_argument("--test-windows", type=int, default=32)
    add_option(parser)
    arguments = parser.parse_args()
    print(machine())
    for name in arguments.models.split(","):
        write(arguments.write, compare(name, arguments), ("model", "bits"))


if __name__ == "__main__":
    main()
