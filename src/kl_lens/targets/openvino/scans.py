"""The state-space scans as OpenVINO operations, for any number of tokens and any initial state.

Both forms take time as the first axis and no batch axis: one sequence at a time. The references that they are
tested against are the plain recurrences beside KL Lens's own kernels (`model/kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import openvino.opset13 as ops

CHUNK = 64  # tokens per chunk of Mamba-2's matrix form
Value = Any  # an ov.Output or ov.Node
Inputs = tuple[
    Value, ...
]  # x, Δ, A, B, C, or what else a scan takes; and the state before


class Sizes(NamedTuple):
    """Sizes of a Mamba-2 scan."""

    heads: int
    width: int
    states: int
    groups: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (1, self.groups, self.states, self.heads // self.groups, self.width)


def constant(value: Any, dtype: Any = np.int64) -> Value:
    return ops.constant(np.asarray(value, dtype))


def reshaped(value: Value, shape: list[Any]) -> Value:
    """Reshape where the axes may be numbers or scalar nodes; −1 is inferred."""
    if all(isinstance(axis, int) for axis in shape):
        return ops.reshape(value, shape, False)
    axes = [ops.unsqueeze(axis, 0) for axis in shape]
    return ops.reshape(value, ops.concat(axes, 0), False)


def length(value: Value, axis: int = 0) -> Value:
    """The length of an axis as a scalar node."""
    return ops.gather(ops.shape_of(value), axis, 0)


def _slot(*shape: int) -> Value:
    """An input of a loop's body."""
    return ops.parameter(shape, np.float32)


def selective_scan(inputs: Inputs, channels: int, states: int) -> tuple[Value, Value]:
    """Mamba-1: h ← exp(Δ·A)·h + Δ·x ⊗ B, y = C·h, token by token in one TensorIterator.

    x, dt (time, channels); a (channels, states); b, c (time, states); state (states, channels).
    Returns y (time, channels) and the last state. The decay differs for every channel and state, so there is no
    matrix form; the iterator is the same for one token and for many. Channels are innermost, because vector units
    run along them.
    """
    x, dt, a, b, c, state = inputs
    step = _slot(1, channels)
    inflow = _slot(1, channels)
    into = _slot(1, states)
    out_of = _slot(1, states)
    rates = _slot(states, channels)
    before = _slot(states, channels)
    after = ops.exp(step * rates) * before + reshaped(into, [states, 1]) * inflow
    y = ops.matmul(out_of, after, False, False)
    sliced = ((step, dt), (inflow, ops.multiply(x, dt)), (into, b), (out_of, c))
    whole = [(rates, ops.transpose(a, [1, 0]))]
    return _iterated("selective_scan", (after, y), (before, state), sliced, whole)


def delta_scan(inputs: Inputs, shape: tuple[int, ...]) -> tuple[Value, Value]:
    """Gated delta rule: S ← e^g·S, then S ← S + k ⊗ β(v − k·S), y = q·S, token by token in one TensorIterator.

    query, key (time, heads, keys); value (time, heads, values); g (time, heads) or (time, heads, keys); beta
    (time, heads); state (heads, keys, values). Returns y (time, heads, values) and the last state.
    """
    g, beta, state = inputs[3:]
    heads, keys, values = shape
    decays = keys if g.get_partial_shape().rank.get_length() == 3 else 1
    widths = (keys, keys, values, 1)
    tokens = [_slot(1, heads, 1, width) for width in widths]
    decay = _slot(1, heads, decays, 1)
    before = _slot(heads, keys, values)
    query, key, value, share = (
        reshaped(token, [heads, 1, width])
        for token, width in zip(tokens, widths, strict=True)
    )
    faded = before * reshaped(decay, [heads, decays, 1])
    news = (value - ops.matmul(key, faded, False, False)) * share
    after = faded + reshaped(tokens[1], [heads, keys, 1]) * news
    y = reshaped(ops.matmul(query, after, False, False), [1, heads, values])
    sliced = [
        (token, reshaped(whole, [-1, heads, 1, width]))
        for token, whole, width in zip(tokens, (*inputs[:3], beta), widths, strict=True)
    ]
    sliced.append((decay, reshaped(ops.exp(g), [-1, heads, decays, 1])))
    return _iterated("delta_scan", (after, y), (before, state), sliced)


def weighted_start(channels: int) -> Value:
    """RWKV's first state: nothing summed up, and a largest exponent below any other."""
    start = np.zeros((3, channels), np.float32)
    start[2] = -1e38
    value = constant(start, np.float32)
    value.set_friendly_name("kl_lens/first_state")
    return value


