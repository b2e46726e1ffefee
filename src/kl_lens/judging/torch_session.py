"""A checkpoint in PyTorch as a `Session`, with quantized weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kl_lens.measuring.engines import ranges
from kl_lens.measuring.metrics import compared_metrics
from kl_lens.measuring.perturbation import (
    Kernels,
    Perturbation,
    applied,
    applied_by_block,
    cached_states,
    replacements,
)
from kl_lens.measuring.products import FLOAT32, TensorCores, precision_for
from kl_lens.measuring.teacher import logit_rows
from kl_lens.model import LoadedModel
from kl_lens.targets.session import Logits, Session, checked_tokens
from kl_lens.weights.recipes import FP16, Recipe


class TorchSession(Session):
    """Several sessions may share one opened model: the weights are replaced only during a call.

    Every call runs the whole sequence: transformers restarts the scan of Mamba-1 and Jamba when several tokens follow a
    cache, so its cache is not used.

    Args:
        deployed: compute with weights and activations as this runtime's kernels see them.
        memory_budget: of which a quarter is for outputs. The teacher sees the same windows once per student: it keeps
            the logits of the first ones, and the final states of others, for which only the head runs again.
        values: parameters or buffers by name, in place of what the recipes make of the weights.
        caches: keys and values → the formats they are kept in.
    """

    def __init__(
        self,
        model: LoadedModel,
        recipes: Mapping[str, Recipe] | None = None,
        *,
        deployed: Kernels | None = None,
        memory_budget: int = 0,
        values: Mapping[str, torch.Tensor] | None = None,
        caches: Mapping[str, str] | None = None,
    ) -> None:
        model.chain.uses_kernels()  # before anything is perturbed
        model.chain.distrust(compared_metrics("cpu"))
        self._model = model
        self._recipes = dict(recipes or {})
        self._deployed = deployed
        # A component that its recipe does not change (FP16 of an FP16 checkpoint) needs no copy.
        # With the model on disk, weights are made block by block.
        if values is None:
            at_once = Perturbation(self._recipes if model.residency is None else {})
            self._weights = [
                (parameter, weight)
                for parameter, weight in replacements(model, at_once)
                if not torch.equal(parameter.data, weight)
            ]
        else:
            named: dict[str, Any] = dict(model.model.named_buffers())
            named |= dict(model.model.named_parameters(remove_duplicate=False))
            self._weights = [
                (named[name], value.to(named[name]))
                for name, value in values.items()
                if name in named
            ]
        rounded = {kind: name for kind, name in (caches or {}).items() if name != FP16}
        self._caches = cached_states(model, rounded)
        # The same precision as the sweep on a GPU; as deployed, float32.
        self.precision = FLOAT32 if deployed is not None else precision_for(None, model)
        self._products = TensorCores(
            [*model.chain.blocks, model.chain.head], self.precision
        )
        self.vocabulary = int(model.anatomy.component(model.anatomy.head).shape[0])
        self._fed: list[int] = []
        self._remembers = memory_budget > 0
        self._states = _Outputs(memory_budget // 8)
        self._logits = _Outputs(memory_budget // 8)

    @property
    def description(self) -> dict[str, Any]:
        parameter = next(self._model.model.parameters())
        fault = self._model.chain.fault
        as_measured = self._deployed is None
        return {
            "library": "torch",
            "version": torch.__version__,
            "device": str(parameter.device),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            **({} if self.precision == FLOAT32 else {"products": self.precision}),
            **({"kernels": fault} if fault else {}),
            "activations": "as measured" if as_measured else "rounded as in the runtime",
        }

    def reset(self) -> None:
        self._fed = []

    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        if every:  # from the start
            self._fed = list(tokens)
            return self._all_logits(tokens)
        fed = [*self._fed, *tokens]
        with self._applied():
            logits = self._model.chain.logits(self._final_states(fed)[-1:])
        self._fed = fed
        return logits.float().cpu().numpy()

    def _all_logits(self, tokens: list[int]) -> Logits:
        chain = self._model.chain
        key = tuple(tokens)
        if key in self._logits:
            return self._logits[key]
        chunk = logit_rows(self.vocabulary)
        with self._applied():
            if len(tokens) <= chunk and not self._remembers:
                # Tasks: one plain forward is faster.
                return _on_host(chain.full_logits(torch.tensor([tokens]))[0])
            states = self._final_states(tokens)
            rows = np.empty((len(tokens), self.vocabulary), np.float32)
            for part in ranges(len(tokens), chunk):
                logits = chain.logits(states[part.start : part.stop])
                rows[part.start : part.stop] = _on_host(logits)
        self._logits.keep(key, rows)
        return rows

    def close(self) -> None:
        self._weights = []
        self._states.clear()
        self._logits.clear()

    def _checked(self, ids: Sequence[int]) -> list[int]:
        # Images have any id.
        limit = self.vocabulary if self._model.task.generates else 2**63
        return checked_tokens(ids, limit, self._model.name)

    @contextmanager
    def _applied(self) -> Iterator[None]:
        if self._model.residency is None:
            plan = Perturbation(self._recipes, self._caches)
            weights = applied(self._model, plan, self._weights, self._deployed)
        else:
            weights = applied_by_block(self._model, self._recipes, self._deployed)
        with weights, self._products.active():
            yield

    def _final_states(self, tokens: Sequence[int]) -> torch.Tensor:
        """The inputs of the head, (tokens, width)."""
        key = tuple(tokens)
        if key in self._states:
            return self._states[key]
        states = self._model.chain.final_states(torch.tensor([key]))[0]
        self._states.keep(key, states.clone())
        return states


class _Outputs(dict[tuple[int, ...], Any]):
    """Of the tokens that were fed, as many as fit."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room  # bytes that are left

    def keep(self, tokens: tuple[int, ...], output: Any) -> None:
        if output.nbytes <= self._room:
            self._room -= output.nbytes
            self[tokens] = output


def _on_host(logits: torch.Tensor) -> Logits:
    return logits.float().cpu().numpy()
