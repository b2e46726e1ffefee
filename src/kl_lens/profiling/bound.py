"""The memory bound: how fast an artifact could run if the machine only read what has to be read.

Generating one token reads every weight of the model once (of an untied embedding only one row, of a mixture of experts
only the chosen experts), the state of the state-space layers, and the keys and values of all earlier tokens. No runtime
can be faster than memory delivers these bytes:

    tokens/s ≤ read bandwidth / bytes per token

A prompt of N tokens reads the weights once, but multiplies with them N times (with the head only after the last token).
So its limit is a roofline: the larger of the time for the products and the time for the bytes,

    seconds ≥ max(2 × (parameters × N + head) / matmul rate, bytes / read bandwidth).

The matmul rate is that of float32. Integer kernels can beat it, and a model that fits into the caches is not read from
memory at all: then the share exceeds 1, and the bound says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from kl_lens.profiling.machine import Machine
from kl_lens.run.records import Quartiles
from kl_lens.targets.contents import Contents


def limits_hold(device: str) -> bool:
    """Whether the machine's limits apply to this device; GPUs and NPUs have their own memory and arithmetic."""
    return not device.upper().startswith(("GPU", "NPU"))


def decode_bound(
    contents: Contents, machine: Machine, *, context: float, tokens_per_second: float | None
) -> dict[str, float]:
    """Bytes per token, the bound on tokens/s, and the achieved share of it."""
    read = contents.bytes_per_token(context)
    bandwidth = machine.bandwidth.best
    bound = {
        "weight_bytes_per_token": contents.weight_bytes_per_token,
        "state_bytes_per_token": float(contents.state_bytes),
        "kv_bytes_per_token": contents.kv_bytes_per_position * context,
        "bytes_per_token": read,
        "context": float(context),
        "read_bandwidth": bandwidth,
        "tokens_per_second": bandwidth / read,
    }
    if machine.last_level_cache is not None:
        bound["last_level_cache_bytes"] = float(machine.last_level_cache)
        bound["fits_in_cache"] = float(read <= machine.last_level_cache)
    if tokens_per_second is not None:
        bound["share"] = tokens_per_second * read / bandwidth
        if machine.bandwidth_at_threads is not None:
            bound["read_bandwidth_at_threads"] = machine.bandwidth_at_threads.best
            bound["share_at_threads"] = tokens_per_second * read / machine.bandwidth_at_threads.best
    return bound


def prefill_seconds(contents: Contents, machine: Machine, tokens: int) -> float:
    """The shortest possible time for a prompt of `tokens` tokens."""
    products = 2 * (contents.body_parameters * tokens + contents.head_parameters) / machine.matmul_rate
    read = contents.weight_bytes_per_token + contents.state_bytes
    return max(products, read / machine.bandwidth.best)


def prefill_bound(contents: Contents, machine: Machine, timings: Mapping[str, Quartiles]) -> dict[str, float]:
    """For every timed prompt length: the shortest possible time, and its ratio to the measured one."""
    bound = {"matmul_rate": machine.matmul_rate}
    for name, spread in timings.items():
        if name.startswith("first_token_seconds@"):
            length = name.rpartition("@")[2]
            least = prefill_seconds(contents, machine, int(length))
            bound[f"prefill_seconds@{length}"] = least
            bound[f"prefill_share@{length}"] = least / spread.median
    return bound
