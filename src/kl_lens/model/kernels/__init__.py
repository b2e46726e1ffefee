"""Fast forward-only kernels for state-space layers, each beside its plain reference."""

from kl_lens.model.kernels.checking import Comparison, Watch
from kl_lens.model.kernels.swap import fast_kernels, replaceable

__all__ = ["Comparison", "Watch", "fast_kernels", "replaceable"]
