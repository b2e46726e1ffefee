"""One original of two blocks with everything that a hybrid has, a sound file for each runtime, and a short autopsy."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
import transformers

from kl_lens.autopsy import perform_autopsy
from kl_lens.judging import prepare
from kl_lens.model import LoadedModel, load
from kl_lens.run.autopsies import Autopsy
from kl_lens.run.records import Plan
from kl_lens.targets import dissected, get_target
from kl_lens.weights.recipes import Recipe, fitting_recipe
from tests.hostile.aside import forked_quarantine

BLOCKS = 2
FORMATS = {
    "gguf": "q8_0",
    "openvino": "fp16",
    "mlx": "affine8-g64",
    "compressed-tensors": "int4-g32",
}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}<|assistant|>"
Sound = Callable[..., Path]
Examine = Callable[..., Autopsy]


@pytest.fixture(scope="module", autouse=True)
def tried_by_forks() -> Iterator[None]:
    with forked_quarantine(
        "kl_lens.targets.gguf.dissection", "kl_lens.targets.openvino.dissection"
    ):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first blocks of the reference hybrid: real weights, eight heads, a special token and a chat template."""
    path = tmp_path_factory.mktemp("original") / "hybrid"
    whole = load("reference:hybrid")
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = BLOCKS
    short = type(whole.model)(config)
    names = short.state_dict().keys()
    short.load_state_dict(
        {name: value for name, value in whole.model.state_dict().items() if name in names}
    )
    short.half().save_pretrained(path)
    content = json.loads(whole.tokenizer.backend_tokenizer.to_str())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    content["added_tokens"].append(
        content["added_tokens"][0]
        | {"id": content["model"]["vocab"].pop(last), "content": "<|user|>"}
    )
    content["model"]["merges"] = [
        pair for pair in content["model"]["merges"] if "".join(pair) != last
    ]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(content)),
        eos_token="<|endoftext|>",
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(folder: Path) -> LoadedModel:
    return load(str(folder))


@pytest.fixture(scope="session")
def sound(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """A file without faults, made once; `others`: formats of components by the end of their name."""
    files: dict[str, Path] = {}

    def export(
        target: str,
        fmt: str = "",
        others: dict[str, str] | None = None,
        of: LoadedModel | None = None,
    ) -> Path:
        original = of or model
        fmt = fmt or FORMATS[target]
        key = f"{id(original)} {target} {fmt} {others}"
        if key not in files:
            wanted = {c.name: (fmt, c.shape) for c in original.anatomy.candidates}
            for end, ending_format in (others or {}).items():
                wanted |= {
                    name: (ending_format, shape)
                    for name, (_, shape) in wanted.items()
                    if name.endswith(end)
                }
            recipes = {
                name: str(fitting_recipe(Recipe(f), shape)[0])
                for name, (f, shape) in wanted.items()
            }
            files[key] = tmp_path_factory.mktemp("sound") / "model"
            get_target(target).export(original, Plan("test", recipes, "test"), files[key])
        return files[key]

    return export


@pytest.fixture
def copied(sound: Sound, tmp_path: Path) -> Sound:
    """A copy that a fault can be planted in, with the record beside it."""
    return lambda *args, **options: Path(
        shutil.copytree(sound(*args, **options), tmp_path / "model")
    )


@pytest.fixture(scope="session")
def examine(model: LoadedModel) -> Examine:
    text = prepare("wikitext2:test", model.task, window=64, limit=1)

    def autopsy(path: Path, against: LoadedModel | None = model) -> Autopsy:
        target, dissection = dissected(path)
        return perform_autopsy(
            dissection, target, against, text if against else None, threads=1
        )

    return autopsy
