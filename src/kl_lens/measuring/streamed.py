"""The fast engine for a model whose weights stay on disk: blocks in the outer loop, states in the inner one.

With the model in memory, a candidate runs from its block to the end before the next one starts. Here they all advance
together: each block is read once, and applied to the teacher's states and to those of every candidate that started
before it. Batches, stacks and arithmetic are the same, and so are the numbers. Memory limits how many candidates run
together. The others form another *wave*, which starts at its first candidate's block.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kl_lens.base.environment import available_memory
from kl_lens.base.errors import RunError, one_line
from kl_lens.measuring.engines import FastEngine, Student
from kl_lens.measuring.perturbation import Perturbation, first_block
from kl_lens.measuring.teacher import Batch, BlockMemo, Teacher
from kl_lens.model import BlockCalls, LoadedModel, States
from kl_lens.model.residency import BLOCKS_AT_ONCE, Residency
from kl_lens.run.records import Component
from kl_lens.run.samples import WindowMetrics

# Share of the budget (after weights) for states; the rest is working memory.
_FOR_STATES = 1 / 3
# A slab is small enough that states of this many candidates fit, besides the teacher's.
_CANDIDATES, _TEACHERS = 8, 4
_FOR_MEMO = 1 / 8


class _Flight:
    """A group of perturbations on its way through the blocks."""

    def __init__(self, group: list[int], members: list[Perturbation], model: LoadedModel, start: int) -> None:
        self.group, self.members, self._model, self.start = group, members, model, start
        self.metrics: list[list[WindowMetrics]] = [[] for _ in members]
        self.calls: list[BlockCalls] = []  # its own, if it differs from the teacher before the first block

    def among(self, choose: Callable[[Component], bool]) -> list[Perturbation]:
        """Each member, restricted to the chosen components."""
        component = self._model.anatomy.component
        return [
            Perturbation({name: recipe for name, recipe in m.recipes.items() if choose(component(name))})
            for m in self.members
        ]

    def here(self, block: int) -> list[Perturbation]:
        return self.among(lambda c: block in c.blocks)

    @property
    def outside(self) -> list[Perturbation]:
        return self.among(lambda c: not c.blocks)


class StreamedEngine(FastEngine):
    """The same numbers with only a few blocks in memory at a time."""

    spills: bool | None = None  # spill states beyond memory; None: if that saves reading

    @property
    def residency(self) -> Residency:
        assert self.model.residency is not None
        return self.model.residency

    @property
    def states_budget(self) -> int:
        """Bytes for all states. Blocks come and go; on a GPU, the weights that stay are already counted."""
        taken = BLOCKS_AT_ONCE * self.residency.block_bytes
        if self.chain.device.type == "cpu":
            taken += self.residency.resident_bytes
        return int(max(self.memory_budget - taken, self.memory_budget / 4) * _FOR_STATES / self.sharers)

    def slab_windows(self, length: int) -> int:
        width = -(-self.chain.state_size // len(self.chain))
        most = max(1, self.states_budget // (length * width * 4 * (_CANDIDATES + _TEACHERS)))
        return most - most % min(most, self.batch_windows(length))

    def _run_teacher(self, ids: torch.Tensor) -> Teacher:
        return self._teacher(ids, budget=None)

    def in_turn(
        self, perturbations: Sequence[Perturbation], groups: Iterable[list[int]]
    ) -> Iterator[tuple[list[int], list[list[WindowMetrics]]]]:
        flights = []
        for group in groups:
            members = [perturbations[index] for index in group]
            start = min(first_block(self.model.anatomy, member) for member in members)
            flights.append(_Flight(group, members, self.model, start))
        flights.sort(key=lambda flight: flight.start)
        host, disk = room_beside(self.chain.device, self.scratch)
        each, room = self._teacher_bytes // _TEACHERS, self._wave_room(host + disk) - self._teacher_bytes
        waves = list(_filled(flights, lambda f: each * (len(f.members) + (f.start < 0)), room))
        # The teacher moves along and stops where the next wave starts.
        entering = [States(batch.calls.hidden) for batch in self.teacher.batches]
        at = 0
        for place, wave in enumerate(waves):
            following = [f.start for later in waves[place + 1 :] for f in later if f.start < len(self.chain)]
            starts = [f.start for f in wave if f.start < len(self.chain)]
            goal = max([at, *([min(following)] if following else starts)])
            memory = max(0, self.states_budget - self._teacher_bytes)
            with closing(StateRoom(memory, self.scratch, host)) as shelf:
                self._through(wave, shelf, at, entering, goal)
                self._compare_wave(wave, shelf)
            at = goal
            for flight in wave:
                yield flight.group, flight.metrics

    def _wave_room(self, beside: int) -> int:
        """Bytes for a wave's states. Reading a block again costs its size, spilling a state twice its size."""
        memory = self.states_budget
        pays = self.residency.block_bytes > 2 * memory if self.spills is None else self.spills
        return memory + beside if pays else memory

    @property
    def _teacher_bytes(self) -> int:
        """The teacher's states: inputs of the first block, the current one, the next one and the head."""
        return _TEACHERS * sum(batch.rows for batch in self.teacher.batches) * self.teacher.row_bytes

    def _through(
        self, wave: Sequence[_Flight], shelf: StateRoom, at: int, entering: list[States], goal: int
    ) -> None:
        """Runs a wave through the blocks, and the teacher from block `at` (inputs: `entering`) to `goal`."""
        batches = self.teacher.batches
        for flight in wave:
            if flight.start < 0:
                with self._perturbed(flight.outside):
                    flight.calls = [self.chain.calls(batch.calls.ids) for batch in batches]
                for number, call in enumerate(flight.calls):
                    shelf.put((flight.group[0], number), States(call.hidden))
        for index in range(at, len(self.chain)):
            flying = [f for f in wave if f.start < index or (f.start < 0 and not index)]
            starting = [f for f in wave if f.start == index]
            if not (flying or starting or index < goal):
                continue
            with self.model.present(self.chain.blocks[index]), self.teacher.running():
                for number, batch in enumerate(batches):
                    entered, memo = entering[number], self._memo(index, batch, starting)
                    if memo is not None or index < goal:
                        with memo.recording() if memo else nullcontext():
                            left = self.chain.run(entered, batch.calls, index, index + 1)
                        entering[number] = left if index < goal else entered
                    for flight in starting:
                        shelf.put((flight.group[0], number), self._first(flight, entered, batch, memo))
                    for flight in flying:
                        shelf.put((flight.group[0], number), self._on(flight, index, number, shelf))

    def _memo(self, index: int, batch: Batch, starting: Sequence[_Flight]) -> BlockMemo | None:
        """The original's outputs of a block's parts, if several candidates start there and memory suffices."""
        if self.deployed is not None or sum(len(f.members) for f in starting) < 2:
            return None
        layers = [m for m in self.chain.blocks[index].modules() if isinstance(m, nn.Linear)]
        # Inputs and outputs, and copies of both until the check for in-place changes.
        size = 2 * 4 * batch.rows * sum(m.in_features + m.out_features for m in layers)
        return BlockMemo(self.chain.blocks[index]) if size <= self.memory_budget * _FOR_MEMO else None

    def _first(self, flight: _Flight, entered: States, batch: Batch, memo: BlockMemo | None) -> States:
        """Output of the block in which a flight starts."""
        outputs = []
        for perturbation in flight.here(flight.start):
            student = Student(self.model, perturbation, self.deployed)
            with (
                self.perturbed(perturbation, student.weights),
                memo.replaying(student.perturbed) if memo else nullcontext(),
            ):
                outputs.append(self.chain.run(entered, batch.calls, flight.start, flight.start + 1))
        return outputs[0] if len(outputs) == 1 else States.stacked(outputs)

    def _on(self, flight: _Flight, index: int, number: int, shelf: StateRoom) -> States:
        """Output of the next block, which is also perturbed if a weight is shared or a plan changes several."""
        states = shelf.take((flight.group[0], number))
        calls = self._calls(flight, number)
        with self._perturbed(flight.here(index)):
            return self.chain.run(states, calls, index, index + 1)

    def _calls(self, flight: _Flight, number: int) -> BlockCalls:
        return flight.calls[number] if flight.calls else self.teacher.batches[number].calls

    def _perturbed(self, members: Sequence[Perturbation]) -> AbstractContextManager[None]:
        """Applies what a flight changes behind its first block; only flights with a single member do."""
        some = next((member for member in members if member.recipes), None)
        if some is None or len(members) > 1:
            return nullcontext()
        return self.perturbed(some, Student(self.model, some, self.deployed).weights)

    def _compare_wave(self, wave: Sequence[_Flight], shelf: StateRoom) -> None:
        with self.model.present(self.chain.head), self.teacher.running():
            for number, batch in enumerate(self.teacher.batches):
                most = self.states_budget // max(1, batch.states.nbytes)
                # Each portion, whose final states fit into memory, computes the teacher's logits.
                for portion in _filled(wave, lambda flight: len(flight.members), most):
                    self._compare_portion(portion, batch, number, shelf)

    def _compare_portion(
        self, flights: Sequence[_Flight], batch: Batch, number: int, shelf: StateRoom
    ) -> None:
        """All members together; those with their own head one by one."""
        together: list[tuple[list[WindowMetrics], torch.Tensor]] = []
        for flight in flights:
            states = self._final(flight, batch, number, shelf)
            head = Student(self.model, flight.outside[0], self.deployed) if len(states) == 1 else None
            if head is not None and head.has_own_head:
                (rows,) = self._compare(batch, states, head)
                flight.metrics[0] += self._windows(batch, rows())
            else:
                together += zip(flight.metrics, states, strict=True)
        if together:
            found = self._compare(batch, [states for _, states in together])
            for (windows, _), rows in zip(together, found, strict=True):
                windows += self._windows(batch, rows())

    def _final(self, flight: _Flight, batch: Batch, number: int, shelf: StateRoom) -> list[torch.Tensor]:
        """Each member's input of the head."""
        if flight.start == len(self.chain):
            return [batch.states] * len(flight.members)
        states = shelf.take((flight.group[0], number))
        with self._perturbed(flight.outside):
            final = self.chain.finish(states, self._calls(flight, number))
        return list(final.chunk(len(flight.members)))


