"""Where every weight goes in mlx-lm's model, found by asking mlx-lm: its `sanitize` turns a checkpoint's tensors into
its own parameters. It renames, moves axes, stacks experts, splits matrices, multiplies by constants.

Numbers in place of weights show what it does to each: numbered components tell which one a parameter comes from,
numbered rows which of its rows, ones which factors. Then the real weights go the same way, and every parameter is
compared with what was found, bit for bit. Last, the model made of them runs on a few tokens, whole and one by one; if
its logits are not those of PyTorch, mlx-lm computes another function and the model is refused. `pieces` is what the
file of a plan holds, which `mlx_lm.load` opens as it is.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kl_lens.base.errors import UnsupportedError, one_line
from kl_lens.model import LoadedModel
from kl_lens.run.records import Component
from kl_lens.targets.abilities import StockRecipe
from kl_lens.targets.exporting import (
    Choice,
    Entry,
    Piece,
    checkpoint_settings,
    floating,
)
from kl_lens.weights.formats.affine import AffineFormat
from kl_lens.weights.recipes import FP16, Recipe
from kl_lens.weights.store import WeightStore

# A parameter's name and the parameter → what stands for it.
Value = Callable[[str, Tensor], Tensor]
_TOKENS = 24
_WHOLE = 16  # of the comparison; the first are fed at once
# Nats per token between PyTorch and mlx-lm in float32; rounding gives 1e-8.
MOST_KL = 1e-3
# Constants that mlx-lm 0.32.2 forgets to fold into weights: ends of names → factors. Tried only if the model is not
# right without them.
_FORGOTTEN: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
    "falcon_h1": lambda config: {
        "k_proj.weight": config["key_multiplier"],
        "v_proj.weight": config["attention_in_multiplier"],
    }
}


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter that holds rows of a component."""

    name: str  # in mlx-lm, without .weight: backbone.layers.0.mixer.in_proj
    component: str
    shape: tuple[int, ...]
    rows: Tensor  # of the component, experts one below the other
    # That the component's rows are multiplied with: a number, or (…, rows, 1).
    factors: float | Tensor

    def arranged(self, part: Tensor) -> Tensor:
        """Something of the component's with one row per row, in this parameter's order and shape."""
        return part.reshape(-1, part.shape[-1])[self.rows].reshape(*self.shape[:-1], -1)


@dataclass(frozen=True, eq=False)
class Layout:
    """mlx-lm's parameters of one model."""

    config: dict[str, Any]
    matrices: tuple[Matrix, ...]
    # Parameters outside plans: norms, convolutions, biases.
    values: dict[str, Tensor]
    sources: dict[str, str]  # their components
    full_precision: frozenset[str]  # of these, what mlx-lm never converts to float16


def layout_of(model: LoadedModel) -> Layout:
    """Raises UnsupportedError, with the reason, if mlx-lm cannot run the model as PyTorch does."""
    model.require_memory("exporting to MLX")
    config = configuration_of(model)
    try:
        return _layout(model, config, {})
    except UnsupportedError:
        if (forgotten := _FORGOTTEN.get(config["model_type"])) is None:
            raise
        return _layout(model, config, forgotten(config))


def _layout(
    model: LoadedModel, config: dict[str, Any], forgotten: dict[str, float]
) -> Layout:
    runtime = empty_model(config)
    candidates = {c.name: c for c in model.anatomy.candidates}
    probes = _Probes(model, runtime, forgotten)
    modules = dict(runtime.named_modules())
    matrices: list[Matrix] = []
    sources: dict[str, str] = {}
    for name, component in probes.sources.items():
        path = name.removesuffix(".weight")
        if component not in candidates or not hasattr(modules.get(path), "to_quantized"):
            sources[name] = component
            continue
        rows = probes.rows(name)
        factors = probes.factors(name)
        shape = candidates[component].shape
        matrix = Matrix(
            path, component, probes.shapes[name], rows, _by_row(factors, rows, shape)
        )
        weight = model.tensor(candidates[component].weight).detach().cpu().float()
        real = as_tensor(probes.real[name])
        if not torch.equal(matrix.arranged(weight * matrix.factors), real):
            raise UnsupportedError(
                f"mlx-lm changes {component} in a way that KL Lens does not follow"
            )
        matrices.append(matrix)
    if lost := sorted(set(candidates) - {matrix.component for matrix in matrices}):
        raise UnsupportedError(
            f"mlx-lm's {config['model_type']} has no matrix of just {lost[0]} to quantize"
        )
    _require_same_logits(model, runtime, probes.real)
    casts = getattr(runtime, "cast_predicate", lambda _: True)
    values = {name: as_tensor(probes.real[name]) for name in sources}
    uncast = frozenset(name for name in sources if not casts(name))
    return Layout(config, tuple(matrices), values, sources, uncast)


