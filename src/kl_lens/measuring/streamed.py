"""The fast engine for a model whose weights stay on disk: blocks in the outer loop, states in the inner one.

With the model in memory, a candidate runs from its block to the end before the next one starts. Here they all advance
together: each block is read once, and applied to the teacher's states and to those of every candidate that started
before it. Batches, stacks and arithmetic are the same, and so are the numbers. Memory limits how many candidates run
together. The others form another *wave*, which starts at its first candidate's block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from kl_lens.measuring.engines import FastEngine, Measured, Results
from kl_lens.measuring.perturbation import Perturbation, first_block
from kl_lens.measuring.teacher import Batch
from kl_lens.model import Anatomy, BlockCalls, States
from kl_lens.model.residency import BLOCKS_AT_ONCE, Residency
from kl_lens.run.readings import Reading
from kl_lens.run.records import Component

# Share of the budget (after weights) for states; the rest is working memory.
_FOR_STATES = 1 / 3
# A slab is small enough that states of this many candidates fit, besides the teacher's.
_CANDIDATES = 8
_TEACHERS = 4


@dataclass
class _Flight:
    """A group of perturbations on its way through the blocks."""

    group: list[int]
    members: list[Perturbation]
    anatomy: Anatomy

    def __post_init__(self) -> None:
        self.start = min(first_block(self.anatomy, member) for member in self.members)
        self.metrics: Results = [[] for _ in self.members]
        self.states: dict[int, States] = {}  # of each batch
        # Its own, if it differs from the teacher before the first block.
        self.calls: list[BlockCalls] = []

    def here(self, block: int | None) -> list[Perturbation]:
        """Each member, restricted to the components of a block; None: to those outside the blocks."""

        def is_here(component: Component) -> bool:
            return block in (component.blocks or (None,))

        return [
            Perturbation(
                {
                    name: recipe
                    for name, recipe in member.recipes.items()
                    if is_here(self.anatomy.component(name))
                },
                tuple(state for state in member.states if is_here(state[0])),
            )
            for member in self.members
        ]


class StreamedEngine(FastEngine):
    """The same numbers with only a few blocks in memory at a time."""

    @property
    def residency(self) -> Residency:
        assert self.model.residency is not None
        return self.model.residency

    @property
    def states_budget(self) -> int:
        """Bytes for all states. Blocks come and go; on a GPU, the weights that stay are already counted."""
        weights = BLOCKS_AT_ONCE * self.residency.block_bytes
        if self.chain.device.type == "cpu":
            weights += self.residency.resident_bytes
        return int(
            max(self.memory_budget - weights, self.memory_budget / 4)
            * _FOR_STATES
            / self.sharers
        )

    def window_bytes(self, length: int) -> int:
        width = -(-self.chain.state_size // len(self.chain))
        return length * width * 4 * (_CANDIDATES + _TEACHERS)

    def in_turn(
        self, perturbations: Sequence[Perturbation], groups: Iterable[list[int]]
    ) -> Measured:
        anatomy = self.model.anatomy
        flights = [_Flight(g, [perturbations[i] for i in g], anatomy) for g in groups]
        flights.sort(key=lambda flight: flight.start)
        # The teacher's states at one place; it has them where the first and the current block, the next one and the
        # head begin.
        rows = sum(batch.rows for batch in self.teacher.batches)
        size = rows * self.teacher.row_bytes
        room = self.states_budget - _TEACHERS * size
        waves = list(
            _filled(flights, lambda f: size * (len(f.members) + (f.start < 0)), room)
        )
        # The teacher moves along and stops where the next wave starts.
        entering = [States(batch.calls.hidden) for batch in self.teacher.batches]
        at = 0
        for number, wave in enumerate(waves):
            following = [
                f.start
                for later in waves[number + 1 :]
                for f in later
                if f.start < len(self.chain)
            ]
            starts = [f.start for f in wave if f.start < len(self.chain)]
            goal = max([at, *(following[:1] or starts)])
            self._through(wave, at, entering, goal)
            self._compare_wave(wave)
            at = goal
            for flight in wave:
                yield flight.group, flight.metrics

    def _through(
        self, wave: Sequence[_Flight], at: int, entering: list[States], goal: int
    ) -> None:
        """Runs a wave through the blocks, and the teacher from block `at` (inputs: `entering`) to `goal`."""
        batches = self.teacher.batches
        for flight in wave:
            if flight.start < 0:
                with self._perturbed(flight.here(None)):
                    flight.calls = [
                        self.chain.calls(batch.calls.ids) for batch in batches
                    ]
                flight.states = {
                    number: States(call.hidden)
                    for number, call in enumerate(flight.calls)
                }
        for index in range(at, len(self.chain)):
            flying = [f for f in wave if f.start < index or (f.start < 0 and not index)]
            starting = [f for f in wave if f.start == index]
            if not (flying or starting or index < goal):
                continue
            with self.model.present(self.chain.blocks[index]), self.teacher.running():
                for number, batch in enumerate(batches):
                    entered = entering[number]
                    if index < goal:
                        entering[number] = self.chain.run(
                            entered, batch.calls, index, index + 1
                        )
                    for flight in starting:
                        flight.states[number] = self._first(flight, entered, batch)
                    for flight in flying:
                        # Perturbed here too if a weight is shared or a plan changes several.
                        before = flight.states.pop(number)
                        calls = self._calls(flight, number)
                        with self._perturbed(flight.here(index)):
                            flight.states[number] = self.chain.run(
                                before, calls, index, index + 1
                            )

    def _first(self, flight: _Flight, entered: States, batch: Batch) -> States:
        """Output of the block in which a flight starts."""
        outputs = []
        for perturbation in flight.here(flight.start):
            student = self.student(perturbation)
            with self.perturbed(perturbation, student.weights):
                outputs.append(
                    self.chain.run(entered, batch.calls, flight.start, flight.start + 1)
                )
        return outputs[0] if len(outputs) == 1 else States.stacked(outputs)

    def _calls(self, flight: _Flight, number: int) -> BlockCalls:
        return (
            flight.calls[number] if flight.calls else self.teacher.batches[number].calls
        )

    def _perturbed(self, members: Sequence[Perturbation]) -> AbstractContextManager[None]:
        """Applies what a flight changes behind its first block; only flights with a single member do."""
        if len(members) > 1 or not (members[0].recipes or members[0].states):
            return nullcontext()
        return self.perturbed(members[0], self.student(members[0]).weights)

    def _compare_wave(self, wave: Sequence[_Flight]) -> None:
        with self.model.present(self.chain.head), self.teacher.running():
            for number, batch in enumerate(self.teacher.batches):
                most = self.states_budget // max(1, batch.states.nbytes)
                # Each portion, whose final states fit into memory, computes the teacher's logits.
                for portion in _filled(wave, lambda flight: len(flight.members), most):
                    self._compare_portion(portion, batch, number)

    def _compare_portion(
        self, flights: Sequence[_Flight], batch: Batch, number: int
    ) -> None:
        """All members together; those with their own head one by one."""
        together: list[tuple[list[Reading], Tensor]] = []
        for flight in flights:
            states = self._final(flight, batch, number)
            head = self.student(flight.here(None)[0]) if len(states) == 1 else None
            if head is not None and head.has_own_head:
                (rows,) = self._compare(batch, states, head)
                flight.metrics[0] += self._windows(batch, rows())
            else:
                together += zip(flight.metrics, states, strict=True)
        if together:
            compared = self._compare(batch, [states for _, states in together])
            for (windows, _), rows in zip(together, compared, strict=True):
                windows += self._windows(batch, rows())

    def _final(self, flight: _Flight, batch: Batch, number: int) -> list[Tensor]:
        """Each member's input of the head."""
        if flight.start == len(self.chain):
            return [batch.states] * len(flight.members)
        with self._perturbed(flight.here(None)):
            final = self.chain.finish(
                flight.states.pop(number), self._calls(flight, number)
            )
        return list(final.chunk(len(flight.members)))


def _filled(
    flights: Iterable[_Flight], size: Callable[[_Flight], int], most: int
) -> Iterator[list[_Flight]]:
    """In order, as many as fit and at least one."""
    batch: list[_Flight] = []
    for flight in flights:
        if batch and sum(map(size, batch)) + size(flight) > most:
            yield batch
            batch = []
        batch.append(flight)
    if batch:
        yield batch
