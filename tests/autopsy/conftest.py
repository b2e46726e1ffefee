"""The reference models, their files in sound condition, and a short autopsy of any file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kl_lens.checkpoints import LoadedModel, load
from kl_lens.evaluation import prepare
from kl_lens.evaluation.autopsy import Autopsy, perform_autopsy
from kl_lens.recipes import Recipe, fitting_recipe
from kl_lens.records import Plan
from kl_lens.targets import dissected, get_target
from tests.hostile.aside import forked_quarantine

BLOCKS = 3
Exported = Callable[..., Path]
Examine = Callable[..., Autopsy]


def only_fault(found: Autopsy, step: str, *words: str) -> None:
    """One fault, of this step, in these words; and it is the headline."""
    faults = [(f.step, f.words) for f in found.faults]
    assert [f.step for f in found.faults] == [step], faults
    for word in words:
        assert word in found.faults[0].words, faults
    assert found.faults[0].advice
    assert found.headline.startswith(found.faults[0].words)


def shortened(model: LoadedModel) -> LoadedModel:
    """Only its first blocks: a bad model, but one with real weights, that runs in no time."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = BLOCKS
    short = type(model.model)(config).eval()
    kept = short.state_dict().keys()
    short.load_state_dict({name: value for name, value in model.model.state_dict().items() if name in kept})
    return LoadedModel(model.name, model.folder, short, model.tokenizer)


@pytest.fixture(scope="module", autouse=True)
def tried_by_forks() -> Iterator[None]:
    with forked_quarantine("kl_lens.targets.gguf.quarantine", "kl_lens.targets.openvino.dissection"):
        yield


@pytest.fixture(scope="session")
def models() -> Callable[[str], LoadedModel]:
    opened: dict[str, LoadedModel] = {}

    def model(name: str) -> LoadedModel:
        if name not in opened:
            opened[name] = shortened(load(f"reference:{name}"))
        return opened[name]

    return model


@pytest.fixture(scope="session")
def exported(models: Callable[[str], LoadedModel], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A sound file, made once; `others`: formats of components by the end of their name."""
    made: dict[str, Path] = {}

    def export(name: str | LoadedModel, target: str, fmt: str, others: dict[str, str] | None = None) -> Path:
        model = models(name) if isinstance(name, str) else name
        key = f"{model.name} {id(model)} {target} {fmt} {others}"
        if key not in made:
            wanted = {c.name: fmt for c in model.anatomy.candidates}
            for end, given in (others or {}).items():
                wanted |= {component: given for component in wanted if component.endswith(end)}
            shapes = {c.name: c.shape for c in model.anatomy.candidates}
            fitting = {n: str(fitting_recipe(Recipe(f), shapes[n])[0]) for n, f in wanted.items()}
            folder = tmp_path_factory.mktemp("sound") / "model"
            get_target(target).export(model, Plan("test", fitting, "test"), folder)
            made[key] = next(folder.glob("*.gguf")) if target == "gguf" else folder
        return made[key]

    return export


@pytest.fixture(scope="session")
def examine(models: Callable[[str], LoadedModel]) -> Examine:
    def autopsy(path: Path, name: str | LoadedModel | None = "mamba") -> Autopsy:
        target, dissection = dissected(path)
        if name is None:
            return perform_autopsy(dissection, target, threads=1)
        model = models(name) if isinstance(name, str) else name
        text = prepare("wikitext2:test", model.task, window=64, limit=2)
        return perform_autopsy(dissection, target, model, text, threads=1)

    return autopsy


@pytest.fixture(scope="session")
def with_outliers() -> Callable[[float], LoadedModel]:
    """A Mamba with channels of huge values that its next matrix ignores: exact arithmetic does not notice them."""

    def make(size: float) -> LoadedModel:
        model = shortened(load("reference:mamba"))
        with torch.no_grad():
            for block in range(BLOCKS):
                mixer = model.model.get_submodule(f"backbone.layers.{block}.mixer")
                mixer.D[::32] = size
                mixer.out_proj.weight[:, ::32] = 0.0
        return model

    return make
