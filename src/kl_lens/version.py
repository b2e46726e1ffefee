"""The version of the package, and of what its numbers mean."""

__version__ = "0.1.0"
