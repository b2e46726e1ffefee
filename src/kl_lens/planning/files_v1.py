"""Plan files of version 1, where facts were prose and loose notes: read once into the fields of today."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FIELDS = {
    "version", "name", "made_by", "predicted_kl", "bytes", "bits_per_weight", "fingerprint", "assignment", "notes",
}  # fmt: skip
_MEASURED = (
    "measured_kl",
    "measured_kl_standard_error",
    "perplexity",
    "perplexity_standard_error",
    "original_perplexity",
    "measured_on",
)
_FAMILY_OF = {"the paper": "paper", "exact": "exact", "Pareto": "exact", "greedy": "greedy"}


def modern(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same content with the fields of version 2."""
    notes = dict(content.get("notes") or {})
    made_by = content.get("made_by")
    fields = {
        "family": _family(str(content.get("name") or ""), str(made_by or ""), notes),
        "measured": _measured(notes),
        "limits": notes.pop("limits", None),
        "refined_from": notes.pop("refined_from", None),
    }
    for key in _MEASURED:
        notes.pop(key, None)
    return {**content, **fields, "notes": notes}


def _family(name: str, made_by: str, notes: Mapping[str, Any]) -> str:
    if name.startswith(("uniform_", "gpu_uniform_", "gpu_int4_uniform_")):
        return "uniform"
    if "refined_from" in notes or "refined" in made_by:
        return "refined"
    return next((family for start, family in _FAMILY_OF.items() if made_by.startswith(start)), "other")


def _measured(notes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Whole or not at all: what version 1 called `perplexity` may be a greedy search's own."""
    kl, perplexity, original = (notes.get(k) for k in ("measured_kl", "perplexity", "original_perplexity"))
    place = re.fullmatch(r"(.*), ([0-9]{1,9}) windows?", str(notes.get("measured_on")))
    if kl is None or perplexity is None or original is None or place is None:
        return None
    return {
        "kl": {"value": kl, "standard_error": notes.get("measured_kl_standard_error")},
        "perplexity": {"value": perplexity, "standard_error": notes.get("perplexity_standard_error")},
        "original_perplexity": original,
        "text": place[1],
        "windows": int(place[2]),
    }
