"""The original model's run over some windows. Keeps the states from which perturbed runs start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from kl_lens.measuring.metrics import Floats, TeacherRows
from kl_lens.measuring.products import FasterProducts
from kl_lens.model import BlockCalls, Chain, LoadedModel, States
from kl_lens.model.patching import patched

# Most bytes and rows of logits computed at once. Three hundred rows are enough for full speed; with a small vocabulary,
# more than a thousand no longer fit into the caches.
LOGIT_BYTES, LOGIT_ROWS = 64 << 20, 1024
# The same for a GPU, limited by its memory.
GPU_TIMES, GPU_LOGIT_ROWS = 8, 8192


def logit_rows(vocabulary: int, gpu_budget: int | None = None) -> int:
    """How many rows of logits to compute at once; on a GPU, a small part of its budget."""
    if gpu_budget is not None:
        return min(max(64, gpu_budget // 16 // (4 * vocabulary)), GPU_LOGIT_ROWS)
    return min(max(64, LOGIT_BYTES // (4 * vocabulary)), LOGIT_ROWS)


def batch_tokens(chain: Chain, budget: int) -> int:
    """Tokens per forward; on a GPU, so many that a block's tensors fit into a quarter of the budget."""
    usual = chain.task.rows_at_once
    if chain.device.type == "cpu":
        return usual
    layers = [m for block in chain.blocks for m in block.modules() if isinstance(m, torch.nn.Linear)]
    widest = max((max(m.in_features, m.out_features) for m in layers), default=1024)
    return max(usual // 8, min(GPU_TIMES * usual, budget // 4 // (10 * 4 * widest)), 1)


@dataclass
class Batch:
    """Some windows that run together, and the teacher's states on them."""

    windows: range  # indices into the ids that were given
    calls: BlockCalls
    targets: torch.Tensor  # (windows, time): the true classes, -1 where there is none
    inputs: list[States] = field(default_factory=list)  # of each block
    memos: list[BlockMemo | None] = field(default_factory=list)  # outputs of its parts, where memory sufficed
    states: torch.Tensor = field(init=False)  # (windows, time, width): the head's inputs
    kept: TeacherRows | None = None  # logits of all rows, when memory suffices
    cross_entropy: Floats = field(init=False)  # of each window, summed
    signal: Floats = field(init=False)  # Σ squared logits of each row
    counts: list[int] = field(init=False)  # rows of each window that have a true class

    @property
    def rows(self) -> int:
        return self.targets.numel()


class Teacher:
    """Runs the model once over `ids`, all windows through one block before the next. Keeps the head's inputs and,
    within a budget, block inputs, logits and the outputs of the blocks' parts."""

    def __init__(
        self,
        model: LoadedModel,
        ids: torch.Tensor,
        layout: FasterProducts,
        tokens: int,
        row_chunk: int,
        budget: int | None,
        remember_parts: bool = False,
    ) -> None:
        """`tokens` run together; `row_chunk` rows of logits are computed at once. `budget`: bytes for everything kept;
        what remains goes to outputs of the blocks' parts. None: for a model on disk, only the inputs of the first block
        and of the head are kept."""
        self.chain = chain = model.chain
        self._layout, self.row_chunk, self._keeps_inputs = layout, row_chunk, budget is not None
        vocabulary, width = model.anatomy.component(model.anatomy.head).shape
        kept = len(ids) * window_bytes(chain, ids.shape[1], width, vocabulary)
        self._memory_left = budget - kept if budget is not None and remember_parts else 0
        self._memo_row_bytes = 0.0  # of the last block that was recorded
        per_batch = max(1, tokens // ids.shape[1])
        self.batches = []
        for first in range(0, len(ids), per_batch):
            part = ids[first : first + per_batch]
            targets = chain.task.targets(part).to(chain.device)
            self.batches.append(Batch(range(first, first + len(part)), chain.calls(part), targets))
        states = [States(batch.calls.hidden) for batch in self.batches]
        self.row_bytes = 0  # most bytes per row between two blocks
        with self.running():
            for index, block in enumerate(chain.blocks):
                with model.present(block):
                    for number, batch in enumerate(self.batches):
                        states[number] = self._run_block(index, states[number], batch)
                        self.row_bytes = max(self.row_bytes, bytes_of(states[number]) // batch.rows)
            for batch in self.batches:
                batch.states = chain.finish(states.pop(0), batch.calls)
        with model.present(chain.head):
            for batch in self.batches:
                # Slabs are cut so that this holds, unless one window is too large; then logits are computed each time.
                if budget is not None and ids.numel() * vocabulary * 4 <= budget:
                    self._keep(batch)
                seen = [(t.cross_entropy.cpu().numpy(), t.signal) for _, t in self.rows(batch)]
                entropies, signals = map(np.concatenate, zip(*seen, strict=True))
                batch.cross_entropy = entropies.reshape(batch.targets.shape).sum(1)
                batch.signal, batch.counts = signals, (batch.targets >= 0).sum(1).tolist()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, blocks and head use our kernels and faster products."""
        with self.chain.kernels(), self._layout.active():
            yield

    def _run_block(self, index: int, states: States, batch: Batch) -> States:
        """The block's output; notes its input and, while memory lasts, the outputs of its parts."""
        if self._keeps_inputs:
            batch.inputs.append(states)
        memo = None
        if self._memory_left > self._memo_row_bytes * batch.rows:
            memo = BlockMemo(self.chain.blocks[index])
        with memo.recording() if memo else nullcontext():
            output = self.chain.run(states, batch.calls, index, index + 1)
        if memo is not None:
            size = memo.bytes
            self._memo_row_bytes = size / batch.rows
            if size > self._memory_left:
                memo = None
            else:
                self._memory_left -= size
        batch.memos.append(memo)
        return output

    def _keep(self, batch: Batch) -> None:
        """Allocates one tensor for the logits first: joining parts would need twice the memory."""
        first = self._rows_of(batch, next(self._chunks(batch)))
        logits = first.logits.new_empty(batch.rows, first.logits.shape[1])
        lse, top = first.lse.new_empty(batch.rows), first.top.new_empty(batch.rows)
        for rows in self._chunks(batch):
            part = first if rows.start == 0 else self._rows_of(batch, rows)
            logits[rows], lse[rows], top[rows] = part.logits, part.lse, part.top
        batch.kept = TeacherRows(logits, lse, top, batch.targets.flatten())

    def _chunks(self, batch: Batch) -> Iterator[slice]:
        for first in range(0, batch.rows, self.row_chunk):
            yield slice(first, min(first + self.row_chunk, batch.rows))

    def _rows_of(self, batch: Batch, rows: slice) -> TeacherRows:
        if batch.kept is not None:
            return batch.kept.some(rows)
        with self.running():
            logits = self.chain.logits(batch.states.flatten(0, 1)[rows])
        return TeacherRows.of(logits, batch.targets.flatten()[rows])

    def rows(self, batch: Batch) -> Iterator[tuple[slice, TeacherRows]]:
        """The teacher's logits, a chunk of rows at a time."""
        for rows in self._chunks(batch):
            yield rows, self._rows_of(batch, rows)


def window_bytes(chain: Chain, time: int, width: int, vocabulary: int) -> int:
    """Bytes of one window's block inputs, final states and logits."""
    return time * (chain.state_size + 2 * width + vocabulary) * 4


# Immutable arguments: a call cannot return anything through them.
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device)

Wrapper = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class _Call:
    """One call of a part: its flattened arguments, their structure, and what it returned."""

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    output: Any

    def matches(self, leaves: list[Any], structure: pytree.TreeSpec, by_value: bool) -> bool:
        pairs = zip(self.leaves, leaves, strict=True)
        return structure == self.structure and all(_same(*pair, by_value=by_value) for pair in pairs)


def _same(recorded: Any, given: Any, *, by_value: bool = True) -> bool:
    if recorded is given or type(recorded) is not type(given):
        return recorded is given
    if not isinstance(recorded, torch.Tensor):
        return bool(recorded == given)
    return by_value and recorded.dtype == given.dtype and torch.equal(recorded, given)


def _is_plain(tree: Any) -> bool:
    """Only tensors and plain values: no cache or other object that a call could change as a side effect."""
    return all(isinstance(leaf, (torch.Tensor, *_VALUES)) for leaf in pytree.tree_leaves(tree))


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class BlockMemo:
    """The recorded calls of one block's parts on one batch, so that a perturbed block runs only what differs.

    A candidate changes one weight. Parts of its block that come before it, or beside it (the attention next to a
    state-space mixer), get the teacher's inputs and give the teacher's outputs. No table says which parts those are: a
    part without a perturbed weight that is called with exactly the recorded inputs returns the recorded output; any
    other call runs. On a GPU inputs count as equal only if they are the same tensor: comparing values would make the
    host wait.
    """

    def __init__(self, block: nn.Module) -> None:
        self._by_value = all(parameter.device.type == "cpu" for parameter in block.parameters())
        # Parts worth remembering hold a matrix; norms and activations are cheaper than comparing their inputs. Where
        # inputs are compared by identity, norms are recorded too: parts behind them must get the same tensor again.
        least = 2 if self._by_value else 1
        self._parts = {
            name: part
            for name, part in block.named_modules()
            if name and any(parameter.dim() >= least for parameter in part.parameters())
        }
        self._calls: dict[str, list[_Call]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the recorded tensors."""
        storages = {}
        for calls in self._calls.values():
            for leaf in pytree.tree_leaves([(call.leaves, call.output) for call in calls]):
                if isinstance(leaf, torch.Tensor):
                    storage = leaf.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the calls within, except those whose inputs or outputs were changed in place before the end."""
        seen: list[tuple[str, _Call, list[Any]]] = []

        def record(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                leaves, structure = pytree.tree_flatten((args, kwargs))
                before = [_copied(leaf) for leaf in leaves]
                output = forward(*args, **kwargs)
                left, shape = pytree.tree_flatten((args, kwargs))
                # A call that also fills a dictionary argument has a side effect: it must run again.
                untouched = shape == structure and all(a is b for a, b in zip(leaves, left, strict=True))
                if untouched and _is_plain(leaves) and _is_plain(output):
                    after = [_copied(leaf) for leaf in pytree.tree_leaves(output)]
                    seen.append((name, _Call(tuple(leaves), structure, output), before + after))
                return output

            return run

        with _wrapped(self._parts, record):
            yield
        for name, call, copies in seen:
            now = [*call.leaves, *pytree.tree_leaves(call.output)]
            if all(map(_same, copies, now)):
                self._calls.setdefault(name, []).append(call)

    @contextmanager
    def replaying(self, perturbed: set[int]) -> Iterator[None]:
        """Within, parts without a perturbed parameter (given by id) return recorded outputs for recorded calls."""
        clean = {
            name: self._parts[name]
            for name in self._calls
            if not any(id(parameter) in perturbed for parameter in self._parts[name].parameters())
        }

        def replay(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                leaves, structure = pytree.tree_flatten((args, kwargs))
                for call in self._calls[name]:
                    if call.matches(leaves, structure, self._by_value):
                        return call.output
                return forward(*args, **kwargs)

            return run

        with _wrapped(clean, replay):
            yield


def _wrapped(parts: dict[str, nn.Module], wrap: Wrapper) -> AbstractContextManager[None]:
    """Wraps the parts' current `forward` (ours or the library's)."""
    return patched((part, wrap(name, part.forward)) for name, part in parts.items())


def bytes_of(states: States) -> int:
    leaves = pytree.tree_leaves((states.hidden, dict(states.carried)))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
