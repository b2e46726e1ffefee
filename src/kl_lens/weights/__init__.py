"""Weights as things: (component, recipe) → the very bytes that are measured, evaluated and shipped."""

from kl_lens.weights.store import Statistics, WeightSource, WeightStore

__all__ = ["Statistics", "WeightSource", "WeightStore"]
