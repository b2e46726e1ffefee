"""The original model's run over some windows. Keeps the states from which perturbed runs start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kl_lens.measuring.input_major import InputMajor
from kl_lens.measuring.memo import BlockMemo
from kl_lens.measuring.metrics import Floats, TeacherRows
from kl_lens.measuring.precision import TensorCores
from kl_lens.model import BlockCalls, Chain, States

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
    inputs: list[States]  # of each block
    memos: list[BlockMemo | None]  # outputs of each block's parts, where memory sufficed
    states: torch.Tensor  # (windows, time, width): the head's inputs
    targets: torch.Tensor  # (windows, time): the true classes, -1 where there is none
    logits: torch.Tensor | None = None  # (windows · time, vocabulary), kept when memory suffices
    lse: torch.Tensor | None = None
    top: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.targets.numel()


class Teacher:
    """Runs the model once over `ids` and keeps block inputs, final states and, within the budget, logits and the
    outputs of the blocks' parts."""

    def __init__(
        self,
        chain: Chain,
        ids: torch.Tensor,
        *,
        budget: int,
        vocabulary: int,
        layout: InputMajor | TensorCores,
        remember_parts: bool,
        tokens: int,
    ) -> None:
        """`budget`: bytes for everything kept; what remains goes to outputs of the blocks' parts. `tokens`: how many
        run together."""
        self.chain = chain
        self._layout = layout
        self.row_chunk = logit_rows(vocabulary, None if chain.device.type == "cpu" else budget)
        per_batch = max(1, tokens // ids.shape[1])
        # Slabs are cut so that this holds, unless one window alone is too large; then logits are computed each time.
        self.keep_logits = ids.numel() * vocabulary * 4 <= budget
        width = int(chain.head.weight.shape[1])  # type: ignore[index]
        kept = len(ids) * window_bytes(chain, ids.shape[1], width, vocabulary)
        self._memory_left = budget - kept if remember_parts else 0
        self._memo_row_bytes = 0.0  # of the last block that was recorded
        self.batches: list[Batch] = []
        for first in range(0, len(ids), per_batch):
            self.batches.append(self._run(ids, range(first, min(first + per_batch, len(ids)))))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, blocks and head use our kernels and faster products."""
        with self.chain.kernels(), self._layout.active():
            yield

    def _run(self, ids: torch.Tensor, windows: range) -> Batch:
        part = ids[windows.start : windows.stop]
        calls = self.chain.calls(part)
        inputs: list[States] = []
        memos: list[BlockMemo | None] = []
        entering = States(calls.hidden)
        with self.running():
            for index in range(len(self.chain)):
                inputs.append(entering)
                entering, memo = self._run_block(index, entering, calls)
                memos.append(memo)
            states = self.chain.finish(entering, calls)
        targets = self.chain.task.targets(part).to(states.device)
        batch = Batch(windows, calls, inputs, memos, states, targets)
        if self.keep_logits:
            self._keep(batch)
        return batch

    def _run_block(self, index: int, states: States, calls: BlockCalls) -> tuple[States, BlockMemo | None]:
        """The block's output and, while memory lasts, its memo."""
        rows = calls.ids.numel()
        if self._memory_left <= self._memo_row_bytes * rows:
            return self.chain.run(states, calls, index, index + 1), None
        memo = BlockMemo(self.chain.blocks[index])
        with memo.recording():
            output = self.chain.run(states, calls, index, index + 1)
        size = memo.bytes
        self._memo_row_bytes = size / rows
        if size > self._memory_left:
            return output, None
        self._memory_left -= size
        return output, memo

    def _keep(self, batch: Batch) -> None:
        """Allocates one tensor for the logits first: joining parts would need twice the memory."""
        first = self._rows_of(batch, next(self._chunks(batch)))
        logits = first.logits.new_empty(batch.rows, first.logits.shape[1])
        lse, top = first.lse.new_empty(batch.rows), first.top.new_empty(batch.rows)
        for rows in self._chunks(batch):
            part = first if rows.start == 0 else self._rows_of(batch, rows)
            logits[rows], lse[rows], top[rows] = part.logits, part.lse, part.top
        batch.logits, batch.lse, batch.top = logits, lse, top

    def _chunks(self, batch: Batch) -> Iterator[slice]:
        for first in range(0, batch.rows, self.row_chunk):
            yield slice(first, min(first + self.row_chunk, batch.rows))

    def _rows_of(self, batch: Batch, rows: slice) -> TeacherRows:
        targets = batch.targets.flatten()[rows]
        if batch.logits is not None and batch.lse is not None and batch.top is not None:
            return TeacherRows(batch.logits[rows], batch.lse[rows], batch.top[rows], targets)
        with self.running():
            logits = self.chain.logits(batch.states.flatten(0, 1)[rows])
        return TeacherRows.of(logits, targets)

    def rows(self, batch: Batch) -> Iterator[tuple[slice, TeacherRows]]:
        """The teacher's logits, a chunk of rows at a time."""
        for rows in self._chunks(batch):
            yield rows, self._rows_of(batch, rows)

    def cross_entropy(self) -> Floats:
        """Summed over each window's tokens."""
        return np.concatenate(
            [
                np.concatenate([t.cross_entropy.cpu().numpy() for _, t in self.rows(batch)])
                .reshape(batch.targets.shape)
                .sum(1)
                for batch in self.batches
            ]
        )

    def signal(self, batch: Batch) -> Floats:
        """Σ squared logits of each row."""
        return np.concatenate(
            [t.logits.square().sum(-1, dtype=torch.float64).cpu().numpy() for _, t in self.rows(batch)]
        )


def window_bytes(chain: Chain, time: int, width: int, vocabulary: int) -> int:
    """Bytes of one window's block inputs, final states and logits."""
    return time * (chain.state_size + 2 * width + vocabulary) * 4
