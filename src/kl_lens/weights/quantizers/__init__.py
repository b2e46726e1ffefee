"""Quantizers. A format says which numbers can be stored; a quantizer chooses one of them for every weight.

To add one, write a file that ends in `register(…)` and import it here.
"""

from kl_lens.weights.quantizers.quantizer import (
    TUNED,
    InputStatistics,
    Quantizer,
    get_quantizer,
    known_quantizers,
    register,
)

# Importing a module registers its quantizers.
from kl_lens.weights.quantizers import methods as methods  # isort: skip

__all__ = [
    "TUNED",
    "InputStatistics",
    "Quantizer",
    "get_quantizer",
    "known_quantizers",
    "register",
]