def weighted_scan(inputs: Inputs, shape: tuple[int, ...]) -> tuple[Value, Value]:
    """RWKV-4: an average of values weighted by e^key, fading with `decay`; the present token's weight is e^(key+first).

    key, value (time, channels); decay, first (channels,); state (3, channels): numerator and denominator, both
    divided by e^m, and m. Returns y (time, channels) and the last state.
    """
    key, value, decay, first, state = inputs
    channels = shape[1]
    k, v = (_slot(1, channels) for _ in range(2))
    w, u = (_slot(channels) for _ in range(2))
    before = _slot(3, channels)
    top, bottom, most = (ops.gather(before, [row], 0) for row in range(3))

    def joined(old: Value, new: Value) -> list[Value]:
        largest = ops.maximum(old, new)
        a = ops.exp(old - largest)
        b = ops.exp(new - largest)
        return [a * top + b * v, a * bottom + b, largest]

    numerator, denominator, _ = joined(most, k + u)
    y = numerator / denominator
    after = ops.concat(joined(most + w, k), 0)
    sliced = [(k, key), (v, value)]
    whole = [(w, decay), (u, first)]
    return _iterated("weighted_scan", (after, y), (before, state), sliced, whole)


def chunked_scan(
    inputs: Inputs, sizes: Sizes, *, single: bool = False
) -> tuple[Value, Value]:
    """Mamba-2 in chunks of at most 64 tokens: matrix products inside, a TensorIterator from chunk to chunk.

    x (time, heads, width); dt (time, heads); a (heads,); b, c (time, groups, states);
    state (1, groups, states, heads of a group, width). A prompt shorter than a chunk is one chunk of its own length,
    so a single token costs products with 1 × 1 matrices and nothing is padded. `single` promises that there is one
    chunk at most, and leaves the iterator out.
    """
    x, dt, a, b, c, state = inputs
    heads, width, states, groups = sizes
    per_group = heads // groups
    time = length(x)
    chunk = ops.minimum(time, CHUNK)
    chunks = ops.divide(ops.subtract(time + chunk, 1), chunk)
    padding = chunks * chunk - time

    def apart(value: Value, count: int, columns: int) -> Value:
        parts = reshaped(value, [chunks, chunk, count, columns])
        return ops.transpose(parts, [0, 2, 1, 3])

    # A padded token has Δ = 0: it decays nothing and adds nothing.
    inflow = _padded(ops.multiply(x, ops.unsqueeze(dt, 2)), padding, 3)
    rates = _padded(ops.multiply(dt, ops.unsqueeze(a, 0)), padding, 2)
    inflow = reshaped(inflow, [chunks, chunk, groups, per_group * width])
    into = apart(_padded(b, padding, 3), groups, states)
    out_of = apart(_padded(c, padding, 3), groups, states)
    # (chunks, heads, chunk)
    rates = ops.transpose(reshaped(rates, [chunks, chunk, heads]), [0, 2, 1])
    cumulative = ops.cum_sum(rates, 2)

    scores = ops.matmul(out_of, into, False, True) * _causal_mask(chunk)
    damping = reshaped(_damping(cumulative), [chunks, groups, per_group, chunk, chunk])
    weights = damping * ops.unsqueeze(scores, 2)
    weights = reshaped(weights, [chunks, heads, chunk, chunk])
    within = ops.matmul(weights, apart(inflow, heads, width), False, False)
    within = ops.transpose(within, [0, 2, 1, 3])  # (chunks, t, heads, width)

    # What each chunk adds to the state by its end, and how much of the state before it survives.
    total = ops.gather(cumulative, [-1], 2)  # (chunks, heads, 1)
    to_end = ops.transpose(ops.exp(total - cumulative), [0, 2, 1])
    damped = reshaped(inflow, [chunks, chunk, groups, per_group, width])
    damped = damped * reshaped(to_end, [chunks, chunk, groups, per_group, 1])
    added = ops.matmul(into, apart(damped, groups, per_group * width), True, False)
    added = reshaped(added, [chunks, groups, states, per_group, width])
    surviving = reshaped(ops.exp(total), [chunks, groups, 1, per_group, 1])
    if single:
        entering = state
        last = ops.multiply(surviving, state) + added
    else:
        entering, last = _between_chunks(surviving, added, state, sizes.state_shape)

    # What the state at the chunk's start contributes to token t.
    entering = reshaped(entering, [chunks, groups, states, per_group * width])
    carried = ops.matmul(out_of, entering, False, False)
    carried = reshaped(carried, [chunks, groups, chunk, per_group, width])
    carried = ops.transpose(carried, [0, 2, 1, 3, 4])
    from_start = ops.transpose(ops.exp(cumulative), [0, 2, 1])
    from_start = reshaped(from_start, [chunks, chunk, groups, per_group, 1])
    carried = reshaped(carried * from_start, [chunks, chunk, heads, width])
    y = reshaped(within + carried, [-1, heads, width])
    return ops.slice(y, [0], ops.unsqueeze(time, 0), [1], [0]), last


def _damping(cumulative: Value) -> Value:
    """(chunks, heads, t, s): token t hears token s ≤ t damped by exp(cumulative[t] − cumulative[s]). The minimum keeps
    the upper triangle, which the mask drops, from overflowing."""
    difference = ops.unsqueeze(cumulative, 3) - ops.unsqueeze(cumulative, 2)
    return ops.exp(ops.minimum(difference, np.float32(0)))


