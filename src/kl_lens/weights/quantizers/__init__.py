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

# Importing a module registers its quantizers, in the order in which they are listed for users.
# isort: off
from kl_lens.weights.quantizers import nearest as nearest
from kl_lens.weights.quantizers import search as search
from kl_lens.weights.quantizers import importance as importance
from kl_lens.weights.quantizers import gptq as gptq
# isort: on

register(nearest.Tuned())

__all__ = ["TUNED", "InputStatistics", "Quantizer", "get_quantizer", "known_quantizers", "register"]
