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
        return ops.reshape(value, constant(shape), False)
    parts = [
        ops.unsqueeze(constant(a) if isinstance(a, int) else a, constant(0))
        for a in shape
    ]
    return ops.reshape(value, ops.concat(parts, 0), False)


def transposed(value: Value, order: list[int]) -> Value:
    return ops.transpose(value, constant(order))


def length(value: Value, axis: int = 0) -> Value:
    """The length of an axis as a scalar node."""
    return ops.gather(ops.shape_of(value), constant(axis), constant(0))


def selective_scan(inputs: Inputs, channels: int, states: int) -> tuple[Value, Value]:
    """Mamba-1: h ← exp(Δ·A)·h + Δ·x ⊗ B, y = C·h, token by token in one TensorIterator.

    x, dt (time, channels); a (channels, states); b, c (time, states); state (states, channels).
    Returns y (time, channels) and the last state. The decay differs for every channel and state, so there is no
    matrix form; the iterator is the same for one token and for many. Channels are innermost, because vector units
    run along them.
    """
    x, dt, a, b, c, state = inputs
    step = ops.parameter([1, channels], np.float32)
    inflow = ops.parameter([1, channels], np.float32)
    into = ops.parameter([1, states], np.float32)
    out_of = ops.parameter([1, states], np.float32)
    rates = ops.parameter([states, channels], np.float32)
    before = ops.parameter([states, channels], np.float32)
    decay = ops.exp(ops.multiply(step, rates))
    added = ops.multiply(reshaped(into, [states, 1]), inflow)
    after = ops.add(ops.multiply(decay, before), added)
    y = ops.matmul(out_of, after, False, False)
    body = ov.Model(
        [ops.result(after), ops.result(y)],
        [step, inflow, into, out_of, rates, before],
        "selective_scan",
    )
    sliced = ((step, dt), (inflow, ops.multiply(x, dt)), (into, b), (out_of, c))
    return _iterated(body, (before, state), sliced, [(rates, transposed(a, [1, 0]))])


def unrolled_selective_scan(
    inputs: Inputs, states: int, tokens: int
) -> tuple[Value, Value]:
    """Mamba-1 for a few tokens whose number is fixed: no iterator, for devices that cannot run one."""
    x, dt, a, b, c, state = inputs
    rates = transposed(a, [1, 0])
    inflow = ops.multiply(x, dt)
    outputs = []
    for token in range(tokens):
        step, flow, into, out_of = (
            ops.slice(
                v, constant([token]), constant([token + 1]), constant([1]), constant([0])
            )
            for v in (dt, inflow, b, c)
        )
        added = ops.multiply(reshaped(into, [states, 1]), flow)
        state = ops.add(ops.multiply(ops.exp(ops.multiply(step, rates)), state), added)
        outputs.append(ops.matmul(out_of, state, False, False))
    return ops.concat(outputs, 0) if tokens > 1 else outputs[0], state