def one_token_scan(inputs: Inputs, sizes: Sizes) -> tuple[Value, Value]:
    """Mamba-2's recurrence for exactly one token; shapes as in `chunked_scan`."""
    x, dt, a, b, c, state = inputs
    heads, width, states, groups = sizes
    columns = heads // groups * width
    decay = ops.exp(ops.multiply(dt, ops.unsqueeze(a, 0)))
    row = constant(np.ones((1, width)), np.float32)
    row.set_friendly_name("kl_lens/ones")
    over_width = reshaped(decay, [heads, 1]) * row
    inflow = ops.multiply(x, ops.unsqueeze(dt, 2))
    added = reshaped(b, [groups, states, 1]) * reshaped(inflow, [groups, 1, columns])
    before = reshaped(state, [groups, states, columns])
    after = reshaped(over_width, [groups, 1, columns]) * before + added
    y = ops.matmul(reshaped(c, [groups, 1, states]), after, False, False)
    return reshaped(y, [1, heads, width]), reshaped(after, list(sizes.state_shape))


def one_or_many_scan(inputs: Inputs, sizes: Sizes) -> tuple[Value, Value]:
    """Mamba-2: the recurrence for a single token, the matrix form for more; both in one graph, behind an If."""
    heads, width, states, groups = sizes
    shapes = (
        [-1, heads, width],
        [-1, heads],
        [heads],
        [-1, groups, states],
        [-1, groups, states],
        list(sizes.state_shape),
    )

    def branch(scan: Any, name: str) -> ov.Model:
        parameters = [
            ops.parameter(ov.PartialShape(shape), np.float32) for shape in shapes
        ]
        results = scan(tuple(parameters), sizes)
        return ov.Model([ops.result(value) for value in results], parameters, name)

    single = branch(one_token_scan, "one_token")
    chunked = branch(chunked_scan, "many_tokens")
    choice = ops.if_op(ops.equal(length(inputs[0]), 1).output(0))
    choice.set_then_body(single)
    choice.set_else_body(chunked)
    for value, *parameters in zip(
        inputs, single.get_parameters(), chunked.get_parameters(), strict=True
    ):
        choice.set_input(_output(value), *parameters)
    y, last = map(choice.set_output, single.results, chunked.results)
    return y, last


def _between_chunks(
    surviving: Value, added: Value, state: Value, shape: tuple[int, ...]
) -> tuple[Value, Value]:
    """The state before each chunk, and after the last one."""
    keep = _slot(1, shape[1], 1, shape[3], 1)
    plus = _slot(*shape)
    before = _slot(*shape)
    sliced = [(keep, surviving), (plus, added)]
    results = (keep * before + plus, before)
    return _iterated("between_chunks", results, (before, state), sliced)


def _iterated(
    name: str,
    results: tuple[Value, Value],
    state: tuple[Value, Value],
    sliced: Sequence[tuple[Value, Value]],
    whole: Sequence[tuple[Value, Value]] = (),
) -> tuple[Value, Value]:
    """Computes `results`, the next state and what this step gives, along the first axis of what is sliced (pairs of an
    input and a value). Returns all steps' results and the last state."""
    inputs = [slot for slot, _ in (*sliced, *whole, state)]
    body = ov.Model([ops.result(value) for value in results], inputs, name)
    after, step = (result.output(0) for result in body.results)
    iterator = ops.tensor_iterator()
    iterator.set_body(body)
    for slot, value in sliced:
        iterator.set_sliced_input(slot, _output(value), 0, 1, 1, -1, 0)
    for slot, value in whole:
        iterator.set_invariant_input(slot, _output(value))
    iterator.set_merged_input(state[0], _output(state[1]), after)
    last = iterator.get_iter_value(after, -1)
    return iterator.get_concatenated_slices(step, 0, 1, 1, -1, 0), last


def _padded(value: Value, padding: Value, rank: int) -> Value:
    """Appends zeros after the last token."""
    end = ops.concat([ops.unsqueeze(padding, 0), [0] * (rank - 1)], 0)
    return ops.pad(value, [0] * rank, end, "constant", np.float32(0))


def _causal_mask(chunk: Value) -> Value:
    full = constant(np.tril(np.ones((CHUNK, CHUNK))), np.float32)
    full.set_friendly_name("kl_lens/causal_mask")
    end = ops.unsqueeze(chunk, 0)
    return ops.slice(full, [0, 0], ops.concat([end, end], 0), [1, 1], [0, 1])


def _output(value: Value) -> ov.Output:
    return value if isinstance(value, ov.Output) else value.output(0)


def replace(old: Value, new: Value) -> None:
    """Whatever reads the one reads the other from now on."""
    for reader in _output(old).get_target_inputs():
        reader.replace_source_output(_output(new))
