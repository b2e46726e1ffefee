"""Fast forward-only kernels for state-space layers on CPU, each beside its plain reference."""

from kl_lens.checkpoints.kernels.swap import fast_kernels, replaceable

__all__ = ["fast_kernels", "replaceable"]