def delta_scan(inputs: Inputs, shape: tuple[int, ...]) -> tuple[Value, Value]:
    """Gated delta rule: S ← e^g·S, then S ← S + k ⊗ β(v − k·S), y = q·S, token by token in one TensorIterator.

    query, key (time, heads, keys); value (time, heads, values); g (time, heads) or (time, heads, keys); beta
    (time, heads); state (heads, keys, values). Returns y (time, heads, values) and the last state.
    """
    query, key, value, g, beta, state = inputs
    heads, keys, values = shape
    widths = {"query": keys, "key": keys, "value": values, "beta": 1}
    decays = keys if g.get_partial_shape().rank.get_length() == 3 else 1
    tokens = {
        name: ops.parameter([1, heads, 1, width], np.float32)
        for name, width in widths.items()
    }
    decay = ops.parameter([1, heads, decays, 1], np.float32)
    before = ops.parameter([heads, keys, values], np.float32)
    q, k, v, b = (
        reshaped(tokens[name], [heads, 1, width]) for name, width in widths.items()
    )
    faded = ops.multiply(before, reshaped(decay, [heads, decays, 1]))
    news = ops.multiply(ops.subtract(v, ops.matmul(k, faded, False, False)), b)
    after = ops.add(faded, ops.multiply(reshaped(tokens["key"], [heads, keys, 1]), news))
    y = reshaped(ops.matmul(q, after, False, False), [1, heads, values])
    body = ov.Model(
        [ops.result(after), ops.result(y)],
        [*tokens.values(), decay, before],
        "delta_scan",
    )
    sliced = [
        (tokens[name], reshaped(whole, [-1, heads, 1, widths[name]]))
        for name, whole in {
            "query": query,
            "key": key,
            "value": value,
            "beta": beta,
        }.items()
    ]
    sliced.append((decay, reshaped(ops.exp(g), [-1, heads, decays, 1])))
    return _iterated(body, (before, state), sliced)


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
    k, v = (ops.parameter([1, channels], np.float32) for _ in range(2))
    w, u = (ops.parameter([channels], np.float32) for _ in range(2))
    before = ops.parameter([3, channels], np.float32)
    top, bottom, most = (
        ops.gather(before, constant([row]), constant(0)) for row in range(3)
    )

    def joined(old: Value, new: Value) -> tuple[Value, Value, Value]:
        largest = ops.maximum(old, new)
        a = ops.exp(ops.subtract(old, largest))
        b = ops.exp(ops.subtract(new, largest))
        return (
            ops.add(ops.multiply(a, top), ops.multiply(b, v)),
            ops.add(ops.multiply(a, bottom), b),
            largest,
        )

    numerator, denominator, _ = joined(most, ops.add(k, u))
    y = ops.divide(numerator, denominator)
    after = ops.concat(list(joined(ops.add(most, w), k)), 0)
    body = ov.Model(
        [ops.result(after), ops.result(y)], [k, v, w, u, before], "weighted_scan"
    )
    return _iterated(
        body, (before, state), [(k, key), (v, value)], [(w, decay), (u, first)]
    )


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
    chunk = ops.minimum(time, constant(CHUNK))
    chunks = ops.divide(ops.subtract(ops.add(time, chunk), constant(1)), chunk)
    padding = ops.subtract(ops.multiply(chunks, chunk), time)

    # A padded token has Δ = 0: it decays nothing and adds nothing.
    inflow = _padded(ops.multiply(x, ops.unsqueeze(dt, constant(2))), padding, 3)
    rates = _padded(ops.multiply(dt, ops.unsqueeze(a, constant(0))), padding, 2)
    inflow = reshaped(inflow, [chunks, chunk, groups, per_group * width])
    into = transposed(
        reshaped(_padded(b, padding, 3), [chunks, chunk, groups, states]), [0, 2, 1, 3]
    )
    out_of = transposed(
        reshaped(_padded(c, padding, 3), [chunks, chunk, groups, states]), [0, 2, 1, 3]
    )
    rates = transposed(
        reshaped(rates, [chunks, chunk, heads]), [0, 2, 1]
    )  # (chunks, heads, chunk)
    cumulative = ops.cum_sum(rates, constant(2))

    # Within the chunk: token t hears token s ≤ t, damped by exp(cumulative[t] − cumulative[s]). The minimum keeps the
    # upper triangle, which the mask drops, from overflowing.
    difference = ops.subtract(
        ops.unsqueeze(cumulative, constant(3)), ops.unsqueeze(cumulative, constant(2))
    )  # (chunks, heads, t, s)
    damping = ops.exp(ops.minimum(difference, constant(0, np.float32)))
    scores = ops.multiply(ops.matmul(out_of, into, False, True), _causal_mask(chunk))
    damping = reshaped(damping, [chunks, groups, per_group, chunk, chunk])
    weights = reshaped(
        ops.multiply(damping, ops.unsqueeze(scores, constant(2))),
        [chunks, heads, chunk, chunk],
    )
    by_head = transposed(reshaped(inflow, [chunks, chunk, heads, width]), [0, 2, 1, 3])
    within = transposed(
        ops.matmul(weights, by_head, False, False), [0, 2, 1, 3]
    )  # (chunks, t, heads, width)

    # What each chunk adds to the state by its end, and how much of the state before it survives.
    total = ops.gather(cumulative, constant([-1]), constant(2))  # (chunks, heads, 1)
    to_end = transposed(ops.exp(ops.subtract(total, cumulative)), [0, 2, 1])
    damped = ops.multiply(
        reshaped(inflow, [chunks, chunk, groups, per_group, width]),
        reshaped(to_end, [chunks, chunk, groups, per_group, 1]),
    )
    damped = transposed(
        reshaped(damped, [chunks, chunk, groups, per_group * width]), [0, 2, 1, 3]
    )
    added = reshaped(
        ops.matmul(into, damped, True, False), [chunks, groups, states, per_group, width]
    )
    surviving = reshaped(ops.exp(total), [chunks, groups, 1, per_group, 1])
    if single:
        entering = state
        last = ops.add(ops.multiply(surviving, state), added)
    else:
        entering, last = _between_chunks(surviving, added, state, sizes.state_shape)

    # What the state at the chunk's start contributes to token t.
    carried = ops.matmul(
        out_of,
        reshaped(entering, [chunks, groups, states, per_group * width]),
        False,
        False,
    )
    carried = transposed(
        reshaped(carried, [chunks, groups, chunk, per_group, width]), [0, 2, 1, 3, 4]
    )
    from_start = reshaped(
        transposed(ops.exp(cumulative), [0, 2, 1]), [chunks, chunk, groups, per_group, 1]
    )
    carried = reshaped(ops.multiply(carried, from_start), [chunks, chunk, heads, width])
    y = reshaped(ops.add(within, carried), [-1, heads, width])
    end = ops.unsqueeze(time, constant(0))
    return ops.slice(y, constant([0]), end, constant([1]), constant([0])), last


