"""What is wrong with a file: its weights, then a chain of measurements one step apart, then a verdict in words."""

from kl_lens.autopsy.performing import perform_autopsy
from kl_lens.autopsy.verdict import shown

__all__ = [
    "perform_autopsy",
    "shown",
]
