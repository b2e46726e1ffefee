"""The sections of the report. Each reads a RunView and gives its part of the page."""
