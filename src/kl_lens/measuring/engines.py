"""Two engines that measure the same thing: `plain`, which is easy to check by reading, and `fast`.

Both yield, for every perturbation, the metrics of every window. The plain engine runs the whole model for each
perturbation and compares in plain torch. The fast engine starts at the first perturbed block from the teacher's cached
states, stacks candidates of one block into a shared suffix when batches are small, and computes logits and metrics in
chunks of rows.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kl_lens.base.accelerators import free_memory, runs_triton
from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.measuring.metrics import (
    Floats,
    TeacherRows,
    compare,
    compared_metrics,
    kernels_hold,
    mended,
    objectives,
    window_metrics,
)
from kl_lens.measuring.objectives import OBJECTIVES
from kl_lens.measuring.perturbation import (
    Kernels,
    Perturbation,
    Replacement,
    applied,
    first_block,
    replacements,
)
from kl_lens.measuring.products import FLOAT32, TensorCores, precision_for
from kl_lens.measuring.teacher import (
    Batch,
    Teacher,
    batch_tokens,
    logit_rows,
    window_bytes,
)
from kl_lens.model import LoadedModel, States
from kl_lens.run.readings import Reading

Results = list[list[Reading]]  # the windows of each perturbation
Finish = Callable[[], Results]
Measured = Iterator[tuple[list[int], Results]]  # of groups
Rows = Callable[[], Floats]  # waits for the result of `compare`


def memory_on(device: torch.device, budget: int) -> int:
    """The budget; for the default on a GPU, most of its free memory. Some stays free because the model's own code,
    which runs for the noise floor, takes a gigabyte or more on any card."""
    if device.type != "cuda" or budget != DEFAULT_MEMORY:
        return budget
    free = free_memory(device)
    return int(0.85 * max(free - (5 << 28), free // 4))


def ranges(count: int, most: int) -> list[range]:
    """0 to `count`, cut into ranges of at most `most`."""
    return [range(first, min(first + most, count)) for first in range(0, count, most)]


class Engine(ABC):
    """Measures perturbations on windows of ids."""

    name: ClassVar[str]
    sharers = 1  # processes that share the memory for states

    def __init__(
        self,
        model: LoadedModel,
        memory_budget: int = DEFAULT_MEMORY,
        deployed: Kernels | None = None,
        precision: str | None = None,
    ) -> None:
        """`precision`: of matrix products, see `products.py`; the plain engine always uses float32."""
        self.model = model
        self.deployed = deployed
        self.chain = model.chain
        # Before anything is perturbed.
        self.chain.uses_kernels()
        self.chain.distrust(compared_metrics(self.chain.device.type))
        self.memory_budget = memory_on(self.chain.device, memory_budget)
        self.vocabulary = model.anatomy.component(model.anatomy.head).shape[0]
        self.precision = self._precision(precision)

    def _precision(self, wanted: str | None) -> str:
        """Of matrix products."""
        return FLOAT32

    def perturbed(
        self, perturbation: Perturbation, weights: Sequence[Replacement]
    ) -> AbstractContextManager[None]:
        """Within, the model has the perturbation's weights and states and, as deployed, the runtime's activations."""
        return applied(self.model, perturbation, weights, self.deployed)

    def logits(self, ids: Tensor) -> Tensor:
        """The original model's logits, in this engine's precision."""
        return self.chain.full_logits(ids)

    @property
    def states_budget(self) -> int:
        """Bytes for the teacher's states; the rest of the budget is working memory."""
        return self.memory_budget // 2 // self.sharers

    def slabs(self, ids: Tensor) -> list[range]:
        """Ranges of windows whose teacher states fit into the memory budget."""
        return ranges(len(ids), self.slab_windows(ids.shape[1]))

    def slab_windows(self, length: int) -> int:
        """Windows in a slab: whole batches, so that batches do not depend on where slabs end."""
        most = max(1, self.states_budget // self.window_bytes(length))
        return most - most % min(most, self.batch_windows(length))

    def window_bytes(self, length: int) -> int:
        """Of the states of a window."""
        width = int(self.chain.head.weight.shape[1])  # type: ignore[index]
        return window_bytes(self.chain, length, width, self.vocabulary)

    @abstractmethod
    def batch_windows(self, length: int) -> int:
        """Windows of this length that run together."""

    @abstractmethod
    def prepare(self, ids: Tensor) -> None:
        """Runs the teacher on these windows (one slab); `measure` compares against it."""

    def groups(
        self, perturbations: Sequence[Perturbation], rows: int | None = None
    ) -> Iterator[list[int]]:
        """Indices of perturbations that are measured together. `rows`: of a batch; None: of the prepared ones."""
        for index in range(len(perturbations)):
            yield [index]

    @abstractmethod
    def started(self, perturbations: Sequence[Perturbation]) -> Finish:
        """Starts measuring one group. Calling the result waits for the windows of each perturbation."""

    def in_turn(
        self, perturbations: Sequence[Perturbation], groups: Iterable[list[int]]
    ) -> Measured:
        """These groups with their results. A GPU works on the next group while the last one's numbers are summed."""
        behind = 1 if self.chain.device.type == "cuda" else 0
        waiting: deque[tuple[list[int], Finish]] = deque()
        for group in groups:
            members = [perturbations[index] for index in group]
            start: Finish | None = None
            with suppress(torch.OutOfMemoryError):
                start = self.started(members)
            # Finish what waits, and try again with all that it held, one at a time.
            if start is None:
                yield from ((measured, finish()) for measured, finish in waiting)
                waiting.clear()
                for index in group:
                    _empty_gpu()
                    yield [index], self.started([perturbations[index]])()
                continue
            waiting.append((group, start))
            while len(waiting) > behind:
                measured, finish = waiting.popleft()
                yield measured, finish()
        for measured, finish in waiting:
            yield measured, finish()

    def measure(self, perturbations: Sequence[Perturbation]) -> Results:
        measured: dict[int, list[Reading]] = {}
        for group, results in self.in_turn(perturbations, self.groups(perturbations)):
            measured.update(zip(group, results, strict=True))
        return [measured[index] for index in range(len(perturbations))]

    @abstractmethod
    def teacher_cross_entropy(self) -> Floats:
        """The teacher's summed cross-entropy on each prepared window."""


class PlainEngine(Engine):
    """One full forward per perturbation, by the model's own code. The reference."""

    name = "plain"

    def prepare(self, ids: Tensor) -> None:
        self.ids = ids.to(self.chain.device)
        self.targets = self.chain.task.targets(self.ids)
        batches = ranges(len(ids), self.batch_windows(ids.shape[1]))
        # Free the last slab before the next one. Slabs are cut so that the logits fit.
        self._teachers: dict[range, TeacherRows] = {}
        self._teachers = {
            windows: TeacherRows.of(self._logits(windows), self._at(windows).flatten())
            for windows in batches
        }

    def batch_windows(self, length: int) -> int:
        """A few at a time, so that whole logits fit."""
        limit = self.memory_budget // 8 // (4 * self.vocabulary * length)
        return max(1, min(self.chain.task.rows_at_once // length, limit))

    def _at(self, windows: range) -> Tensor:
        return self.targets[windows.start : windows.stop]

    def _logits(self, windows: range) -> Tensor:
        ids = self.ids[windows.start : windows.stop]
        return self.chain.full_logits(ids).flatten(0, 1)

    def teacher_cross_entropy(self) -> Floats:
        rows = [teacher.cross_entropy.cpu() for teacher in self._teachers.values()]
        length = self.ids.shape[1]
        return np.concatenate([r.numpy().reshape(-1, length).sum(1) for r in rows])

    def started(self, perturbations: Sequence[Perturbation]) -> Finish:
        results = [self._measure_one(perturbation) for perturbation in perturbations]
        return lambda: results

    def _measure_one(self, perturbation: Perturbation) -> list[Reading]:
        metrics: list[Reading] = []
        weights = replacements(self.model, perturbation)
        for windows, teacher in self._teachers.items():
            with self.perturbed(perturbation, weights):
                rows = compare(teacher, self._logits(windows), kernel=False)
            metrics += window_metrics(
                windows, rows, teacher.signal, self._at(windows), self.vocabulary
            )
        return metrics


class Student:
    """A prepared perturbation: its weights, the first block that differs from the teacher, and its own head, if any."""

    def __init__(self, model: LoadedModel, perturbation: Perturbation) -> None:
        self.perturbation = perturbation
        self.weights = replacements(model, perturbation)
        self.start = first_block(model.anatomy, perturbation)
        self.has_own_head = any(
            parameter is model.chain.head.weight for parameter, _ in self.weights
        )


class FastEngine(Engine):
    """Runs only suffixes, from cached states, with chunked logits: the same numbers for far less work."""

    name = "fast"
    teacher: Teacher  # once `prepare` has run

    def _precision(self, wanted: str | None) -> str:
        # As deployed, a runtime's rounding is modelled: as exactly as in float32, whatever is asked for.
        return precision_for(wanted if self.deployed is None else None, self.model)

    @cached_property
    def batch_tokens(self) -> int:
        return batch_tokens(self.chain, self.memory_budget)

    @cached_property
    def _products(self) -> TensorCores:
        return TensorCores([*self.chain.blocks, self.chain.head], self.precision)

    def logits(self, ids: Tensor) -> Tensor:
        with self._products.active():
            return self.chain.full_logits(ids)

    def prepare(self, ids: Tensor) -> None:
        self.__dict__.pop("teacher", None)  # free the last slab first: two would not fit
        ids = ids.to(self.chain.device)
        with suppress(torch.OutOfMemoryError):
            self.teacher = self._run_teacher(ids)
            return
        _empty_gpu()
        self.teacher = self._run_teacher(ids)

    def _run_teacher(self, ids: Tensor) -> Teacher:
        budget = self.states_budget if self.model.residency is None else None
        on_gpu = self.chain.device.type != "cpu"
        most = self.memory_budget // 2 // self.sharers if on_gpu else None
        rows = logit_rows(self.vocabulary, most)
        return Teacher(self.model, ids, self._products, self.batch_tokens, rows, budget)

    def teacher_cross_entropy(self) -> Floats:
        return np.concatenate([batch.cross_entropy for batch in self.teacher.batches])

    def student(self, perturbation: Perturbation) -> Student:
        return Student(self.model, perturbation)

    def _students(self, perturbations: Sequence[Perturbation]) -> list[Student]:
        """Prepared perturbations. On a GPU in a stream of their own, because quantizing waits for its own results."""
        if self.chain.device.type != "cuda":
            return [*map(self.student, perturbations)]
        main = torch.cuda.current_stream()
        with torch.cuda.stream(self._beside):
            students = [*map(self.student, perturbations)]
        main.wait_stream(self._beside)
        for student in students:
            for _, weight in student.weights:
                weight.record_stream(main)
        return students

    @cached_property
    def _beside(self) -> torch.cuda.Stream:
        torch.cuda.synchronize()  # weights must have arrived
        return torch.cuda.Stream(priority=-1)

    def started(self, perturbations: Sequence[Perturbation]) -> Finish:
        students = self._students(perturbations)
        measured = [
            (batch, self._measure_batch(batch, students))
            for batch in self.teacher.batches
        ]

        def finish() -> Results:
            metrics: Results = [[] for _ in students]
            for batch, members in measured:
                for windows, rows in zip(metrics, members, strict=True):
                    windows += self._windows(batch, rows())
            return metrics

        return finish

    def batch_windows(self, length: int) -> int:
        return max(1, self.batch_tokens // length)

    def groups(
        self, perturbations: Sequence[Perturbation], rows: int | None = None
    ) -> Iterator[list[int]]:
        """Neighbours that differ from the teacher in the same single block can share a stacked suffix."""
        rows = rows or max(batch.rows for batch in self.teacher.batches)
        most = max(1, self.batch_tokens // rows)
        group: list[int] = []
        room = 0
        for index, perturbation in enumerate(perturbations):
            block = self._only_block(perturbation)
            components = map(self.model.anatomy.component, perturbation.recipes)
            size = 4 * sum(component.parameters for component in components)
            if group:
                alike = block == self._only_block(perturbations[group[0]])
                fits = len(group) < most and size <= room
                if block is None or not alike or not fits:
                    yield group
                    group = []
            # For the group's weights: the experts of a layer are one component, and may take gigabytes.
            room = (room if group else self.memory_budget // 8) - size
            group.append(index)
        if group:
            yield group

    def _only_block(self, perturbation: Perturbation) -> int | None:
        anatomy = self.model.anatomy
        components = [anatomy.component(name) for name in perturbation.recipes]
        components += [component for component, _ in perturbation.states]
        blocks = {block for component in components for block in component.blocks}
        inside = all(component.blocks for component in components)
        return blocks.pop() if inside and len(blocks) == 1 else None

    def _measure_batch(self, batch: Batch, students: Sequence[Student]) -> list[Rows]:
        """(rows, columns) for each student."""
        with self.teacher.running():
            if len(students) == 1:
                (student,) = students
                own_head = student if student.has_own_head else None
                return self._compare(batch, [self._states(batch, student)], own_head)
            start = students[0].start  # the block that all of them change
            outputs = []
            for student in students:
                with self.perturbed(student.perturbation, student.weights):
                    entering = batch.inputs[start]
                    left = self.chain.run(entering, batch.calls, start, start + 1)
                    outputs.append(left)
            hidden = self.chain.run(States.stacked(outputs), batch.calls, start + 1)
            states = self.chain.finish(hidden, batch.calls)
            return self._compare(batch, list(states.chunk(len(students))))

    def _states(self, batch: Batch, student: Student) -> Tensor:
        """The states that enter the student's head."""
        if student.start == len(self.chain):
            return batch.states
        with self.perturbed(student.perturbation, student.weights):
            calls = batch.calls
            start = student.start
            if start < 0:
                calls = self.chain.calls(calls.ids)
                hidden = self.chain.run(calls.hidden, calls, 0)
            else:
                hidden = self.chain.run(batch.inputs[start], calls, start)
            return self.chain.finish(hidden, calls)

    def _compare(
        self,
        batch: Batch,
        states: Sequence[Tensor],
        own_head: Student | None = None,
    ) -> list[Rows]:
        """`own_head`: the student, if its head is perturbed too; the teacher's logits use the original head."""
        if runs_triton(self.chain.device) and kernels_hold(self.chain.device):
            return self._compare_on_gpu(batch, states, own_head)
        parts: list[list[Floats]] = [[] for _ in states]
        for rows, teacher in self.teacher.rows(batch):
            for member, entering in enumerate(states):
                logits = self._logits(entering.flatten(0, 1)[rows], own_head)
                parts[member].append(compare(teacher, logits))
        return [partial(np.concatenate, part) for part in parts]

    def _compare_on_gpu(
        self, batch: Batch, states: Sequence[Tensor], own_head: Student | None
    ) -> list[Rows]:
        """The same without waiting for the GPU: the next student is quantized meanwhile."""
        from kl_lens.measuring.triton_metrics import SharedHead, compare_logits

        head = self.chain.head.weight
        scale = self.chain.head_scale
        fused = self.precision != FLOAT32 and scale is not None and own_head is None
        shared = SharedHead(head, scale) if fused else None  # type: ignore[arg-type]
        flat = [entering.flatten(0, 1) for entering in states]
        originals = batch.states.flatten(0, 1)
        parts: list[list[Tensor]] = [[] for _ in states]
        for rows, teacher in self.teacher.rows(batch):
            for part, entering in zip(parts, flat, strict=True):
                if shared is None:
                    student = self._logits(entering[rows], own_head).float()
                    columns = compare_logits(teacher, student)
                else:
                    moved = shared.moved(entering[rows], originals[rows])
                    columns = compare_logits(teacher, moved, moved=True)
                    student = moved.add_(teacher.logits) if OBJECTIVES else moved
                part.append(torch.column_stack([columns, *objectives(teacher, student)]))

        def both(entering: Tensor, bad: Tensor) -> tuple[TeacherRows, Tensor]:
            at = bad.to(entering.device)
            with self.teacher.running():
                original = TeacherRows.of(
                    self.chain.logits(originals[at]), batch.targets.flatten()[at]
                )
                return original, self._logits(entering[at], own_head).float()

        def later(rows: Tensor, entering: Tensor) -> Rows:
            """Starts the copy to the host now; the caller waits for it later while the GPU goes on."""
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()

            def wait() -> Floats:
                arrived.synchronize()
                return mended(host.numpy(), partial(both, entering))

            return wait

        return [
            later(torch.cat(part), entering)
            for part, entering in zip(parts, flat, strict=True)
        ]

    def _logits(self, states: Tensor, own_head: Student | None) -> Tensor:
        if own_head is None:
            return self.chain.logits(states)
        with self.perturbed(own_head.perturbation, own_head.weights):
            return self.chain.logits(states)

    def _windows(self, batch: Batch, rows: Floats) -> list[Reading]:
        return window_metrics(
            batch.windows, rows, batch.signal, batch.answers, self.vocabulary
        )


def _empty_gpu() -> None:
    """Uncollected cycles may hold gigabytes of its memory."""
    gc.collect()
    torch.cuda.empty_cache()


ENGINES: dict[str, type[Engine]] = {
    FastEngine.name: FastEngine,
    PlainEngine.name: PlainEngine,
}
