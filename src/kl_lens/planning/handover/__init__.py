"""Plans for other tools."""

from kl_lens.planning.handover.tools import TOOLS, Handover, write_recipe

__all__ = ["TOOLS", "Handover", "write_recipe"]
