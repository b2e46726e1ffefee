"""Would rows of a fused matrix that get their own recipes pay? Mamba-2's `in_proj` holds z, x, B, C and dt; Hymba's
holds queries, keys, values, x and the gate.

    python benchmarks/rows.py [--models reference:mamba2,…] [--device cuda] [--write docs/results/rows.csv]
    python benchmarks/rows.py --latency

The model is measured twice, as it is and with each such matrix cut into its parts, and planned exactly for the same
numbers of bytes; the plans are judged on WikiText-2 test. Bytes are those of the weights (`ratio`), or those of an
OpenVINO file with the operations that each part adds to its graph (`ratio_file`). `--latency` times one token through
the `in_proj` of a Mamba-2 that is 2048 wide in OpenVINO, whole and cut, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common import machine
from kl_lens import planning
from kl_lens.checkpoints import LoadedModel, load
from kl_lens.errors import KLLensError
from kl_lens.formats import get_format
from kl_lens.pipeline import Study
from kl_lens.sensitivity.joint import PlanMeter
from kl_lens.targets import get_target
from kl_lens.text import evaluation_windows
from result_files import Row, add_option, provenance, write

RECIPES = ("int4-g128+gptq", "int4-g64+gptq", "int4-g32+gptq", "int8+gptq")
SIZES = (4.3, 4.5, 4.8, 5.2, 5.8, 6.5, 7.5)  # bits per weight, all weights of the model
JOIN_BYTES = 1200  # a concatenation in the .xml; seen: 1.1 kB


class Cut(nn.Module):
    """A linear layer, one layer for each run of its rows."""

    def __init__(self, whole: nn.Linear, sizes: dict[str, int]) -> None:
        super().__init__()
        weights = whole.weight.detach().split(list(sizes.values()))
        biases = [None] * len(sizes) if whole.bias is None else whole.bias.detach().split(list(sizes.values()))
        for name, weight, bias in zip(sizes, weights, biases, strict=True):
            part = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype)
            part.weight, part.bias = nn.Parameter(weight.clone()), bias and nn.Parameter(bias.clone())
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


def cut(name: str, device: str) -> LoadedModel:
    model = load(name, device=device)
    for module in list(model.model.modules()):
        if sizes := parts_of(module):
            module.in_proj = Cut(module.in_proj, sizes)
    return LoadedModel(f"{name} cut", model.folder, model.model, model.tokenizer)


def plans(model: LoadedModel, sizes: list[float], arguments: argparse.Namespace) -> list[list[Any]]:
    """KL by window of the plans for these bytes of weights, and of the file; None where there is no such plan."""
    joined = sum(isinstance(module, Cut) for module in model.model.modules()) * JOIN_BYTES
    with tempfile.TemporaryDirectory() as folder:
        study = Study(model, folder=folder)
        study.calibrate(windows=32)
        table = study.measure(windows=arguments.windows, formats=RECIPES)
        text = evaluation_windows(
            "wikitext2:test", model.require_tokenizer(), length=512, limit=arguments.test_windows
        )
        judge = PlanMeter(model, text)
        found: list[list[Any]] = [[], []]
        for size in sizes:
            for results, how in zip(
                found, ({}, {"target": get_target("openvino"), "fixed_bytes": joined}), strict=True
            ):
                try:
                    plan = planning.plan_for_budget(table, max_bytes=size, keep_fused=False, **how).plan
                except KLLensError:
                    results.append(None)
                    continue
                results.append(judge.measure(dict(plan.assignment)).windows)
    return found


def compare(name: str, arguments: argparse.Namespace) -> list[Row]:
    whole = load(name, device=arguments.device)
    sizes = [whole.anatomy.parameters * bits / 8 for bits in SIZES]
    one, other = plans(whole, sizes, arguments), plans(cut(name, arguments.device), sizes, arguments)
    rows = []
    for bits, size, *kls in zip(SIZES, sizes, *one, *other, strict=True):
        plain, in_file, plain_cut, in_file_cut = kls
        if plain is None or plain_cut is None:
            continue
        row = {"model": name, "bits": str(bits), "mb": f"{size / 1e6:.3f}", "kl": f"{plain.mean():.4f}"}
        error = np.std(plain - plain_cut, ddof=1) / len(plain) ** 0.5
        row |= {"kl_cut": f"{plain_cut.mean():.4f}", "difference_se": f"{error:.0e}"}
        row["ratio"] = f"{plain_cut.mean() / plain.mean():.3f}"
        both = in_file is not None and in_file_cut is not None
        row["ratio_file"] = f"{in_file_cut.mean() / in_file.mean():.3f}" if both else ""
        row |= {"test_windows": str(arguments.test_windows), **provenance()}
        rows.append(row)
        print(", ".join(row.values()), flush=True)
    return rows


def latency(rounds: int = 30) -> None:
    import openvino as ov
    import openvino.opset13 as ops

    from kl_lens.targets.openvino.constants import integer_constant
    from kl_lens.targets.openvino.session import compile_graph, deployment_settings, read_graph

    width, sizes = 2048, {"z": 4096, "x": 4096, "B": 128, "C": 128, "dt": 64}

    def request(parts: list[tuple[int, str]]) -> Any:
        x = ops.parameter([1, 1, width], np.float32)
        products = []
        for place, (rows, name) in enumerate(parts):
            fmt = get_format(name)
            weight, _, _ = integer_constant(fmt.quantize(torch.randn(rows, width)), fmt, f"w{place}")
            products.append(ops.matmul(x, weight, False, True))
        end = products[0] if len(products) == 1 else ops.concat(products, 2)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "product.xml"
            ov.save_model(ov.Model([ops.result(end)], [x]), file, compress_to_fp16=False)
            print(f"{len(parts)} parts: .xml {file.stat().st_size} bytes")
            settings = deployment_settings({name for _, name in parts})
            compiled = compile_graph(read_graph(file), "CPU", threads=4, settings=settings)
        made = compiled.create_infer_request()
        made.set_input_tensor(ov.Tensor(np.random.randn(1, 1, width).astype(np.float32)))
        return made

    small = ("B", "C", "dt")
    cases = {
        "whole": [(sum(sizes.values()), "int4-g64")],
        "five parts, int4": [(rows, "int4-g64") for rows in sizes.values()],
        "five parts, B, C and dt int8": [
            (rows, "int8" if n in small else "int4-g64") for n, rows in sizes.items()
        ],
    }
    requests = {case: request(parts) for case, parts in cases.items()}
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, made in requests.items():
            began = time.perf_counter()
            for _ in range(20):
                made.infer()
            seconds[case].append((time.perf_counter() - began) / 20)
    for case, found in seconds.items():
        share = statistics.median(a / b for a, b in zip(found, seconds["whole"], strict=True))
        print(f"{case}: {1e3 * statistics.median(found):.3f} ms, {share:.2f} of the whole one")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="reference:mamba2,reference:hybrid,reference:hymba")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens that sensitivity is measured on")
    parser.add_argument("--test-windows", type=int, default=32)
    parser.add_argument("--latency", action="store_true", help="only that")
    add_option(parser)
    arguments = parser.parse_args()
    print(machine())
    if arguments.latency:
        latency()
        return
    for name in arguments.models.split(","):
        write(arguments.write, compare(name, arguments), ("model", "bits"))


if __name__ == "__main__":
    main()
