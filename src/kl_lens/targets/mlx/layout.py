"""Where every weight goes in mlx-lm's model, found by asking mlx-lm: its `sanitize` turns a checkpoint's tensors into
its own parameters. It renames, moves axes, stacks experts, splits matrices, multiplies by constants.

Numbers in place of weights show what it does to each: numbered components tell which one a parameter comes from,
numbered rows which of its rows, ones which factors. Then the real weights go the same way, and every parameter is
compared with what was found, bit for bit. Last, the model made of them runs on a few tokens, whole and one by one; if
its logits are not those of PyTorch, mlx-lm computes another function and the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.errors import UnsupportedError, one_line
from kl_lens.targets.mlx.configuration import configuration_of, empty_model

if TYPE_CHECKING:
    from kl_lens.checkpoints import LoadedModel

_TOKENS, _WHOLE = 24, 16  # of the comparison; the first are fed at once
MOST_KL = 1e-3  # nats per token between PyTorch and mlx-lm in float32; rounding gives 1e-8
_Tensors = dict[str, torch.Tensor]


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
    difference: float  # of mlx-lm's logits from PyTorch's in float32: the largest, as a share of their range


def layout_of(model: LoadedModel) -> Layout:
    """Raises UnsupportedError, with the reason, if mlx-lm cannot run the model as PyTorch does."""
    from mlx.utils import tree_flatten

    model.require_memory("exporting to MLX")
    config = configuration_of(model)
    runtime = empty_model(config)
    wanted: dict[str, Any] = dict(tree_flatten(runtime.parameters()))
    state: _Tensors = {name: tensor.detach().cpu() for name, tensor in model.model.state_dict().items()}
    modules = dict(runtime.named_modules())
    numbers, components = _numbered(model)

    def probe(value: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, npt.NDArray[np.float32]]:
        # Two columns of every matrix are enough; a single one could be taken for none.
        narrow = {n: t[..., :2] if t.dim() > 1 and n in matrices else t for n, t in state.items()}
        tensors = {name: value(name, tensor).float().expand(tensor.shape) for name, tensor in narrow.items()}
        return {name: np.array(array) for name, array in _sanitized(model, runtime, tensors, config).items()}

    candidates = {c.name: c for c in model.anatomy.candidates}
    matrices = {name for name, number in numbers.items() if components[number - 1] in candidates}
    zeros = probe(lambda *_: torch.zeros(()))
    if missing := sorted(set(wanted) - set(zeros)):
        raise UnsupportedError(
            f"mlx-lm's {config['model_type']} wants {missing[0]}, which this checkpoint does not have"
        )
    factors = {name: array - zeros[name] for name, array in probe(lambda *_: torch.ones(())).items()}

    def found(value: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, npt.NDArray[np.int64]]:
        probed = probe(value)
        return {
            name: np.rint((probed[name] - zeros[name]) / factors[name]).astype(np.int64) for name in wanted
        }

    sources = found(lambda name, _: torch.tensor(numbers.get(name, 0)))
    rows = found(lambda name, t: _row_numbers(t) if name in matrices else torch.zeros(()))
    real = _sanitized(model, runtime, {name: tensor.float() for name, tensor in state.items()}, config)
    placed: list[Matrix] = []
    others: dict[str, str] = {}
    for name, parameter in wanted.items():
        shape, given = tuple(parameter.shape), tuple(real[name].shape)
        if shape != given:
            raise UnsupportedError(f"mlx-lm expects {name} of shape {shape}, the checkpoint gives {given}")
        source = sources[name]
        number = int(source.flat[0])
        component = components[number - 1] if number else ""
        holder = modules.get(name.removesuffix(".weight"))
        if component not in candidates or (source != number).any() or not hasattr(holder, "to_quantized"):
            others[name] = component
            continue
        matrix = Matrix(
            name.removesuffix(".weight"),
            component,
            shape,
            torch.from_numpy(rows[name][..., 0].reshape(-1)),
            _factors(
                factors[name][..., 0].reshape(-1), rows[name][..., 0].reshape(-1), candidates[component].shape
            ),
        )
        weight = model.tensor(candidates[component].weight).detach().cpu().float() * matrix.factors
        if not torch.equal(matrix.arranged(weight), torch.from_numpy(np.array(real[name]))):
            raise UnsupportedError(f"mlx-lm changes {component} in a way that KL Lens does not follow")
        placed.append(matrix)
    if lost := sorted(set(candidates) - {matrix.component for matrix in placed}):
        raise UnsupportedError(
            f"mlx-lm's {config['model_type']} cannot quantize {lost[0]}: it has no matrix of just that weight"
        )
    difference = _compared(model, runtime, {name: real[name] for name in wanted})
    casts = getattr(runtime, "cast_predicate", lambda _: True)
    values = {name: np.array(real[name]) for name in others}
    kept = frozenset(name for name in others if not casts(name))
    return Layout(config, tuple(placed), values, others, kept, difference)


def _numbered(model: LoadedModel) -> tuple[dict[str, int], list[str]]:
    """Every parameter's component as a number, from 1; and the components."""
    components = model.anatomy.components
    of_object = {
        id(p): number for number, c in enumerate(components, start=1) for p in model.parameters_of(c)
    }
    parameters = model.model.named_parameters(remove_duplicate=False)
    return {name: of_object[id(p)] for name, p in parameters}, [component.name for component in components]


