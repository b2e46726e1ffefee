"""Plans in the languages of other tools, for those who quantize with an exporter of their own."""

from kl_lens.planning.handover.base import Handover
from kl_lens.planning.handover.registry import TOOLS, write_recipe

__all__ = ["TOOLS", "Handover", "write_recipe"]