def as_tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))


def _by_row(factors: Tensor, rows: Tensor, shape: tuple[int, ...]) -> float | Tensor:
    """The factors of a parameter's rows as those of its component's rows."""
    if bool((factors == factors[0]).all()):
        return float(factors[0])
    every = torch.ones(math.prod(shape[:-1]))
    every[rows] = factors
    return every.reshape(*shape[:-1], 1)


class _Probes:
    """What becomes of a model's tensors in mlx-lm."""

    def __init__(
        self, model: LoadedModel, runtime: Any, forgotten: dict[str, float]
    ) -> None:
        from mlx.utils import tree_flatten

        self._model = model
        self._runtime = runtime
        self._forgotten = forgotten
        self._state = {
            name: tensor.detach().cpu()
            for name, tensor in model.model.state_dict().items()
        }
        parameters: Any = tree_flatten(runtime.parameters())
        self.shapes = {name: tuple(array.shape) for name, array in parameters}
        components = model.anatomy.components
        named = model.model.named_parameters(remove_duplicate=False)
        numbers = {
            id(p): n
            for n, c in enumerate(components, start=1)
            for p in model.parameters_of(c)
        }
        # Of components, from 1.
        self._numbers = {name: numbers[id(parameter)] for name, parameter in named}
        self._matrices = {
            name for name, n in self._numbers.items() if components[n - 1].quantizable
        }
        self._zeros = self._probed(lambda *_: torch.zeros(()))
        units = self._probed(lambda *_: torch.ones(()))
        self._factors = {name: units[name] - self._zeros[name] for name in units}
        self.real = self._sanitized({name: t.float() for name, t in self._state.items()})
        for name, shape in self.shapes.items():
            if (stored := tuple(self.real[name].shape)) != shape:
                raise UnsupportedError(
                    f"mlx-lm expects {name} of shape {shape}, not {stored}"
                )
        # Parameter → its component; empty: none, or several.
        self.sources = dict.fromkeys(self.shapes, "")
        owners = self._found(lambda name, _: torch.tensor(self._numbers.get(name, 0)))
        for name, owner in owners.items():
            number, *others = owner.unique().tolist()
            if number and not others:
                self.sources[name] = components[number - 1].name

        def numbered(name: str, tensor: Tensor) -> Tensor:
            if name not in self._matrices:
                return torch.zeros(())
            rows = tensor.shape[:-1]
            return torch.arange(math.prod(rows), dtype=torch.float32).reshape(*rows, 1)

        self._rows = self._found(numbered)

    def rows(self, name: str) -> Tensor:
        """The rows of its component that a parameter consists of, in order."""
        return self._rows[name][..., 0].reshape(-1)

    def factors(self, name: str) -> Tensor:
        """What these rows are multiplied with."""
        return self._factors[name][..., 0].reshape(-1)

    def _found(self, value: Value) -> dict[str, Tensor]:
        """The whole numbers that each parameter's elements had before mlx-lm multiplied and added."""
        return {
            name: ((probed - self._zeros[name]) / self._factors[name]).round().long()
            for name, probed in self._probed(value).items()
        }

    def _probed(self, value: Value) -> dict[str, Tensor]:
        # Of matrices two columns are enough; a single one could be taken for none.
        tensors = {}
        for name, tensor in self._state.items():
            part = tensor[..., :2] if name in self._matrices else tensor
            tensors[name] = value(name, part).float().expand(part.shape)
        return {name: as_tensor(a) for name, a in self._sanitized(tensors).items()}

    def _sanitized(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Tensors under transformers' names as mlx-lm's parameters."""
        import mlx.core as mx
        from transformers.core_model_loading import revert_weight_conversion

        whole: Any = self._model.model
        # Names and shapes as in checkpoints.
        stored = revert_weight_conversion(whole, tensors)
        family = self._model.anatomy.model_type
        sanitize = getattr(self._runtime, "sanitize", lambda arrays: arrays)
        # Some classes want transformers' own names.
        for named in (stored, tensors | stored):
            arrays = {
                name: mx.array(tensor.contiguous().numpy())
                for name, tensor in named.items()
            }
            try:
                arrays = sanitize(arrays)
            except Exception as error:  # written for one family's checkpoints; over others it raises anything
                reason = f"{type(error).__name__} {one_line(error)}"
                raise UnsupportedError(
                    f"mlx-lm cannot take over this {family} checkpoint: {reason}"
                ) from error
            if not (missing := sorted(set(self.shapes) - set(arrays))):
                break
        else:
            raise UnsupportedError(
                f"mlx-lm's {family} wants {missing[0]}, which is not there"
            )
        for end, factor in self._forgotten.items():
            for name in self.shapes:
                if name.endswith(end):
                    arrays[name] *= factor
        return {name: arrays[name] for name in self.shapes}


def _require_same_logits(
    model: LoadedModel, runtime: Any, weights: dict[str, Any]
) -> None:
    """Raises if mlx-lm computes another function."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    vocabulary = int(model.config.vocab_size)
    ids = np.random.default_rng(0).integers(0, vocabulary, _TOKENS)
    with torch.no_grad():
        original = model.chain.full_logits(torch.from_numpy(ids)[None])[0].float().cpu()
    pieces = [ids[:_WHOLE], *ids[_WHOLE:, None]]
    try:
        with mx.stream(mx.cpu):
            runtime.load_weights(list(weights.items()))
            runtime.eval()
            cache = make_prompt_cache(runtime)
            logits = [
                np.array(runtime(mx.array(piece)[None], cache=cache)[0])
                for piece in pieces
            ]
    except Exception as error:  # a model class may raise anything over settings that it was not written for
        reason = f"{type(error).__name__} {one_line(error)}"
        raise UnsupportedError(f"mlx-lm cannot run this model: {reason}") from error
    expected = original.log_softmax(-1)
    logprobs = torch.from_numpy(np.concatenate(logits)).log_softmax(-1)
    divergence = float((expected.exp() * (expected - logprobs)).sum(-1).mean())
    if not divergence <= MOST_KL:
        raise UnsupportedError(
            f"mlx-lm computes something else than PyTorch for this {model.anatomy.model_type} model "
            f"(KL {divergence:.2g} nats per token with the original weights); use another target"
        )


# config.json as mlx-lm reads it: the checkpoint's own, with the settings that transformers 5 no longer writes.
_ROTARY = ("rope_theta", "partial_rotary_factor")
# transformers' names → Granite's own.
_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}


