"""Models larger than memory: matrices stay on disk and are loaded while their part of the model runs.

A block's matrices are read when it is entered and released when it is left; the next block's are read meanwhile.
Vectors, and what is outside the blocks if there is room, stay in memory. So every forward is right by itself, and code
that takes many states through a block before the next one (`present`) reads it once. A matrix that is not there is full
of NaN: what is forgotten is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from kl_lens.base.accelerators import free_memory
from kl_lens.base.errors import CheckpointError
from kl_lens.base.system import available_memory
from kl_lens.model.files import refuse_broken_numbers, stored_tensors, weights_digest
from kl_lens.model.patching import needs_no_weights
from kl_lens.model.streaming import CheckpointTensors, join_twins

AUTO, MEMORY, DISK = PLACES = ("auto", "memory", "disk")
# Shares of free GPU memory, and of a budget, for weights that stay.
_SHARE_OF_CARD = 0.5
_SHARE_OF_BUDGET = 1 / 3
BLOCKS_AT_ONCE = 3  # the previous, the current and the next one
_FITS = 0.6  # the rest is for states


@contextmanager
def weightless() -> Iterator[None]:
    """Models made within the block have real buffers, and parameters that take no memory."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=False
            )
        original(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register):
        yield


def belongs_on_disk(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    weights: str,
    budget: int | None,
) -> bool:
    """Whether a model does not fit into the budget if given, else into free memory."""
    if weights not in PLACES:
        raise CheckpointError(
            f"weights is {weights!r}; expected one of {', '.join(PLACES)}"
        )
    if weights != AUTO:
        return weights == DISK
    on_gpu = device.type == "cuda"
    free = int(_FITS * (free_memory(device) if on_gpu else available_memory()))
    if budget is None:
        room = free
    else:
        room = min(budget, free) if on_gpu else budget
    numbers = sum(math.prod(tensor.shape) for tensor in stored_tensors(folder))
    return numbers * dtype.itemsize > room


@dataclass(eq=False)
class _Matrix:
    """One matrix that is loaded and released."""

    parameter: nn.Parameter
    name: str  # on disk
    absent: Tensor  # NaN in the matrix's shape, taking no memory
    loaded: Tensor | None = None
    holders: int = 0

    @property
    def is_absent(self) -> bool:
        return self.parameter.data_ptr() == self.absent.data_ptr()


