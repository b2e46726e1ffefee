"""Words for image classifiers: what is counted in images has classes, and no next token."""

from __future__ import annotations

import re
from collections.abc import Callable

# In order: longer phrases first. Whole phrases of our own, so that names of models and files are left alone.
_PHRASES = (
    ("true next token", "true class"),
    ("most likely next token", "most likely class"),
    ("next token", "class"),
    ("same top token", "same top class"),
    ("token perplexity", "perplexity over classes"),
    ("per token", "per image"),
    ("over tokens", "over images"),
    ("held-out text", "held-out images"),
    ("calibration text", "calibration images"),
    ("evaluation text", "evaluation images"),
    ("test text", "test images"),
)
_COUNTED = re.compile(r"(?<=\d) tokens\b")


def of_tokens(text: str) -> str:
    return text


def of_images(text: str) -> str:
    """A part of the page, told of images."""
    for ours, theirs in _PHRASES:
        text = text.replace(ours, theirs).replace(ours.capitalize(), theirs.capitalize())
    return _COUNTED.sub(" images", text)


TOLD: dict[object, Callable[[str], str]] = {"image": of_images}  # by task
