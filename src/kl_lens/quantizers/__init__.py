"""Quantizers: how values are put on a format's grid. A format says which numbers can be stored; a quantizer chooses.

A new one is one file that ends in `register(…)`, and one import here.
"""

from kl_lens.quantizers.base import InputStatistics, Quantizer
from kl_lens.quantizers.registry import get_quantizer, known_quantizers, register

# Importing a module registers its quantizers, in the order in which people should see them.
# isort: off
from kl_lens.quantizers import nearest as nearest
from kl_lens.quantizers import search as search
from kl_lens.quantizers import importance as importance
from kl_lens.quantizers import gptq as gptq
# isort: on

__all__ = ["InputStatistics", "Quantizer", "get_quantizer", "known_quantizers", "register"]