def _interval(config: dict[str, Any]) -> dict[str, Any]:
    """mlx-lm knows only one rhythm: attention in every n-th layer."""
    kinds = config.get("layer_types") or []
    if not kinds:
        return {}
    every = (*kinds, "full_attention").index("full_attention") + 1
    period = [*["linear_attention"] * (every - 1), "full_attention"]
    if kinds != (period * len(kinds))[: len(kinds)] or every > len(kinds):
        raise UnsupportedError(
            "mlx-lm expects attention in every n-th layer, and layer_types says otherwise"
        )
    return {"full_attention_interval": every}


# Model type → settings that mlx-lm needs, computed from the others.
_MORE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mamba2": lambda config: {
        "intermediate_size": int(config["expand"] * config["hidden_size"])
    },
    "falcon_h1": lambda config: {
        "head_dim": config["hidden_size"] // config["num_attention_heads"]
    },
    "gpt_neox": lambda config: {
        old: config["rope_parameters"][new]
        for old, new in zip(("rotary_emb_base", "rotary_pct"), _ROTARY, strict=True)
        if old not in config
    },
    "granitemoehybrid": lambda config: {
        "layer_types": [_LAYERS.get(kind, kind) for kind in config["layer_types"]],
        "position_embedding_type": "nope",  # where it is null; mlx-lm would take that for rotary
    },
    "lfm2": lambda config: {"block_dim": config["hidden_size"]},
    "qwen3_next": _interval,
    "qwen3_5_text": lambda config: {"model_type": "qwen3_5", **_interval(config)},
    "qwen3_5_moe_text": lambda config: {"model_type": "qwen3_5_moe", **_interval(config)},
}
# The computed value wins.
_REPLACED = ("layer_types", "model_type", "tie_word_embeddings")


def configuration_of(model: LoadedModel) -> dict[str, Any]:
    """As JSON: numbers that are not finite are written as transformers writes them."""
    config = checkpoint_settings(model)
    if "text_config" in config:  # the language model of one that also sees images
        config = json.loads(model.config.to_json_string(use_diff=False))
    rotary = config.get("rope_parameters") or {}
    more = {key: rotary[key] for key in _ROTARY if key in rotary}
    if rotary.get("rope_type", "default") != "default":
        more["rope_scaling"] = rotary
    if getattr(model.config, "tie_word_embeddings", False):
        # Some checkpoints deny it and hold the same matrix twice.
        more["tie_word_embeddings"] = True
    more |= _MORE.get(config["model_type"], lambda _: {})(config)
    return config | {
        key: v for key, v in more.items() if key in _REPLACED or config.get(key) is None
    }


