"""The commands as Python: `Study` has one method for each; every command has a settings class and a function.

Example:
    >>> study = Study("reference:mamba", folder="runs/mine")
    >>> study.measure(windows=8)
    >>> study.do(PaperSettings(run="runs/mine"))
"""
