"""What several tests share: where things are, tiny models, a folder of any family."""

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from kl_lens.base.environment import set_defaults

set_defaults()  # before torch is loaded, as the command line does

import torch  # noqa: E402
import transformers  # noqa: E402

from kl_lens.profiling import benchmark, machine  # noqa: E402
from kl_lens.text import windows  # noqa: E402
from tests.families import tiny_model  # noqa: E402
from tests.hub_server import Hub, serving  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# The same examples every time. `./test --all` explores too, with `-m explores`.
EXPLORES = "KL_LENS_EXPLORE" in os.environ
# Folders whose files share what takes long to make. `--dist loadgroup` keeps each in one process, as it keeps files.
TOGETHER = ("openvino", "judging")
hypothesis.settings.register_profile(
    "same", derandomize=True, database=None, deadline=None
)
hypothesis.settings.register_profile(
    "explore", derandomize=False, deadline=None, max_examples=1_000
)
hypothesis.settings.load_profile("explore" if EXPLORES else "same")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.parent.name
        item.add_marker(
            pytest.mark.xdist_group(folder if folder in TOGETHER else item.path.stem)
        )
        if hasattr(getattr(item, "obj", None), "hypothesis"):
            item.add_marker("explores")


@pytest.fixture(scope="session", autouse=True)
def machine_and_texts_read_once() -> Iterator[None]:
    """The machine for all benchmarks, from little memory. Texts: the tokens of more of them are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "BUFFER_BYTES", 32 << 20)
        patch.setattr(windows, "_KEPT_STREAMS", 16)
        patch.setattr(
            benchmark, "read_bandwidth", functools.cache(benchmark.read_bandwidth)
        )
        yield


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub for the real client, whose cache is empty too."""
    with serving() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url
            + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
            "HF_HUB_DISABLE_XET": True,  # files travel over plain HTTP
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


@pytest.fixture
def shared() -> Path:
    """Larger models and data that stand beside a checkout on some machines."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared beside the checkout")
    return SHARED


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    """Saves a tiny model of a family as a Hugging Face folder."""

    def save(family: str, **options: object) -> Path:
        folder = tmp_path / family
        model = tiny_model(family)
        model.save_pretrained(folder, **options)
        return folder

    return save


@pytest.fixture
def remote_code_folder(tmp_path: Path) -> Path:
    """A checkpoint that brings its own Python code: parallel attention and state-space heads, meta tokens."""
    folder = tmp_path / "parallel_heads"
    shutil.copytree(
        ROOT / "tests/fixtures/parallel_heads",
        folder,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    config = {
        "model_type": "parallel_heads",
        "architectures": ["ParallelHeadsForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_parallel_heads.ParallelHeadsConfig",
            "AutoModelForCausalLM": "modeling_parallel_heads.ParallelHeadsForCausalLM",
        },
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True),
        trust_remote_code=True,
    )
    weights = {
        name: t.clone()
        for name, t in model.state_dict().items()
        if name != "lm_head.weight"
    }
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