def one_token_scan(inputs: Inputs, sizes: Sizes) -> tuple[Value, Value]:
    """Mamba-2's recurrence for exactly one token; shapes as in `chunked_scan`."""
    x, dt, a, b, c, state = inputs
    heads, width, states, groups = sizes
    columns = heads // groups * width
    decay = ops.exp(ops.multiply(dt, ops.unsqueeze(a, constant(0))))
    row = constant(np.ones((1, width)), np.float32)
    row.set_friendly_name("kl_lens/ones")
    over_width = ops.multiply(reshaped(decay, [heads, 1]), row)
    inflow = reshaped(
        ops.multiply(x, ops.unsqueeze(dt, constant(2))), [groups, 1, columns]
    )
    added = ops.multiply(reshaped(b, [groups, states, 1]), inflow)
    before = reshaped(state, [groups, states, columns])
    after = ops.add(
        ops.multiply(reshaped(over_width, [groups, 1, columns]), before), added
    )
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
        y, last = scan(tuple(parameters), sizes)
        return ov.Model([ops.result(y), ops.result(last)], parameters, name)

    single = branch(one_token_scan, "one_token")
    chunked = branch(chunked_scan, "many_tokens")
    choice = ops.if_op(_output(ops.equal(length(inputs[0]), constant(1))))
    choice.set_then_body(single)
    choice.set_else_body(chunked)
    for value, for_one, for_many in zip(
        inputs, single.get_parameters(), chunked.get_parameters(), strict=True
    ):
        choice.set_input(_output(value), for_one, for_many)
    y = choice.set_output(single.results[0], chunked.results[0])
    last = choice.set_output(single.results[1], chunked.results[1])
    return y, last


def _between_chunks(
    surviving: Value, added: Value, state: Value, shape: tuple[int, ...]
) -> tuple[Value, Value]:
    """The state before each chunk, and after the last one."""
    keep = ops.parameter([1, shape[1], 1, shape[3], 1], np.float32)
    plus = ops.parameter(list(shape), np.float32)
    before = ops.parameter(list(shape), np.float32)
    after = ops.add(ops.multiply(keep, before), plus)
    body = ov.Model(
        [ops.result(after), ops.result(before)], [keep, plus, before], "between_chunks"
    )
    return _iterated(body, (before, state), [(keep, surviving), (plus, added)])


def _iterated(
    body: ov.Model,
    state: tuple[Value, Value],
    sliced: Sequence[tuple[Value, Value]],
    whole: Sequence[tuple[Value, Value]] = (),
) -> tuple[Value, Value]:
    """Runs a body over the first axis of what is sliced (pairs of its parameter and a value). Its first result is the
    next state, its second what this step gives. Returns all steps' results and the last state."""
    iterator = ops.tensor_iterator()
    iterator.set_body(body)
    for parameter, value in sliced:
        iterator.set_sliced_input(parameter, _output(value), 0, 1, 1, -1, 0)
    for parameter, value in whole:
        iterator.set_invariant_input(parameter, _output(value))
    iterator.set_merged_input(state[0], _output(state[1]), body.results[0].output(0))
    last = iterator.get_iter_value(body.results[0].output(0), -1)
    return iterator.get_concatenated_slices(
        body.results[1].output(0), 0, 1, 1, -1, 0
    ), last


def _padded(value: Value, padding: Value, rank: int) -> Value:
    """Appends zeros after the last token."""
    begin = constant([0] * rank)
    end = ops.concat([ops.unsqueeze(padding, constant(0)), constant([0] * (rank - 1))], 0)
    return ops.pad(value, begin, end, "constant", constant(0, np.float32))


def _causal_mask(chunk: Value) -> Value:
    full = constant(np.tril(np.ones((CHUNK, CHUNK))), np.float32)
    full.set_friendly_name("kl_lens/causal_mask")
    end = ops.unsqueeze(chunk, constant(0))
    return ops.slice(
        full,
        constant([0, 0]),
        ops.concat([end, end], 0),
        constant([1, 1]),
        constant([0, 1]),
    )


def _output(value: Value) -> ov.Output:
    return value if isinstance(value, ov.Output) else value.output(0)


def replace(old: Value, new: Value) -> None:
    """Whatever reads the one reads the other from now on."""
    for reader in _output(old).get_target_inputs():
        reader.replace_source_output(_output(new))
