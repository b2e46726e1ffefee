"""How long OpenVINO takes for one token through one weight, by shape and format.

For each pair a small IR is built with the constants that an export writes, compiled with the settings of a deployed
session, and timed. It holds several such products, each with weights and an input of its own, so that their bytes
together are as many as the whole model would read (up to twice the last-level cache): a single matrix would stay in
the caches between two calls and look faster than it ever is inside a model.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import torch

from kl_lens.formats import Format, get_format
from kl_lens.recipes import FP16, Recipe
from kl_lens.records import Component
from kl_lens.targets.openvino.constants import WeightMap, place_weights
from kl_lens.targets.openvino.profiles import Realised
from kl_lens.targets.openvino.session import compile_graph, deployment_settings, read_graph
from kl_lens.weights import GivenWeights, WeightStore

MOST_COPIES = 32
MOST_BYTES = 512 << 20  # of float32 weights while a graph is built
LEAST_SECONDS = 0.02  # of one timing; short products are repeated until they fill it


@dataclass(frozen=True)
class Product:
    """One token times one weight."""

    rows: int
    columns: int
    format: str


def copies_for(product: Product, model_parameters: int, cache: int | None) -> int:
    """How many products a graph holds: enough for the model's bytes or twice the cache, whichever is less."""
    fmt = get_format(product.format)
    size = fmt.bytes((product.rows, product.columns))
    whole = model_parameters * size / (product.rows * product.columns)
    wanted = math.ceil(min(whole, 2 * cache if cache else whole) / size)
    fitting = MOST_BYTES // (4 * product.rows * product.columns)
    return max(2, min(wanted, MOST_COPIES, fitting))


def time_products(
    products: Iterable[Product],
    *,
    model_parameters: int,
    device: str = "CPU",
    threads: int | None = None,
    repeats: int = 5,
    cache: int | None = None,
    advanced: Callable[[str], None] = lambda what: None,
) -> dict[Product, list[float]]:
    """Seconds of each product in every round; formats of one shape take turns."""
    products = list(dict.fromkeys(products))
    quantized = {p.format for p in products if p.format != FP16}
    overhead = _Timer(_empty_graph(), 1, device, threads, set())
    seconds: dict[Product, list[float]] = {}
    shapes = dict.fromkeys((p.rows, p.columns) for p in products)
    for shape in shapes:
        timers = {}
        for product in (p for p in products if (p.rows, p.columns) == shape):
            copies = copies_for(product, model_parameters, cache)
            graph = product_graph(shape, get_format(product.format), copies)
            # An FP16 weight runs beside quantized ones in most plans, and with the settings that those need.
            formats = {product.format} | ({"int8"} if product.format == FP16 and quantized else set())
            timers[product] = _Timer(graph, copies, device, threads, formats)
        rounds: dict[Product, list[float]] = {product: [] for product in timers}
        for _ in range(repeats):
            call = overhead.seconds()
            for product, timer in timers.items():
                rounds[product].append(max(timer.seconds() - call, 1e-9) / timer.copies)
        seconds |= rounds
        for product in rounds:
            advanced(f"{product.rows} × {product.columns} in {product.format}")
    return seconds


def product_graph(shape: tuple[int, int], fmt: Format, copies: int) -> ov.Model:
    """`copies` independent products with random weights, as an export would store them."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    components, nodes, inputs, results = [], {}, [], []
    for index in range(copies):
        name = f"weight{index}"
        weight = weights[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        components.append(Component(name, name, "product", "other", 0, shape, shape[0] * shape[1]))
        x = ops.parameter([1, 1, shape[1]], np.float32, name=f"x{index}")
        constant = ops.constant(weight.numpy())
        nodes[name] = [constant]
        inputs.append(x)
        results.append(ops.result(ops.matmul(x, constant, False, True)))
    graph = ov.Model(results, inputs, "products")
    recipe = Recipe(fmt.name)
    realised = {c.name: Realised(c.name, recipe, recipe, None) for c in components}
    place_weights(WeightMap(nodes), WeightStore(GivenWeights(weights)), components, realised, baseline=FP16)
    return graph


def _empty_graph() -> ov.Model:
    """Seconds of a call that computes almost nothing."""
    x = ops.parameter([1, 1, 8], np.float32, name="x")
    return ov.Model([ops.result(ops.relu(x))], [x], "nothing")


class _Timer:
    """A compiled graph with its inputs in place."""

    def __init__(
        self, graph: ov.Model, copies: int, device: str, threads: int | None, formats: set[str]
    ) -> None:
        self.copies = copies
        settings = deployment_settings(formats) if device == "CPU" else None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "products.xml"
            ov.save_model(graph, path, compress_to_fp16=False)
            compiled = compile_graph(read_graph(path), device, threads=threads, settings=settings)
        self._request = compiled.create_infer_request()
        generator = np.random.default_rng(0)
        for index, entry in enumerate(compiled.inputs):
            values = generator.standard_normal(tuple(entry.get_shape())).astype(np.float32)
            self._request.set_input_tensor(index, ov.Tensor(values))
        self._request.infer()
        self.calls = max(3, math.ceil(LEAST_SECONDS / max(self._time(2), 1e-6)))

    def _time(self, calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            self._request.infer()
        return (time.perf_counter() - started) / calls

    def seconds(self) -> float:
        """Seconds of one call."""
        return self._time(self.calls)


def products_of(components: Sequence[Component], formats: Sequence[str]) -> dict[tuple[str, str], Product]:
    """(component, format) → the product to time; for experts, that of one matrix."""
    return {
        (c.name, name): Product(c.shape[-2], c.shape[-1], name)
        for c in components
        for name in formats
        if get_format(name).fits(c.shape[-2:]) is None
    }
