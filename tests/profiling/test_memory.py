"""Peak memory of a fresh process, against what the system itself says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

ALLOCATED = 300 << 20
# Allocates, lets go, and only then asks: it is the peak that counts.
PROGRAM = f"""
import numpy as np, psutil
from kl_lens.profiling.memory import resident
base = resident("VmRSS")
block = np.ones({ALLOCATED}, np.uint8)
alive = psutil.Process().memory_info().rss
del block
print(base, resident("VmHWM"), alive)
"""


def test_the_peak_is_what_psutil_and_time_see() -> None:
    command = [sys.executable, "-c", PROGRAM]
    timer = shutil.which("time")
    if timer:
        command = [timer, "-v", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    base, peak, alive = (int(word) for word in done.stdout.split())
    assert peak == pytest.approx(alive, rel=0.05)
    assert peak - base == pytest.approx(ALLOCATED, rel=0.05)
    if timer:
        seen = 1024 * int(re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)[1])
        assert peak == pytest.approx(seen, rel=0.05)
