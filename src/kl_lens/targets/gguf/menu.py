"""The formats of this target by name."""

from __future__ import annotations

from kl_lens.targets.gguf.writer import FLOAT32
from kl_lens.weights.formats import FP16

FORMATS = (  # that plans for this target may use
    FP16, "q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "q4_1", "iq4_nl", "iq4_xs", "q3_k", "iq3_s", "iq3_xxs",
    "q2_k", "iq2_s", "iq2_xs", "iq2_xxs",
)  # fmt: skip
STAND_INS = (*FORMATS, "q5_0", "q5_1", FLOAT32)  # also in files: fallbacks and exact copies
ALIASES = {"f16": FP16, "f32": FLOAT32}  # llama.cpp's own spelling