def _filled(flights: Iterable[_Flight], size: Callable[[_Flight], int], most: int) -> Iterator[list[_Flight]]:
    """In order, as many as fit and at least one."""
    some: list[_Flight] = []
    for flight in flights:
        if some and sum(map(size, some)) + size(flight) > most:
            yield some
            some = []
        some.append(flight)
    if some:
        yield some


@dataclass(frozen=True)
class _OnDisk:
    """Where a tensor is in the file."""

    at: int
    shape: torch.Size
    dtype: torch.dtype
    size: int


class StateRoom:
    """States by key: in device memory first, then in the host's (for a GPU), then in a file. The file has no name, so
    it disappears with the process even after a crash.

    Example:
        >>> with closing(StateRoom(10**9, folder)) as room:
        ...     room.put("a", states)
        ...     states = room.take("a")
    """

    def __init__(self, memory: int, folder: Path | None, host: int = 0) -> None:
        """`memory`: bytes on the device. `host`: bytes in the host's memory, for a GPU. `folder`: for the file."""
        self._left, self._host_left, self._folder = memory, host, folder
        self._kept: dict[Hashable, tuple[list[Any], Any, torch.device]] = {}
        self._file: Any = None
        self._free: dict[int, list[int]] = {}  # size → free offsets in the file
        self._end = 0

    def close(self) -> None:
        self._kept.clear()
        if self._file is not None:
            self._file.close()

    @property
    def spilled(self) -> int:
        """Size of the file."""
        return self._end

    def put(self, key: Hashable, states: States) -> None:
        leaves, structure = pytree.tree_flatten((states.hidden, dict(states.carried)))
        self._kept[key] = ([self._put(leaf) for leaf in leaves], structure, states.hidden.device)

    def take(self, key: Hashable) -> States:
        """Removes and returns the states."""
        leaves, structure, device = self._kept.pop(key)
        hidden, carried = pytree.tree_unflatten([self._take(leaf, device) for leaf in leaves], structure)
        return States(hidden, carried)

    def _put(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.nbytes <= self._left:
            self._left -= leaf.nbytes
            # A view would keep its whole storage alive.
            return leaf if leaf.untyped_storage().nbytes() == leaf.nbytes else leaf.clone()
        if leaf.device.type != "cpu" and leaf.nbytes <= self._host_left:
            self._host_left -= leaf.nbytes
            return leaf.cpu()
        return self._written(leaf)

    def _take(self, leaf: Any, device: torch.device) -> Any:
        if isinstance(leaf, _OnDisk):
            tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
            self._file.seek(leaf.at)
            self._file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
            self._free.setdefault(leaf.size, []).append(leaf.at)
            return tensor.to(device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.device == device:
            self._left += leaf.nbytes
            return leaf
        self._host_left += leaf.nbytes
        return leaf.to(device)

    def _written(self, leaf: torch.Tensor) -> _OnDisk:
        data = leaf.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        empty = self._free.get(len(data))
        at = empty.pop() if empty else self._end
        self._end = max(self._end, at + len(data))
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, prefix=".states-")  # noqa: SIM115
            self._file.seek(at)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"{self._folder or tempfile.gettempdir()}: {self._end / 1e9:.1f} GB of states cannot be kept there "
                f"({one_line(error)}); free some space, or raise --memory-budget; finished measurements are kept"
            ) from error
        return _OnDisk(at, leaf.shape, leaf.dtype, len(data))


def room_beside(device: torch.device, folder: Path | None) -> tuple[int, int]:
    """Bytes for states in host memory and on disk: half of what is free in each."""
    host = available_memory() // 2 if device.type != "cpu" else 0
    return host, shutil.disk_usage(folder or tempfile.gettempdir()).free // 2
