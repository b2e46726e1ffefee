"""What is wrong with a file: its weights, then a chain of measurements one step apart, then a verdict in words."""

from kl_lens.autopsy.performing import perform_autopsy
from kl_lens.autopsy.verdict import Autopsy, Finding, Restored, Step, shown
from kl_lens.autopsy.weights import TensorReport

__all__ = [
    "Autopsy",
    "Finding",
    "Restored",
    "Step",
    "TensorReport",
    "perform_autopsy",
    "shown",
]
