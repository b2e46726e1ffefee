"""Calibration: statistics of every component's inputs on a text, gathered once and stored in the run folder."""

from kl_lens.calibration.gathering import gather
from kl_lens.calibration.in_order import gather_in_order
from kl_lens.calibration.stored import IN_ORDER, RunOrder, RunStatistics, StoredStatistics

__all__ = ["IN_ORDER", "RunOrder", "RunStatistics", "StoredStatistics", "gather", "gather_in_order"]
