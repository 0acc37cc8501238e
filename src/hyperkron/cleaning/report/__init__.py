"""A finished run as one web page that needs nothing else: ``write_report(folder)``."""

from hyperkron.cleaning.report.page import write_explanation, write_report

__all__ = ["write_explanation", "write_report"]
