"""The model as a chain: embedding → blocks → final norm → head, found by watching one forward.

The blocks are the `ModuleList` whose members run once each, in order, each taking the output of the one before.
Everything around them stays the model's own code: to get the arguments of each block, or to get from the last block to
the logits, the model's own `forward` runs with its blocks bypassed. So masks, rotary embeddings, meta tokens, shared
blocks, logit scaling and whatever a new architecture has come out right without being known. What blocks pass on
besides the hidden states (router states, shared keys and values) is carried along: while the blocks are bypassed, each
returns a *mark* in place of every further tensor. The model's own code passes the marks on; where one appears among a
later block's arguments, that tensor belongs. A dictionary that blocks write to is a *board*: each run gets its own,
with the contents of that place.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from kl_lens.base.errors import CheckpointError, one_line
from kl_lens.model.kernels import Comparison, Watch, fast_kernels, replaceable
from kl_lens.model.patching import patched, without_weights
from kl_lens.model.tasks import MEASURED, LanguageTask, Task

# Allowed difference of the chain's logits from the model's own, relative to the largest: rounding of two orders of one
# computation.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-8}
_HALF_ROUNDING = 3e-2
# Our kernels are compared one by one, which sees small errors. The logits show large ones of what is around them. Deep
# models amplify the last bits, so much is allowed.
_AROUND_KERNELS = 1e-3
_AROUND_KERNELS_IN_HALF = 2e-1  # Zamba2 in bfloat16 on an H200: .10, all kernels right
# Tokens of the comparison: several chunks, and no multiple of any.
CHECKED_TOKENS = 136


HIDDEN = object()  # marks the hidden states in a recorded call


@dataclass(frozen=True)
class Given:
    """Marks leaf number `leaf` of the output of block `block`; leaf 0 is its hidden states."""

    block: int
    leaf: int


@dataclass(frozen=True)
class Board:
    """Marks a dictionary that blocks read and write; `name` is the argument's."""

    name: str
    empty: MutableMapping[Any, Any] = field(compare=False, repr=False)

    def filled(self, contents: Mapping[Any, Any]) -> MutableMapping[Any, Any]:
        board = copy.copy(self.empty)
        board.update(contents)
        return board


@dataclass(frozen=True)
class States:
    """The input of a block: hidden states, and outputs of earlier blocks that it or later ones take."""

    hidden: Tensor  # (batch, positions, width), or (batch, channels, height, width)
    # Tensors, and contents of boards.
    carried: Mapping[Given | Board, Any] = field(default_factory=dict)

    @staticmethod
    def stacked(parts: Sequence[States]) -> States:
        """Joins several batches at the same block."""

        def joined(*values: Any) -> Any:
            is_batch = isinstance(values[0], Tensor) and values[0].dim()
            return torch.cat(values) if is_batch else values[0]

        hidden = torch.cat([part.hidden for part in parts])
        carried = pytree.tree_map(joined, *(dict(part.carried) for part in parts))
        return States(hidden, carried)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among a block's arguments: (batch, positions, width), else an image with four axes."""
    values = [*args[:1], kwargs.get("hidden_states"), *args, *kwargs.values()]
    real = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    states = [value for value in real if value.dim() in (3, 4)]
    if not states:
        raise CheckpointError("a block was called without hidden states or an image")
    return min(states, key=Tensor.dim)  # the first of equals


def marked(call: Arguments, marks: Mapping[int, Given], boards: set[str]) -> Arguments:
    """A call with marks for hidden states, outputs of earlier blocks (by id) and boards."""
    args, kwargs = call
    hidden = hidden_of(args, kwargs)

    def mark(value: Any) -> Any:
        if value is hidden:
            return HIDDEN
        return marks.get(id(value), value) if isinstance(value, Tensor) else value

    kwargs = {
        name: Board(name, copy.copy(v)) if name in boards else v
        for name, v in kwargs.items()
    }
    return pytree.tree_map(mark, (args, kwargs))


def warn(text: str) -> None:
    """Without a command line to show it."""
    warnings.warn(text, stacklevel=2)


class _Stop(Exception):
    """Ends a forward early."""


@dataclass(frozen=True)
class BlockCalls:
    """For one batch of ids: the input of the first block, and every block's other arguments."""

    ids: Tensor  # (batch, time), or (windows, images)
    hidden: Tensor  # (batch, positions, width): may exceed time (meta tokens)
    arguments: tuple[Arguments, ...]

    @cached_property
    def last_taker(self) -> dict[Given, int]:
        """Every tensor that a block takes from an earlier one → the last block that takes it."""
        return {
            leaf: index
            for index, call in enumerate(self.arguments)
            for leaf in pytree.tree_leaves(call)
            if isinstance(leaf, Given)
        }


