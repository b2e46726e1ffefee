"""The limit: how fast an artifact could run if the machine did nothing but read what has to be read.

Generating one token reads every weight of the model once (an untied embedding only one row, a mixture of experts only
the experts that were chosen), the state of the state-space layers, and the keys and values of all earlier tokens.
No runtime can do it faster than that many bytes come out of memory:

    tokens/s ≤ read bandwidth / bytes per token

A prompt of N tokens reads the weights once for all, but multiplies with them N times (the head only behind the last
token), so its limit is a roofline: the larger of the time for the products and the time for the bytes,

    seconds ≥ max(2 × (parameters × N + head) / matmul rate, bytes / read bandwidth).

The rate is that of float32 products. Kernels that multiply integers can beat it, and a model that fits into the
caches is not read from memory at all: then a share exceeds 1, and the bound says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from kl_lens.profiling.machine import Machine
from kl_lens.records import Quartiles
from kl_lens.targets.contents import Contents


def limits_hold(device: str) -> bool:
    """Whether what was measured of the machine limits this device: others have memory or arithmetic of their own."""
    return not device.upper().startswith(("GPU", "NPU"))


def decode_bound(
    contents: Contents, machine: Machine, *, context: float, tokens_per_second: float | None
) -> dict[str, float]:
    """Bytes per token, the bound on tokens/s that follows, and the share of it that was achieved."""
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
    """The least time that a prompt of `tokens` tokens can take."""
    products = 2 * (contents.body_parameters * tokens + contents.head_parameters) / machine.matmul_rate
    read = contents.weight_bytes_per_token + contents.state_bytes
    return max(products, read / machine.bandwidth.best)


def prefill_bound(contents: Contents, machine: Machine, timings: Mapping[str, Quartiles]) -> dict[str, float]:
    """For every prompt length that was timed: the least seconds, and least over measured."""
    bound = {"matmul_rate": machine.matmul_rate}
    for name, spread in timings.items():
        if name.startswith("first_token_seconds@"):
            length = name.rpartition("@")[2]
            least = prefill_seconds(contents, machine, int(length))
            bound[f"prefill_seconds@{length}"] = least
            bound[f"prefill_share@{length}"] = least / spread.median
    return bound
