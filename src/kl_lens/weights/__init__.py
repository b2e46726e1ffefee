"""(component, recipe) → the exact bytes that are measured, evaluated and exported."""

from kl_lens.weights.store import DISK_BUDGET, GivenWeights, Statistics, WeightSource, WeightStore, state_of

__all__ = ["DISK_BUDGET", "GivenWeights", "Statistics", "WeightSource", "WeightStore", "state_of"]