def _row_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(tensor[..., 0].numel(), dtype=torch.float32).reshape(*tensor.shape[:-1], 1)


def _factors(
    factors: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], shape: tuple[int, ...]
) -> float | torch.Tensor:
    if (factors == factors[0]).all():
        return float(factors[0])
    by_row = torch.ones(int(np.prod(shape[:-1])))
    by_row[torch.from_numpy(rows)] = torch.from_numpy(factors)
    return by_row.reshape(*shape[:-1], 1)


def _sanitized(model: LoadedModel, runtime: Any, tensors: _Tensors, config: dict[str, Any]) -> dict[str, Any]:
    """Tensors under transformers' names as mlx-lm's parameters."""
    import mlx.core as mx
    from transformers.core_model_loading import revert_weight_conversion

    whole: Any = model.model
    stored = revert_weight_conversion(whole, tensors)  # names and shapes as in checkpoints
    arrays = {name: mx.array(tensor.contiguous().numpy()) for name, tensor in stored.items()}
    try:
        return dict(runtime.sanitize(arrays)) if hasattr(runtime, "sanitize") else arrays
    except Exception as error:  # written for one family's checkpoints; over others it raises anything
        raise UnsupportedError(
            f"mlx-lm cannot take over this {config['model_type']} checkpoint: {type(error).__name__} {one_line(error)}"
        ) from error


def _compared(model: LoadedModel, runtime: Any, weights: dict[str, Any]) -> float:
    """The difference of logits; raises if mlx-lm computes another function."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    vocabulary = int(model.config.vocab_size)
    ids = np.random.default_rng(0).integers(0, vocabulary, _TOKENS)
    with torch.no_grad():
        ours = model.chain.full_logits(torch.from_numpy(ids)[None])[0].float().cpu()
    with mx.stream(mx.cpu):
        runtime.load_weights(list(weights.items()))
        runtime.eval()
        cache = make_prompt_cache(runtime)
        pieces = [ids[:_WHOLE], *ids[_WHOLE:, None]]
        logits = [np.array(runtime(mx.array(piece)[None], cache=cache)[0]) for piece in pieces]
    theirs = torch.from_numpy(np.concatenate(logits))
    expected, found = ours.log_softmax(-1), theirs.log_softmax(-1)
    divergence = float((expected.exp() * (expected - found)).sum(-1).mean())
    if not divergence <= MOST_KL:
        raise UnsupportedError(
            f"mlx-lm computes something else than PyTorch for this {model.anatomy.model_type} model "
            f"(KL {divergence:.2g} nats per token with the original weights); use another target"
        )
    return float((ours - theirs).abs().max() / (ours.max() - ours.min()))
