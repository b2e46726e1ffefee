"""How large the report of a large model is, and how quickly its slider answers, in a real Chromium.

    python benchmarks/report_page.py [RUN]

Without a run it makes one up: 401 components × 8 recipes. Every reaction is what the page itself measures, from the
slider's event to the last element written; the proof is what follows when the slider rests.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from kl_lens.reporting import write_report
from kl_lens.runs import Run

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.reporting.sample import make_large_run

PLACES = 40
# Moves the slider, waits until the plan is proven, and gives back (reaction, proof) in milliseconds.
MOVE = """async (value) => {
    const place = document.getElementById("explorer"), slider = document.getElementById("budget");
    slider.value = value;
    slider.dispatchEvent(new Event("input"));
    const reaction = Number(place.dataset.ms), begin = performance.now();
    while (!place.dataset.settled) await new Promise((done) => setTimeout(done, 1));
    return [reaction, performance.now() - begin];
}"""


def main() -> None:
    with tempfile.TemporaryDirectory() as place, sync_playwright() as driver:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else make_large_run(Path(place) / "run")
        with Run.open(folder) as run:
            path = write_report(run, Path(place) / "report.html")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(path.as_uri())
        page.evaluate(MOVE, 500)  # the first one compiles
        times = [page.evaluate(MOVE, 1000 * i // PLACES) for i in range(PLACES)]
        browser.close()
        print(f"{path.stat().st_size:,} bytes")
    for name, values in zip(("reaction", "until proven"), zip(*times, strict=True), strict=True):
        print(f"{name}: median {statistics.median(values):.1f} ms, largest {max(values):.1f} ms of {PLACES}")


if __name__ == "__main__":
    main()
