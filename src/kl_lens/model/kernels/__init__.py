"""Fast forward-only kernels for state-space layers. Their plain references are in `tests/model/test_kernels.py`."""

from kl_lens.model.kernels.checking import Comparison, Watch
from kl_lens.model.kernels.swap import fast_kernels, replaceable

__all__ = ["Comparison", "Watch", "fast_kernels", "replaceable"]
