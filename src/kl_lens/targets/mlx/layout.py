"""Where every weight goes in mlx-lm's model, found by asking mlx-lm: its `sanitize` turns a checkpoint's tensors into
its own parameters. It renames, moves axes, stacks experts, splits matrices, multiplies by constants.

Numbers in place of weights show what it does to each: numbered components tell which one a parameter comes from,
numbered rows which of its rows, ones which factors. Then the real weights go the same way, and every parameter is
compared with what was found, bit for bit. Last, the model made of them runs on a few tokens, whole and one by one; if
its logits are not those of PyTorch, mlx-lm computes another function and the model is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.base.errors import UnsupportedError, one_line
from kl_lens.targets.mlx.configuration import configuration_of, empty_model

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

_TOKENS, _WHOLE = 24, 16  # of the comparison; the first are fed at once
MOST_KL = 1e-3  # nats per token between PyTorch and mlx-lm in float32; rounding gives 1e-8
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
    rows: torch.Tensor  # of the component, experts one below the other
    factors: float | torch.Tensor  # that the component's rows are multiplied with: a number, or (…, rows, 1)

    def arranged(self, part: torch.Tensor) -> torch.Tensor:
        """Something of the component's with one row per row, in this parameter's order and shape."""
        return part.reshape(-1, part.shape[-1])[self.rows].reshape(*self.shape[:-1], -1)


@dataclass(frozen=True, eq=False)
class Layout:
    """mlx-lm's parameters of one model."""

    config: dict[str, Any]
    matrices: tuple[Matrix, ...]
    values: dict[str, npt.NDArray[np.float32]]  # parameters outside plans: norms, convolutions, biases
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


def _layout(model: LoadedModel, config: dict[str, Any], forgotten: dict[str, float]) -> Layout:
    runtime = empty_model(config)
    candidates = {c.name: c for c in model.anatomy.candidates}
    ways = _Ways(model, runtime, forgotten)
    modules = dict(runtime.named_modules())
    matrices: list[Matrix] = []
    others: dict[str, str] = {}
    for name, component in ways.sources.items():
        path = name.removesuffix(".weight")
        if component not in candidates or not hasattr(modules.get(path), "to_quantized"):
            others[name] = component
            continue
        rows, factors = ways.rows(name), ways.factors(name)
        shape = candidates[component].shape
        matrix = Matrix(path, component, ways.shapes[name], rows, _by_row(factors, rows, shape))
        weight = model.tensor(candidates[component].weight).detach().cpu().float() * matrix.factors
        if not torch.equal(matrix.arranged(weight), torch.from_numpy(np.array(ways.real[name]))):
            raise UnsupportedError(f"mlx-lm changes {component} in a way that KL Lens does not follow")
        matrices.append(matrix)
    if lost := sorted(set(candidates) - {matrix.component for matrix in matrices}):
        raise UnsupportedError(f"mlx-lm's {config['model_type']} has no matrix of just {lost[0]} to quantize")
    _compare(model, runtime, ways.real)
    casts = getattr(runtime, "cast_predicate", lambda _: True)
    values = {name: np.array(ways.real[name]) for name in others}
    kept = frozenset(name for name in others if not casts(name))
    return Layout(config, tuple(matrices), values, others, kept)


def _by_row(factors: torch.Tensor, rows: torch.Tensor, shape: tuple[int, ...]) -> float | torch.Tensor:
    """The factors of a parameter's rows as those of its component's rows."""
    if bool((factors == factors[0]).all()):
        return float(factors[0])
    every = torch.ones(math.prod(shape[:-1]))
    every[rows] = factors
    return every.reshape(*shape[:-1], 1)


