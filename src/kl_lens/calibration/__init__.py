"""Calibration: what text shows of every component's inputs, gathered once and kept in the run folder."""

from kl_lens.calibration.gathering import gather
from kl_lens.calibration.in_order import gather_in_order
from kl_lens.calibration.stored import IN_ORDER, RunOrder, RunStatistics, StoredStatistics

__all__ = ["IN_ORDER", "RunOrder", "RunStatistics", "StoredStatistics", "gather", "gather_in_order"]