# Matrices by their names on disk; on a GPU, what to wait for before they are used.
_Arrivals = tuple[dict[str, Tensor], torch.cuda.Event | None]


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Residency:
    """Loads and releases a model's matrices.

    Example:
        >>> with model.residency.present(model.chain.blocks[3]):
        ...     states = [model.chain.run(s, calls, 3, 4) for s in states]      # reads the block once
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        budget: int | None,
        *,
        whole: bool = False,
    ) -> None:
        """Gives a model made `weightless` its vectors and the matrices that stay; `whole`: all of them."""
        self.device = device
        self.dtype = dtype
        self.tensors = CheckpointTensors(folder, model, pinned=device.type == "cuda")
        if not whole:
            self.tensors.refuse_pickles()
        self._folder = folder
        self.model = model
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kl-lens-read")
        self._ahead: dict[nn.Module, Future[_Arrivals]] = {}
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._exit_event: torch.cuda.Event | None = None
        self._host_room = 0
        self._matrices: dict[int, _Matrix] = {}  # by id of the parameter
        # For a GPU: the stored form, on the card or in host memory.
        self.cached: dict[str, Tensor] = {}
        self._units: dict[nn.Module, list[_Matrix]] = {}
        self._next: dict[nn.Module, nn.Module] = {}
        join_twins(model, self.tensors.is_twice)
        self._place_parameters()
        self.fingerprint = weights_digest(self._checked())
        if not whole:
            self._divide(budget)
            return
        # One at a time, so that a GPU's model is never in the host's memory.
        for matrix in self._matrices.values():
            self._fill(matrix)
        self._matrices.clear()
        self.close()

    # -- opening ----------------------------------------------------------------------------------------------

    def _place_parameters(self) -> None:
        """Reads vectors and buffers; matrices get placeholders."""
        wanted = self.model.state_dict(keep_vars=True)
        locations = self.tensors.places(wanted)
        fresh: dict[int, nn.Parameter] = {}
        for tensor in wanted.values():
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(
                    self.tensors.read(locations[id(tensor)]).reshape(tensor.shape)
                )
            elif id(tensor) not in fresh:
                fresh[id(tensor)] = self._parameter(locations[id(tensor)], tensor)
        for module in self.model.modules():
            for leaf, empty in module._parameters.items():
                if empty is not None:
                    module._parameters[leaf] = fresh[id(empty)]
        self.model.to(self.device)  # buffers; parameters are there

    def _parameter(self, name: str, wanted: nn.Parameter) -> nn.Parameter:
        if wanted.dim() < 2:
            vector = self._brought(self.tensors.read(name))
            return nn.Parameter(vector, requires_grad=False)
        nan = torch.full((), math.nan, dtype=self.dtype, device=self.device)
        absent = nan.expand(wanted.shape)
        parameter = nn.Parameter(absent, requires_grad=False)
        self._matrices[id(parameter)] = _Matrix(parameter, name, absent)
        return parameter

    def _checked(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor as the model would have it in memory, by its name, read once. Raises for NaN or infinity."""
        for name, tensor in sorted(self.model.state_dict(keep_vars=True).items()):
            matrix = self._matrices.get(id(tensor))
            if matrix is None:
                values = tensor.detach().cpu()
            else:
                values = self.tensors.read(matrix.name).to(self.dtype)
            refuse_broken_numbers(self._folder, [(name, values)])
            yield name, values

    def _fill(self, matrix: _Matrix) -> None:
        matrix.parameter.data = self._brought(self.tensors.read(matrix.name))

    def _room(self, budget: int | None) -> int:
        """Bytes for weights that stay."""
        if self.device.type == "cuda":
            free = free_memory(self.device)
            return int(_SHARE_OF_CARD * min(free, free if budget is None else budget))
        return int(_SHARE_OF_BUDGET * (available_memory() if budget is None else budget))

    def _divide(self, budget: int | None) -> None:
        """Decides what stays in memory: everything outside the blocks if there is room; blocks come and go."""
        room = self._room(budget)
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        self._blocks = list(max(lists, key=_parameters, default=()))
        inside = {m for block in self._blocks for m in self._of(block)}
        outside = [m for m in self._matrices.values() if m not in inside]
        self.block_bytes = max(
            (sum(map(self._bytes, self._of(block))) for block in self._blocks), default=0
        )
        self.resident_bytes = sum(
            p.nbytes for p in self.model.parameters() if p.dim() < 2
        )
        room -= BLOCKS_AT_ONCE * self.block_bytes
        if (size := sum(map(self._bytes, outside))) <= room:
            for matrix in outside:
                self._fill(matrix)
                del self._matrices[id(matrix.parameter)]
            room -= size
            self.resident_bytes += size
        else:
            for module in self.model.modules():
                matrices = self._of(module, recurse=False)
                self._watch(module, [m for m in matrices if m not in inside])
        for block in self._blocks:
            self._watch(block, self._of(block))
        self._next = {
            block: following
            for block, following in pairwise(self._blocks)
            if block in self._units and following in self._units
        }
        if self.device.type == "cuda":
            self._host_room = available_memory() // 2
            names = sorted({matrix.name for matrix in inside})
            # For example in half precision: all stay on the card.
            if sum(map(self.tensors.stored_bytes, names)) <= room:
                for name in names:
                    self.cached[name] = self.tensors.read(name).to(self.device)

    def _of(self, module: nn.Module, *, recurse: bool = True) -> list[_Matrix]:
        return [
            self._matrices[id(p)]
            for p in module.parameters(recurse)
            if id(p) in self._matrices
        ]

    def _bytes(self, matrix: _Matrix) -> int:
        return matrix.parameter.numel() * self.dtype.itemsize

    def _watch(self, module: nn.Module, matrices: list[_Matrix]) -> None:
        if not matrices:
            return
        self._units[module] = matrices

        def if_used(act: Callable[[nn.Module], None]) -> Callable[..., None]:
            return lambda block, *_: None if needs_no_weights(block) else act(block)

        module.register_forward_pre_hook(if_used(self._enter))
        module.register_forward_hook(if_used(self._leave), always_call=True)

    # -- loading and releasing ---------------------------------------------------------------------------------------

    @contextmanager
    def present(self, module: nn.Module) -> Iterator[None]:
        """Within the block, the matrices of `module` are loaded and the next block's are being read; for the whole
        model: everything outside the blocks."""
        units = [module]
        if module is self.model:
            units = [unit for unit in self._units if unit not in self._blocks]
        with ExitStack() as loaded:
            for unit in units:
                if unit in self._units:
                    self._enter(unit)
                    loaded.callback(self._leave, unit)
            yield

    def original(self, parameter: Tensor) -> Tensor:
        """A parameter's values, loaded or not."""
        matrix = self._matrices.get(id(parameter))
        if matrix is None or not matrix.is_absent:
            return parameter.detach()
        return self._brought(self._stored(matrix.name))

    def is_untouched(self, parameter: Tensor) -> bool:
        """Whether its values, loaded or not, are those on disk."""
        matrix = self._matrices.get(id(parameter))
        if matrix is None:
            return False
        if matrix.loaded is None:
            return matrix.is_absent
        return matrix.is_absent or parameter.data_ptr() == matrix.loaded.data_ptr()

    def _enter(self, module: nn.Module) -> None:
        matrices = self._units[module]
        wanted = [m for m in matrices if m.is_absent]
        if wanted:
            ahead = self._ahead.pop(module, None)
            values = self._handed_over(ahead.result()) if ahead is not None else {}
            values |= self._handed_over(
                self._fetched([m for m in wanted if m.name not in values], None)
            )
            for matrix in wanted:
                matrix.loaded = matrix.parameter.data = values[matrix.name]
        for matrix in matrices:
            matrix.holders += 1
        following = self._next.get(module)
        if following is not None and following not in self._ahead:
            absent = [m for m in self._units[following] if m.is_absent]
            self._ahead.clear()
            if absent:
                self._ahead[following] = self._reader.submit(
                    self._fetched, absent, self._exit_event
                )

    def _leave(self, module: nn.Module) -> None:
        for matrix in self._units[module]:
            matrix.holders = max(0, matrix.holders - 1)
            if matrix.holders or matrix.loaded is None:
                continue
            if matrix.parameter.data_ptr() == matrix.loaded.data_ptr():
                matrix.parameter.data = matrix.absent
            matrix.loaded = None
        if self._copy_stream is not None and module in self._next:
            self._exit_event = torch.cuda.current_stream(self.device).record_event()

    def _fetched(
        self, matrices: list[_Matrix], exit_event: torch.cuda.Event | None
    ) -> _Arrivals:
        """Reads matrices. A GPU gets them while it computes, but not before it has `left` an earlier block: the host
        runs ahead and would fill it with blocks."""
        if exit_event is not None:
            exit_event.synchronize()
        stream = self._copy_stream
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            brought = {m.name: self._brought(self._stored(m.name)) for m in matrices}
            return brought, None if stream is None else stream.record_event()

    def _handed_over(self, arrivals: _Arrivals) -> dict[str, Tensor]:
        brought, copied = arrivals
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in brought.values():
                tensor.record_stream(stream)
        return brought

    def _stored(self, name: str) -> Tensor:
        """The stored form: kept on the card or in host memory while there is room, else from disk."""
        if name in self.cached:
            return self.cached[name]
        with torch.inference_mode(False):
            tensor = self.tensors.read(name)
        if 0 < tensor.nbytes <= self._host_room:
            self._host_room -= tensor.nbytes
            tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
            self.cached[name] = tensor
        return tensor

    def _brought(self, stored: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return stored.to(self.device, non_blocking=True).to(self.dtype)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self.tensors.close()