def empty_model(config: dict[str, Any]) -> Any:
    """mlx-lm's model for a configuration, with weights that are never computed."""
    from mlx_lm.utils import _decode_tagged_floats, _get_classes

    try:
        model_class, arguments = _get_classes(config)
        return model_class(arguments.from_dict(_decode_tagged_floats(config)))
    except Exception as error:  # what a model class raises over a setting can be anything
        raise UnsupportedError(f"mlx-lm cannot build it: {one_line(error)}") from error


# Bits, group size.
_UNIFORM = ((4, 64), (4, 32), (4, 128), (3, 64), (5, 64), (6, 64), (8, 64))
_USUAL = ((4, 64), (8, 64))  # mlx-lm's default, and what is called lossless
_GROUP = 64


def stock_recipes(model: LoadedModel, layout: Layout) -> tuple[StockRecipe, ...]:
    """Those of `mlx_lm.convert`: one number of bits for everything, or one of its mixtures. mlx-lm leaves a matrix as
    it is if groups do not divide its columns. Routers of experts are no candidates here and stay FP16; mlx-lm stores
    some in 8 bits."""
    candidates = model.anatomy.candidates
    recipes = [
        StockRecipe(
            f"{bits}bit" if group == _GROUP else f"{bits}bit-g{group}",
            {c.name: _held(c, bits, group) for c in candidates},
            f"mlx_lm.convert -q --q-bits {bits} --q-group-size {group} --dtype float16",
            usual=(bits, group) in _USUAL,
        )
        for bits, group in _UNIFORM
    ]
    from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

    names = {matrix.component: matrix.name for matrix in layout.matrices}
    if not any("down_proj" in name for name in names.values()):
        return tuple(recipes)  # mlx_lm.convert refuses its mixtures for such a model
    runtime = empty_model(layout.config)
    for name in QUANT_RECIPES:
        predicate: Any = mixed_quant_predicate_builder(name, runtime, _GROUP)
        mixed = {
            c.name: _held(c, predicate(names[c.name], None)["bits"], _GROUP)
            for c in candidates
        }
        origin = f"mlx_lm.convert -q --quant-predicate {name} --dtype float16"
        recipes.append(StockRecipe(name, mixed, origin))
    return tuple(recipes)


def _held(component: Component, bits: int, group: int) -> Recipe:
    recipe = Recipe(f"affine{bits}-g{group}")
    return FP16 if recipe.grid.fits(component.shape) else recipe


PARTS = ("weight", "scales", "biases")  # of a quantized matrix


def quantization(layout: Layout, chosen: dict[str, Choice]) -> dict[str, Any]:
    """The sections of config.json that mlx-lm reads: bits, group size and mode of every path."""
    paths = {}
    for matrix in layout.matrices:
        grid = chosen[matrix.component].recipe.grid
        if isinstance(grid, AffineFormat):
            paths[matrix.name] = {
                "group_size": grid.group_size,
                "bits": grid.bits,
                "mode": "affine",
            }
    if not paths:
        return {}
    usual, _ = Counter(json.dumps(section) for section in paths.values()).most_common(1)[
        0
    ]
    section = {**json.loads(usual), **paths}
    return {"quantization": section, "quantization_config": section}


def pieces(layout: Layout, chosen: dict[str, Choice], store: WeightStore) -> list[Piece]:
    """All that the file holds."""
    matrices = [_matrix(m, chosen[m.component], store) for m in layout.matrices]
    values = [
        floating(
            layout.sources[name] or name,
            name,
            value.shape,
            value.float,
            half=name not in layout.full_precision,
        )
        for name, value in layout.values.items()
    ]
    return [*matrices, *values]


def _matrix(matrix: Matrix, choice: Choice, store: WeightStore) -> Piece:
    name = matrix.name
    grid = choice.recipe.grid
    entries = [Entry(f"{name}.weight", "F16", matrix.shape)]
    if isinstance(grid, AffineFormat):
        assert grid.group_size is not None
        *outer, columns = matrix.shape
        groups = (*outer, columns // grid.group_size)
        entries = [
            Entry(f"{name}.weight", "U32", (*outer, columns * grid.bits // 32)),
            Entry(f"{name}.scales", "F16", groups),
            Entry(f"{name}.biases", "F16", groups),
        ]

    def make() -> tuple[list[npt.NDArray[Any]], str]:
        quantized = store.quantized(matrix.component, choice.recipe, matrix.factors)
        codes = replace(
            quantized, data=matrix.arranged(quantized.data), shape=matrix.shape
        )
        parts = (quantized.scales, quantized.zero_points)
        others = [
            matrix.arranged(part).cpu().numpy() for part in parts if part is not None
        ]
        unscaled = isinstance(matrix.factors, float) and matrix.factors == 1.0
        return [grid.pack(codes), *others], quantized.digest if unscaled else ""

    return Piece(matrix.component, tuple(entries), choice, choice.recipe, make)