class Chain:
    """Runs any range of a model's blocks from given hidden states.

    Example:
        >>> calls = chain.calls(ids)
        >>> half = chain.run(calls.hidden, calls, 0, 12)
        >>> final = chain.run(half, calls, 12, len(chain))
        >>> logits = chain.logits(chain.finish(final, calls))    # equals model(ids).logits
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fast: bool = True,
        task: Task | None = None,
        warn: Callable[[str], None] = warn,
    ) -> None:
        """`warn` hears of a kernel that turns out to be wrong."""
        self.model = model
        self.fast = fast
        self.fault = ""  # why our kernels are not used, if they should be
        self._warn = warn
        self.task = task or LanguageTask()
        self.head = self.task.head(model)
        self._batched: dict[int, list[Any]] = {}  # by length
        self._doubts: dict[int, str | None] = {}  # by length
        self._unchecked = {False, True}  # kernels without and with gradients
        self._watch()

    def __len__(self) -> int:
        return len(self.blocks)

    # -- finding the chain ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Finds the blocks, their outputs and the boards they write to, in two small forwards."""
        ids = self.task.sample(self.model, 2, 5)
        ids[1, :3] = ids[0, :3]  # a causal model gives both rows the same logits there
        self.blocks_name, self.blocks = _find_blocks(
            self.model, lambda: self._first_forward(ids), self.task.lists, self.head
        )
        calls: list[Arguments] = []
        outputs: list[Any] = []
        at_head: list[Tensor] = []
        boards: list[dict[str, dict[Any, Any]]] = []
        self._boards: set[str] = set()  # dictionary arguments that blocks write to

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            mutable = {k: v for k, v in kwargs.items() if isinstance(v, MutableMapping)}
            boards.append({name: dict(value) for name, value in mutable.items()})

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append((args, kwargs))
            outputs.append(output)
            for name, before in boards[-1].items():
                after = kwargs[name]
                kept = (after.get(key) is value for key, value in before.items())
                if len(before) != len(after) or not all(kept):
                    self._boards.add(name)

        with ExitStack() as hooks:
            for block in self.blocks:
                entering = block.register_forward_pre_hook(enter, with_kwargs=True)
                hooks.enter_context(entering)
                hooks.enter_context(block.register_forward_hook(leave, with_kwargs=True))
            hooks.enter_context(
                self.head.register_forward_hook(lambda _m, _a, out: at_head.append(out))
            )
            logits = self._forward(ids)
        _check_linked(self.model, self.blocks_name, calls, outputs)
        hidden = [hidden_of(*call) for call in calls]
        # Values per row (token, or image) in the inputs of all blocks.
        self.state_size = sum(
            h.shape[-1] if self.task.generates else h[0].numel() for h in hidden
        )
        self._outputs = [pytree.tree_flatten(output) for output in outputs]
        hidden.append(self._outputs[-1][0][0])
        self._reshapes = len({states.shape for states in hidden}) > 1
        self.head_scale = _factor(at_head, logits)

    def _first_forward(self, ids: Tensor) -> None:
        try:
            logits = self._forward(ids).float()
        except Exception as error:  # a model's own code may raise anything
            raise CheckpointError(
                f"{type(self.model).__name__}: the model's own forward fails on {ids.shape[1]} {self.task.unit} "
                f"({type(error).__name__}: {one_line(error)}); config.json and code do not fit together"
            ) from error
        off = float((logits[0, :3] - logits[1, :3]).abs().max())
        if self.task.generates and off > self._rounding(logits):
            raise CheckpointError(
                f"{type(self.model).__name__} is not causal: a token's output depends on later tokens; {MEASURED}"
            )

    def _rounding(self, logits: Tensor) -> float:
        """What two ways to compute these logits may differ by."""
        return ROUNDING.get(next(self.model.parameters()).dtype, _HALF_ROUNDING) * float(
            logits.abs().max()
        )

    def _batched_arguments(self, ids: Tensor) -> list[Any]:
        """For every argument of every block: is its first axis the batch? Found by comparing a batch of two with a
        batch of three at the length in use: the mask of a sliding window, for example, exists only if the text is
        longer than the window."""
        length = ids.shape[1]
        if length not in self._batched:
            two, three = (self.calls(ids[:1].repeat(rows, 1)) for rows in (2, 3))
            sizes = (two.hidden.shape[0], three.hidden.shape[0])

            def is_batched(a: Any, b: Any) -> bool:
                is_array = isinstance(a, Tensor) and a.dim() > 0
                return is_array and (a.shape[0], b.shape[0]) == sizes

            self._batched[length] = [
                pytree.tree_map(is_batched, *calls)
                for calls in zip(two.arguments, three.arguments, strict=True)
            ]
        return self._batched[length]

    # -- trusting it ------------------------------------------------------------------------------------

    def doubt(self, ids: Tensor) -> str | None:
        """Why this model cannot be run in parts on windows of this length; None if it can. Tested on the first window,
        once per length: run in two parts, and stacked from the middle on, the chain must give the logits of the model's
        own forward."""
        if (length := ids.shape[1]) not in self._doubts:
            self._doubts[length] = self._found_doubt(ids[:1])
        return self._doubts[length]

    def _found_doubt(self, ids: Tensor) -> str | None:
        expected = self.full_logits(ids).float()
        try:
            calls = self.calls(ids)
            middle = len(self) // 2
            half = self.run(calls.hidden, calls, 0, middle)
            stacked = States.stacked([half, half])
            logits, copies = (
                self.logits(self.finish(self.run(states, calls, middle), calls)).float()
                for states in (half, stacked)
            )
        except Exception as error:  # a block may raise anything for unexpected arguments
            return f"its blocks cannot be run in parts ({type(error).__name__}: {one_line(error)})"
        off = float((logits - expected).abs().max())
        off = max(off, _typical_error(copies, expected))
        if off <= self._rounding(expected):
            return None
        return (
            f"run in parts, its logits are off by {off:.1e} "
            f"where the largest is {float(expected.abs().max()):.1e}"
        )

    def uses_kernels(self, *, gradients: bool = False) -> bool:
        """Whether our kernels are used. Before that, they are compared with the library's own code, once."""
        if self.fast and gradients in self._unchecked:
            self._unchecked.remove(gradients)
            self.distrust(self.compared_kernels(gradients=gradients))
        return self.fast

    def distrust(self, comparisons: Iterable[Comparison]) -> None:
        """Our kernels are not used again if one of them is wrong."""
        wrong = next((result for result in comparisons if not result.holds), None)
        if wrong is not None and self.fast:
            self.fast = False
            self.fault = f"our kernel for {wrong.kernel} is wrong here"
            self._warn(
                f"{self.fault} (off by {wrong.error:.1e}, rounding allows {wrong.limit:.1e}): transformers' own code "
                "computes this model instead, which is slower; please report this, with what kl-lens doctor prints"
            )

    def compared_kernels(
        self,
        ids: Tensor | None = None,
        *,
        gradients: bool = False,
        around: AbstractContextManager[Any] | None = None,
    ) -> list[Comparison]:
        """Our kernels beside the library's own code, on a short window; `around`: with more kernels, active within."""
        if ids is None:
            rows = CHECKED_TOKENS if self.task.generates else 2
            config = getattr(self.model, "config", None)
            most = getattr(config, "max_position_embeddings", None)
            ids = self.task.sample(self.model, 1, min(rows, most or rows))
        watch = Watch(gradients=gradients)
        with watch.watching(), around or nullcontext():
            logits = self._forward(ids).float()
        comparisons = list(watch.comparisons.values())
        if gradients or around is not None:
            return comparisons
        # Code of a checkpoint may need a GPU: see `Watch`.
        with suppress(Exception), torch.inference_mode():
            expected = self.task.forward(self.model, ids.to(self.device)).float()
            error = _typical_error(logits, expected)
            error /= max(1e-30, float(expected.abs().max()))
            dtype = next(self.model.parameters()).dtype
            limit = _AROUND_KERNELS if dtype in ROUNDING else _AROUND_KERNELS_IN_HALF
            if bool(expected.isfinite().all()):
                comparisons.append(Comparison("all layers together", error, limit))
        return comparisons

    # -- running ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @contextmanager
    def kernels(self, *, gradients: bool = False) -> Iterator[None]:
        """Uses our fast kernels inside the model's layers, if enabled and right."""
        self.uses_kernels(gradients=gradients)
        with self._kernels():
            yield

    def _kernels(self) -> AbstractContextManager[Any]:
        return fast_kernels(self.model, self._replaceable) if self.fast else nullcontext()

    @cached_property
    def _replaceable(self) -> list[nn.Module]:
        return replaceable(self.model)

    def _forward(self, ids: Tensor, *, gradients: bool = False) -> Tensor:
        with torch.inference_mode(not gradients), self._kernels():
            return self.task.forward(self.model, ids.to(self.device))

    def full_logits(self, ids: Tensor) -> Tensor:
        """The model's own forward: (batch, time, vocabulary)."""
        self.uses_kernels()
        return self._forward(ids)

    def final_states(self, ids: Tensor) -> Tensor:
        """The inputs of the head in the model's own forward: (batch, time, width)."""
        self.uses_kernels()
        with _stopping_at(self.head) as inputs:
            self._forward(ids)
        return inputs[0].reshape(*ids.shape, -1)

    def calls(self, ids: Tensor) -> BlockCalls:
        """The input of the first block for these ids, and the other arguments of every block."""
        self.uses_kernels()
        ids = ids.to(self.device)
        calls: list[Arguments] = []
        marks: dict[int, Given] = {}
        states: list[Tensor] = []  # kept alive, so that their ids stay unique

        def bypass(args: Any, kwargs: Any) -> Tensor:
            hidden = hidden_of(args, kwargs)
            calls.append(marked((args, kwargs), marks, self._boards))
            states.append(hidden)
            # The model's next step needs another shape.
            if self._reshapes and len(calls) == len(self):
                raise _Stop
            passed = hidden.view_as(hidden)  # the same states as a distinct object
            marks[id(passed)] = Given(len(calls) - 1, 0)
            states.append(passed)
            return passed

        with self._blocks_bypassed(bypass), _stopping_at(self.head):
            self._forward(ids)
        return BlockCalls(ids, states[0], tuple(calls))

    def run(
        self,
        states: States | Tensor,
        calls: BlockCalls,
        start: int,
        stop: int | None = None,
        *,
        gradients: bool = False,
    ) -> States:
        """Runs blocks `start` to `stop` (exclusive) on the states that enter block `start`. `states` may stack k copies
        of the batch along the first axis; the arguments are repeated to fit. A plain tensor will do for the first
        block, or if nothing else passes between blocks."""
        stop = len(self) if stop is None else stop
        if isinstance(states, Tensor):
            states = States(states)
        copies, remainder = divmod(states.hidden.shape[0], calls.hidden.shape[0])
        if remainder or not copies:
            raise ValueError(
                f"{len(states.hidden)} sequences are no multiple of {len(calls.hidden)}"
            )
        with torch.inference_mode(not gradients), self._kernels():
            for index in range(start, stop):
                states = self._run_block(index, states, calls, copies)
        return states

    def _run_block(
        self, index: int, states: States, calls: BlockCalls, copies: int
    ) -> States:
        boards: dict[Board, Any] = {}

        def value_of(mark: Any) -> Any:
            if mark is HIDDEN:
                return states.hidden
            if isinstance(mark, Given):
                return states.carried[mark]
            if isinstance(mark, Board):
                return boards.setdefault(mark, mark.filled(states.carried.get(mark, {})))
            return mark

        args, kwargs = pytree.tree_map(value_of, self._repeated(calls, index, copies))
        output = self.blocks[index](*args, **kwargs)
        leaves = pytree.tree_leaves(output)
        if not calls.last_taker and not boards:
            return States(leaves[0])
        carried: dict[Given | Board, Any] = {
            mark: leaves[mark.leaf] if mark.block == index else states.carried[mark]
            for mark, last in calls.last_taker.items()
            if mark.block <= index < last
        }
        carried.update({mark: dict(board) for mark, board in boards.items()})
        return States(leaves[0], carried)

    def _repeated(self, calls: BlockCalls, index: int, copies: int) -> Arguments:
        if copies == 1:
            return calls.arguments[index]

        def repeat(leaf: Any, is_batched: bool) -> Any:
            return leaf.repeat(copies, *[1] * (leaf.dim() - 1)) if is_batched else leaf

        batched = self._batched_arguments(calls.ids)[index]
        return pytree.tree_map(repeat, calls.arguments[index], batched)

    def finish(
        self,
        states: States | Tensor,
        calls: BlockCalls,
        *,
        gradients: bool = False,
    ) -> Tensor:
        """From the last block's output to the head's input: (batch, time, width)."""
        hidden = states.hidden if isinstance(states, States) else states
        ids = calls.ids.repeat(hidden.shape[0] // calls.hidden.shape[0], 1)
        with (
            self._blocks_bypassed(lambda args, kwargs: hidden),
            _stopping_at(self.head) as inputs,
        ):
            self._forward(ids, gradients=gradients)
        return inputs[0].reshape(*ids.shape, -1)

    def logits(self, states: Tensor, *, gradients: bool = False) -> Tensor:
        """Logits of head inputs, (…, width) → (…, vocabulary)."""
        with torch.inference_mode(not gradients):
            if self.head_scale is not None:
                logits = self.head(states)
                return logits if self.head_scale == 1.0 else logits.mul_(self.head_scale)
            # Something follows the head: use the model's own code on these states.
            rows = states.reshape(1, -1, states.shape[-1])
            ids = self.task.blank(*rows.shape[:2])
            entering = rows if self.task.generates else rows.flatten(0, 1)
            replaced = self.head.register_forward_pre_hook(lambda *_: (entering,))
            with replaced, self._blocks_bypassed(hidden_of):
                logits = self._forward(ids, gradients=gradients)
            return logits.reshape(*states.shape[:-1], -1)

    def _blocks_bypassed(
        self, hidden_for: Callable[[Any, Any], Tensor]
    ) -> AbstractContextManager[None]:
        """Within the block, each block returns `hidden_for(args, kwargs)`, and marks for its other outputs."""

        def stand_in(index: int) -> Callable[..., Any]:
            leaves, structure = self._outputs[index]
            marks = [
                Given(index, n) if isinstance(leaf, Tensor) else leaf
                for n, leaf in enumerate(leaves)
            ]

            def forward(*args: Any, **kwargs: Any) -> Any:
                return pytree.tree_unflatten(
                    [hidden_for(args, kwargs), *marks[1:]], structure
                )

            return without_weights(forward)

        return patched(
            (block, stand_in(index)) for index, block in enumerate(self.blocks)
        )


@contextmanager
def _stopping_at(module: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, a forward stops at `module`; yields its inputs."""
    inputs: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0])
        raise _Stop

    with module.register_forward_pre_hook(stop), suppress(_Stop):
        yield inputs


def _typical_error(logits: Tensor, expected: Tensor) -> float:
    """A larger batch rounds differently, and a token may go to another expert, so only most rows must agree."""
    return float((logits - expected).abs().amax(-1).median())


def _factor(at_head: list[Tensor], logits: Tensor) -> float | None:
    """The factor between the head's output and the logits; None if it is not a plain factor."""
    if len(at_head) != 1 or at_head[0].numel() != logits.numel():
        return None
    outputs = at_head[0].flatten().float()  # models may convert it
    expected = logits.flatten().float()
    largest = int(outputs.abs().argmax())
    for factor in (1.0, float(expected[largest] / outputs[largest])):
        if torch.allclose(outputs * factor, expected, rtol=1e-6, atol=0):
            return factor
    return None


def _find_blocks(
    model: nn.Module,
    forward: Callable[[], Any],
    kinds: tuple[type[nn.Module], ...],
    head: nn.Module,
) -> tuple[str, Sequence[nn.Module]]:
    """The list with the most parameters whose members run once each, in order, before the head."""
    lists: list[tuple[str, Any]] = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, kinds) and head not in m.modules()
    ]
    order: list[nn.Module] = []
    with register_module_forward_pre_hook(lambda module, _: order.append(module)):
        forward()

    def is_chain(members: Sequence[nn.Module]) -> bool:
        distinct = {*members}
        ran = [module for module in order if module in distinct]
        return len(distinct) == len(members) > 0 and ran == [*members]

    chains = [(name, members) for name, members in lists if is_chain(members)]
    if not chains:
        raise CheckpointError(
            f"{type(model).__name__}: found no chain of blocks (a ModuleList whose members run once each, "
            f"in order) among {[name for name, _ in lists] or 'no lists at all'}; "
            "KL Lens needs a model of the form embedding → blocks → norm → head"
        )
    name, members = max(
        chains, key=lambda chain: sum(p.numel() for p in chain[1].parameters())
    )
    return name, list(members)


def _check_linked(
    model: nn.Module, name: str, calls: list[Arguments], outputs: list[Any]
) -> None:
    """Raises if a block does not take exactly the output of the one before: then it could not be run alone."""
    for index, (call, output) in enumerate(zip(calls[1:], outputs[:-1], strict=True)):
        leaving = pytree.tree_leaves(output)[0]
        entering = hidden_of(*call)
        if entering.shape == leaving.shape and torch.equal(entering, leaving):
            continue
        if not leaving.isfinite().all():
            raise CheckpointError(
                f"{name}.{index}: its output is not finite: its weights are damaged or too large"
            )
        rescales = getattr(getattr(model, "config", None), "rescale_every", 0)
        hint = (
            "; it rescales them for half precision (rescale_every): open it in float32"
            if rescales
            else ""
        )
        raise CheckpointError(
            f"{name}.{index + 1} does not take the output of {name}.{index}: {type(model).__name__} changes the hidden "
            f"states between blocks, so KL Lens cannot run its blocks in parts{hint}"
        )
