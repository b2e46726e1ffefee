"""The code of examples/tour.ipynb runs, with less text; what it shows was made by running it."""

import json
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

CELLS = json.loads((ROOT / "examples/tour.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("gguf", "pandas"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "tour"}
    for cell in CODE:
        source = "".join(cell["source"]).replace(
            "WINDOWS, LENGTH = 4, 512", "WINDOWS, LENGTH = 2, 32"
        )
        exec(compile(source, "tour.ipynb", "exec"), names)
    printed = capsys.readouterr().out
    assert "predicted KL" in printed
    assert "kl_mean" in printed
    assert list(tmp_path.glob("runs/tour/artifacts/gguf/tour/*.gguf"))


def test_outputs_are_committed() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    pictures = [
        "".join(o["data"]["image/svg+xml"])
        for cell in CODE
        for o in cell["outputs"]
        if "image/svg+xml" in o.get("data", {})
    ]
    assert len(pictures) == 2
    assert all(len(picture) < 100_000 for picture in pictures)
