"""Speed, memory and size of exported files, and how fast they could be at most.

Example:
    >>> report = InUse(UseSettings(repeats=3)).measure([Path("out/mamba-4mb")])
    >>> report.profiles[0].timings["tokens_per_second"].median
"""
