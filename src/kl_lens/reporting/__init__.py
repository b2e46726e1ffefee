"""The report: a run as one HTML file that any browser opens without a network."""

from kl_lens.reporting.page import write_report

__all__ = ["write_report"]
