"""Calibration: statistics of every component's inputs on a text, gathered once and stored in the run folder."""

from kl_lens.measuring.statistics.gathering import gather
from kl_lens.measuring.statistics.stored import StoredStatistics

__all__ = ["StoredStatistics", "gather"]
