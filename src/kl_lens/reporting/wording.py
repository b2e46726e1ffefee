"""The page's words for image classifiers: what is counted in images has classes, and no next token."""

from __future__ import annotations

import re
from dataclasses import replace

from kl_lens.reporting.markup import Html
from kl_lens.reporting.sections import Section

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
)
_COUNTED = re.compile(r"(?<=\d) tokens\b")


def for_images(section: Section) -> Section:
    """The same section, told of images."""
    if section.body is None:
        return section
    body = str(section.body)
    for ours, theirs in _PHRASES:
        body = body.replace(ours, theirs).replace(ours.capitalize(), theirs.capitalize())
    return replace(section, body=Html(_COUNTED.sub(" images", body)))
