"""scripts/published.py makes checkpoints of published models, if the registries can be reached."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.docs.markdown import ROOT

SCRIPT = ROOT / "scripts/published.py"


@pytest.mark.slow
def test_a_published_model_tells_a_story(tmp_path: Path) -> None:
    folder = tmp_path / "stories15m"
    command = [sys.executable, str(SCRIPT), "stories15m", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True)
    if not folder.exists():
        pytest.skip(f"npm does not hand out the model: {process.stderr.strip()[-200:]}")
    assert "float32" in process.stdout
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("Once upon a time, there was a little", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    expected = "<s> Once upon a time, there was a little girl named Lily. She loved to play outside in the"
    assert tokenizer.decode(answer[0]) == expected


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "stories15m", str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "exists; give another folder or remove it" in refused.stderr
    assert not list(tmp_path.iterdir())
