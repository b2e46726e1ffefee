"""A third target in one file and one registration, taken through every verb: nothing else knows its name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kl_lens.base.errors import TargetError, UnsupportedError
from kl_lens.base.files import bytes_digest
from kl_lens.cli.main import main
from kl_lens.run.folder import Run
from kl_lens.run.records import Artifact, ExportedTensor, Plan
from kl_lens.run.subjects import current_profiles, current_results
from kl_lens.targets import (
    SessionSettings,
    Target,
    describe_target,
    get_target,
    register,
    target_of,
)
from kl_lens.targets.exporting import choices, record, write_beside
from kl_lens.targets.registry import TARGETS
from kl_lens.targets.session import Logits, Session
from kl_lens.weights.recipes import FP16
from tests.cli.conftest import tiny_folder as tiny_folder

NAME = "toy"
WEIGHTS = "weights.npz"


class ToySession(Session):
    """The stored weights in transformers; every call runs the whole sequence."""

    @property
    def description(self) -> dict[str, Any]:
        return {"library": NAME, "device": "CPU", "threads": 1}

    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with np.load(folder / WEIGHTS) as stored:
            weights = {name: torch.from_numpy(stored[name]) for name in stored}
        self._model.load_state_dict(weights)
        self.path = folder
        self.vocabulary = int(config.vocab_size)
        self.reset()

    def reset(self) -> None:
        self._fed = list[int]()

    close = reset

    @torch.no_grad()
    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        self._fed += tokens
        logits = self._model(torch.tensor([self._fed]), use_cache=False).logits[0]
        return logits[-len(tokens) :].numpy()


class ToyTarget(Target):
    """Every format's float32 values in one npz file."""

    name = extra = NAME
    title = "Toy"
    packages = ("torch",)
    loads = (".npz",)
    formats = ("int4", "int8", FP16)

    def write(self, model: Any, plan: Plan, folder: Path, **options: Any) -> Artifact:
        arrays = {
            name: tensor.numpy() for name, tensor in model.model.state_dict().items()
        }
        chosen = choices(model, plan, self.fit)
        tensors = []
        for component in model.anatomy.components:
            name, weight = component.name, component.weight
            choice = chosen[name]
            stored = choice.recipe if component.quantizable else "fp32"
            if component.quantizable:
                arrays[weight] = model.weights.values(name, stored).numpy()
            data = arrays[weight]
            names = name, weight, choice.planned, stored
            digest = bytes_digest(data)
            tensors.append(ExportedTensor(*names, data.nbytes, choice.reason, digest))
        np.savez(folder / WEIGHTS, **arrays)
        model.config.save_pretrained(folder)
        write_beside(model, folder)
        return record(NAME, model, plan, folder, tensors)

    def open(self, path: Path, settings: SessionSettings) -> ToySession:
        return ToySession(path)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    register(NAME, f"{__name__}:ToyTarget")
    yield
    TARGETS.pop(NAME)


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured, planned, exported, evaluated, benchmarked and reported, by the verbs themselves."""
    run = tmp_path_factory.mktemp("toy") / "run"
    for command in (
        f"measure {tiny_folder} --text {tiny_folder}/text.txt --windows 2 --window-length 32",
        "plan --max-bpw 9 --name small",
        "plan --uniform fp16",
        f"export --target {NAME}",
        f"evaluate --target torch,{NAME} --perplexity wikitext2:test --divergence --window-length 32 --windows 2",
        f"benchmark --target {NAME} --threads 1 --prompt-lengths 4 --new-tokens 2 --repeats 1",
        "report",
    ):
        assert main([*command.split(), "--run", str(run)]) == 0
    return run


def test_the_file_holds_what_was_planned(finished: Path) -> None:
    folder = finished / "artifacts" / NAME / "small"
    record = json.loads((folder / "artifact.json").read_text())
    plan = json.loads((finished / "plans/small.json").read_text())["assignment"]
    realised = {t["component"]: t["realised"] for t in record["tensors"]}
    assert {name: realised[name] for name in plan} == plan
    assert record["target"] == target_of(folder).name == NAME
    with np.load(folder / WEIGHTS) as shipped:
        assert all(
            bytes_digest(shipped[t["runtime_name"]]) == t["digest"]
            for t in record["tensors"]
        )


def test_it_is_judged_beside_pytorch_timed_against_its_own_fp16_and_reported(
    finished: Path,
) -> None:
    with Run.open(finished) as run:
        verdicts = [
            result.value["verdict"] for result in current_results(run, "agreement")
        ]
        profiles = {profile.subject.label: profile for profile in current_profiles(run)}
    assert verdicts == ["agrees"] * 2
    assert set(profiles) == {f"{NAME}/small", f"{NAME}/uniform_fp16"}
    small = profiles[f"{NAME}/small"]
    assert (small.subject.target, small.subject.plan) == (NAME, "small")
    assert small.settings["ratios_to"] == f"{NAME}/uniform_fp16"
    assert small.peak_memory_bytes > 0
    assert small.bound == {}  # Toy does not say what a token reads
    assert f"small, {get_target(NAME).title}" in (finished / "report.html").read_text()


def test_what_it_does_not_have_is_said() -> None:
    with pytest.raises(
        UnsupportedError, match="does not model what Toy does to activations"
    ):
        get_target(NAME).activations(None, {})  # type: ignore[arg-type]


def test_unknown_targets_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match=r"no target is called 'onnx'; there are .*toy"):
        get_target("onnx")
    monkeypatch.setattr(ToyTarget, "packages", ("no_such_package",))
    assert describe_target(NAME).title == "Toy"
    with pytest.raises(UnsupportedError, match=r"pip install 'kl-lens\[toy\]'"):
        get_target(NAME)
