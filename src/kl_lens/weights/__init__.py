"""(component, recipe) → the exact bytes that are measured, evaluated and exported."""

from kl_lens.weights.store import GivenWeights, Statistics, WeightSource, WeightStore, state_of

__all__ = ["GivenWeights", "Statistics", "WeightSource", "WeightStore", "state_of"]
