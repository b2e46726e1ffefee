"""A small sweep gives the numbers of another processor, within rounding.

`python -m tests.measuring.test_processors` prints those of the machine it runs on; `processors.json` came from an
x86_64 machine (Xeon, torch 2.11.0). Neoverse-N1 with torch 2.13.0 differs by 5e-8 nats at the most, 3e-4 of a KL.
"""

import json
import tempfile
from pathlib import Path

import pytest

from kl_lens.measuring.perturbation import find_candidates
from kl_lens.measuring.sweep import Sweep
from kl_lens.model import load
from kl_lens.run.folder import Run
from kl_lens.weights.recipes import Recipe
from tests.measuring.conftest import some_windows

STORED = Path(__file__).parent / "processors.json"


def numbers(folder: Path) -> dict[str, float]:
    """Component and format → KL, for two blocks of the embedded Mamba on two windows of 64 tokens."""
    model = load("reference:mamba")
    candidates, _ = find_candidates(
        model.anatomy, [Recipe("int4"), Recipe("int8")], r"layers\.[05]\."
    )
    with Run.create(folder) as run:
        Sweep(model, run).measure(candidates, some_windows(2, 64))
        measurements = run.measurements()
    return {
        f"{m.component} {m.format}": m.metrics["kl_teacher_to_student"].value
        for m in measurements
    }


def test_the_numbers_of_another_processor(tmp_path: Path) -> None:
    expected = json.loads(STORED.read_text())
    assert len(expected) == 16
    # A KL is a small difference of large logits: float32's rounding shows as some 1e-7 nats whatever its size.
    assert numbers(tmp_path) == pytest.approx(expected, rel=1e-3, abs=2e-7)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(numbers(Path(scratch) / "run"), indent=1))