class _Ways:
    """What becomes of a model's tensors in mlx-lm."""

    def __init__(self, model: LoadedModel, runtime: Any, forgotten: dict[str, float]) -> None:
        from mlx.utils import tree_flatten

        self._model, self._runtime, self._forgotten = model, runtime, forgotten
        self._state = {name: tensor.detach().cpu() for name, tensor in model.model.state_dict().items()}
        parameters: Any = tree_flatten(runtime.parameters())
        self.shapes = {name: tuple(array.shape) for name, array in parameters}
        components = model.anatomy.components
        named = model.model.named_parameters(remove_duplicate=False)
        numbers = {id(p): n for n, c in enumerate(components, start=1) for p in model.parameters_of(c)}
        self._numbers = {name: numbers[id(parameter)] for name, parameter in named}  # from 1
        self._matrices = {name for name, n in self._numbers.items() if components[n - 1].quantizable}
        self._zeros = self._probed(lambda *_: torch.zeros(()))
        self._ones = self._probed(lambda *_: torch.ones(()))
        self.real = self._sanitized({name: t.float() for name, t in self._state.items()})
        for name, shape in self.shapes.items():
            if (given := tuple(self.real[name].shape)) != shape:
                raise UnsupportedError(f"mlx-lm expects {name} of shape {shape}, not {given}")
        self.sources: dict[str, str] = {}  # parameter → its component; empty: none, or several
        for name, found in self._found(lambda name, _: torch.tensor(self._numbers.get(name, 0))).items():
            one = found.flat[0] and np.ptp(found) == 0
            self.sources[name] = components[int(found.flat[0]) - 1].name if one else ""
        self._rows = self._found(
            lambda name, tensor: _row_numbers(tensor) if name in self._matrices else torch.zeros(())
        )

    def rows(self, name: str) -> torch.Tensor:
        """The rows of its component that a parameter consists of, in order."""
        return torch.from_numpy(self._rows[name][..., 0].reshape(-1))

    def factors(self, name: str) -> torch.Tensor:
        """What these rows are multiplied with."""
        return torch.from_numpy((self._ones[name] - self._zeros[name])[..., 0].reshape(-1))

    def _found(self, value: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, npt.NDArray[np.int64]]:
        """The whole numbers that each parameter's elements had before mlx-lm multiplied and added."""
        probed, zeros, ones = self._probed(value), self._zeros, self._ones
        return {
            name: np.rint((probed[name] - zeros[name]) / (ones[name] - zeros[name])).astype(np.int64)
            for name in self.shapes
        }

    def _probed(
        self, value: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> dict[str, npt.NDArray[np.float32]]:
        # Of matrices two columns are enough; a single one could be taken for none.
        tensors = {}
        for name, tensor in self._state.items():
            part = tensor[..., :2] if name in self._matrices else tensor
            tensors[name] = value(name, part).float().expand(part.shape)
        return {name: np.array(array) for name, array in self._sanitized(tensors).items()}

    def _sanitized(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Tensors under transformers' names as mlx-lm's parameters."""
        import mlx.core as mx
        from transformers.core_model_loading import revert_weight_conversion

        whole: Any = self._model.model
        stored = revert_weight_conversion(whole, tensors)  # names and shapes as in checkpoints
        arrays = {name: mx.array(tensor.contiguous().numpy()) for name, tensor in stored.items()}
        family = self._model.anatomy.model_type
        try:
            arrays = self._runtime.sanitize(arrays) if hasattr(self._runtime, "sanitize") else arrays
        except Exception as error:  # written for one family's checkpoints; over others it raises anything
            reason = f"{type(error).__name__} {one_line(error)}"
            raise UnsupportedError(f"mlx-lm cannot take over this {family} checkpoint: {reason}") from error
        if missing := sorted(set(self.shapes) - set(arrays)):
            raise UnsupportedError(
                f"mlx-lm's {family} wants {missing[0]}, which this checkpoint does not have"
            )
        for name, (end, factor) in itertools.product(self.shapes, self._forgotten.items()):
            if name.endswith(end):
                arrays[name] *= factor
        return {name: arrays[name] for name in self.shapes}


def _row_numbers(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.shape[:-1]
    return torch.arange(math.prod(rows), dtype=torch.float32).reshape(*rows, 1)


def _compare(model: LoadedModel, runtime: Any, weights: dict[str, Any]) -> None:
    """Raises if mlx-lm computes another function."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    vocabulary = int(model.config.vocab_size)
    ids = np.random.default_rng(0).integers(0, vocabulary, _TOKENS)
    with torch.no_grad():
        ours = model.chain.full_logits(torch.from_numpy(ids)[None])[0].float().cpu()
    pieces = [ids[:_WHOLE], *ids[_WHOLE:, None]]
    try:
        with mx.stream(mx.cpu):
            runtime.load_weights(list(weights.items()))
            runtime.eval()
            cache = make_prompt_cache(runtime)
            logits = [np.array(runtime(mx.array(piece)[None], cache=cache)[0]) for piece in pieces]
    except Exception as error:  # a model class may raise anything over settings that it was not written for
        reason = f"{type(error).__name__} {one_line(error)}"
        raise UnsupportedError(
            f"mlx-lm cannot run this {model.anatomy.model_type} model: {reason}"
        ) from error
    theirs = torch.from_numpy(np.concatenate(logits))
    expected, found = ours.log_softmax(-1), theirs.log_softmax(-1)
    divergence = float((expected.exp() * (expected - found)).sum(-1).mean())
    if not divergence <= MOST_KL:
        raise UnsupportedError(
            f"mlx-lm computes something else than PyTorch for this {model.anatomy.model_type} model "
            f"(KL {divergence:.2g} nats per token with the original weights); use another target"
        )
