"""Weights as things: (component, recipe) → the very bytes that are measured, evaluated and shipped."""

from kl_lens.weights.store import GivenWeights, Statistics, WeightSource, WeightStore, bytes_digest, state_of

__all__ = ["GivenWeights", "Statistics", "WeightSource", "WeightStore", "bytes_digest", "state_of"]
