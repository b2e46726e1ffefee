"""The original model's run over some windows. Keeps the states from which perturbed runs start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kl_lens.measuring.metrics import Floats, TeacherRows
from kl_lens.measuring.products import TensorCores
from kl_lens.model import BlockCalls, Chain, LoadedModel, States

# Most bytes and rows of logits computed at once. Three hundred rows are enough for full speed; with a small vocabulary,
# more than a thousand no longer fit into the caches.
LOGIT_BYTES = 64 << 20
LOGIT_ROWS = 1024
# The same for a GPU, limited by its memory.
GPU_TIMES = 8
GPU_LOGIT_ROWS = 8192


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
    layers = [
        m
        for block in chain.blocks
        for m in block.modules()
        if isinstance(m, torch.nn.Linear)
    ]
    widest = max((max(m.in_features, m.out_features) for m in layers), default=1024)
    return max(usual // 8, min(GPU_TIMES * usual, budget // 4 // (10 * 4 * widest)), 1)


@dataclass
class Batch:
    """Some windows that run together, and the teacher's states on them."""

    windows: range  # indices into the ids that were given
    calls: BlockCalls
    targets: Tensor  # (windows, time): as `Task.targets` gives them
    answers: Tensor  # the same, on the host
    inputs: list[States] = field(default_factory=list)  # of each block
    states: Tensor = field(init=False)  # (windows, time, width): the head's inputs
    stored_rows: TeacherRows | None = None  # logits of all rows, when memory suffices
    cross_entropy: Floats = field(init=False)  # of each window, summed
    signal: Floats = field(init=False)  # Σ squared logits of each row

    @property
    def rows(self) -> int:
        return self.targets.numel()


class Teacher:
    """Runs the model once over `ids`, all windows through one block before the next. Keeps the head's inputs and,
    within a budget, block inputs and logits."""

    def __init__(
        self,
        model: LoadedModel,
        ids: Tensor,
        products: TensorCores,
        tokens: int,
        row_chunk: int,
        budget: int | None,
    ) -> None:
        """`tokens` run together; `row_chunk` rows of logits are computed at once. `budget`: bytes for everything kept;
        None: for a model on disk, only the inputs of the first block and of the head are kept."""
        self.chain = chain = model.chain
        self._products = products
        self.row_chunk = row_chunk
        vocabulary = model.anatomy.component(model.anatomy.head).shape[0]
        self.batches = []
        first = 0
        for part in ids.split(max(1, tokens // ids.shape[1])):
            answers = chain.task.targets(part).cpu()
            targets = answers.to(chain.device)
            windows = range(first, first + len(part))
            first = windows.stop
            self.batches.append(Batch(windows, chain.calls(part), targets, answers))
        states = [States(batch.calls.hidden) for batch in self.batches]
        self.row_bytes = 0  # most bytes per row between two blocks
        with self.running():
            for index, block in enumerate(chain.blocks):
                with model.present(block):
                    for number, batch in enumerate(self.batches):
                        if budget is not None:
                            batch.inputs.append(states[number])
                        left = chain.run(states[number], batch.calls, index, index + 1)
                        states[number] = left
                        size = bytes_of(left) // batch.rows
                        self.row_bytes = max(self.row_bytes, size)
            for batch in self.batches:
                batch.states = chain.finish(states.pop(0), batch.calls)
        with model.present(chain.head):
            for batch in self.batches:
                # Slabs are cut so that this holds, unless one window is too large; then logits are computed each time.
                if budget is not None and ids.numel() * vocabulary * 4 <= budget:
                    self._keep(batch)
                chunks = [
                    (t.cross_entropy.cpu().numpy(), t.signal) for _, t in self.rows(batch)
                ]
                entropies, signals = map(np.concatenate, zip(*chunks, strict=True))
                batch.cross_entropy = entropies.reshape(batch.targets.shape).sum(1)
                batch.signal = signals

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, blocks and head use our kernels and faster products."""
        with self.chain.kernels(), self._products.active():
            yield

    def _keep(self, batch: Batch) -> None:
        """Allocates one tensor for the logits first: joining parts would need twice the memory."""
        stored: TeacherRows | None = None
        for rows, part in self.rows(batch):
            if stored is None:
                logits = part.logits.new_empty(batch.rows, part.logits.shape[1])
                sums = part.lse.new_empty(batch.rows)
                top = part.top.new_empty(batch.rows)
                stored = TeacherRows(logits, sums, top, batch.targets.flatten())
            stored.logits[rows] = part.logits
            stored.lse[rows] = part.lse
            stored.top[rows] = part.top
        batch.stored_rows = stored

    def rows(self, batch: Batch) -> Iterator[tuple[slice, TeacherRows]]:
        """The teacher's logits, a chunk of rows at a time."""
        for first in range(0, batch.rows, self.row_chunk):
            rows = slice(first, min(first + self.row_chunk, batch.rows))
            if batch.stored_rows is not None:
                yield rows, batch.stored_rows.some(rows)
                continue
            with self.running():
                logits = self.chain.logits(batch.states.flatten(0, 1)[rows])
            yield rows, TeacherRows.of(logits, batch.targets.flatten()[rows])


def window_bytes(chain: Chain, time: int, width: int, vocabulary: int) -> int:
    """Bytes of one window's block inputs, final states and logits."""
    return time * (chain.state_size + 2 * width + vocabulary) * 4


def bytes_of(states: States) -> int:
    leaves = pytree.tree_leaves((states.hidden, dict(states.carried)))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
