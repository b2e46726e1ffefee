"""Opens a model: a folder, a hub id, `reference:NAME`, or a `mamba_ssm` folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from kl_lens.base.errors import CheckpointError, FormatError, one_line
from kl_lens.base.files import reference_path
from kl_lens.model import architectures, files, mamba_ssm
from kl_lens.model.anatomy import Anatomy, anatomy_of, groups_of, normalise_per_group
from kl_lens.model.chain import Chain, warn
from kl_lens.model.hub import Watch, download, pinned_name
from kl_lens.model.residency import (
    AUTO,
    DISK,
    MEMORY,
    Residency,
    belongs_on_disk,
    weightless,
)
from kl_lens.model.streaming import CheckpointTensors, join_twins
from kl_lens.model.tasks import (
    IMAGE,
    TEXT,
    ImageTask,
    LanguageTask,
    Task,
    model_type,
    task_of,
    vocabulary_size,
)
from kl_lens.run.records import Component
from kl_lens.text.images import DIGITS
from kl_lens.weights.store import DISK_BUDGET, WeightStore, state_of

REFERENCES = ("mamba", "mamba2", "hybrid", "hymba", "vision")
_LOADERS: dict[str, Any] = {
    TEXT: transformers.AutoModelForCausalLM,
    IMAGE: transformers.AutoModelForImageClassification,
}
_MARKED = re.compile(r"<.+>|\[.+\]")
_ENDS = ("<eos>", "</s>", "<|endoftext|>", "[EOS]", "[SEP]")
_LARGEST_TOKEN = 2**24  # sixty times the largest known vocabulary


@dataclass
class LoadedModel:
    """An opened model with its tokenizer, chain of blocks, anatomy and weight store."""

    name: str
    folder: Path
    model: torch.nn.Module
    tokenizer: Any | None
    layout: str = "transformers"
    source: str = ""  # argument of load() that opens it again
    tokenizer_source: str | None = None
    classifier: ImageTask | None = field(
        default=None, repr=False
    )  # of an image classifier
    residency: Residency | None = field(
        default=None, repr=False
    )  # if its weights stay on disk
    digest: str | None = field(
        default=None, repr=False
    )  # of its weights, where they were read one by one
    not_on_disk: str = field(
        default="", repr=False
    )  # why they could not stay there, if they should
    left_out: tuple[str, ...] = field(
        default=(), repr=False
    )  # stored tensors that are not in the model
    warn: Callable[[str], None] = field(
        default=warn, repr=False
    )  # hears of a kernel that is wrong

    def __post_init__(self) -> None:
        normalise_per_group(self.model)

    @property
    def task(self) -> Task:
        """What its batches are, and what is right."""
        return self.classifier or LanguageTask(
            self.tokenizer, self.name, vocabulary_size(self.model)
        )

    @cached_property
    def chain(self) -> Chain:
        return Chain(self.model, task=self.task, warn=lambda text: self.warn(text))

    @cached_property
    def anatomy(self) -> Anatomy:
        return anatomy_of(self.model, self.chain)

    @cached_property
    def weights(self) -> WeightStore:
        """The quantized weights of this model, for every use."""
        return WeightStore(self)

    def with_store(self, **store: Any) -> LoadedModel:
        """The same model with its own weight store; `store`: arguments of `WeightStore` besides the source. So one
        opened model can serve several runs without affecting each other."""
        # Room for a plan, its rivals and what else was measured: nothing is quantized twice.
        room = max(DISK_BUDGET, sum(4 * c.parameters for c in self.anatomy.candidates))
        twin = copy(self)
        twin.__dict__["weights"] = WeightStore(twin, **{"disk_budget": room, **store})
        return twin

    @property
    def config(self) -> Any:
        return self.model.config

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the configuration's shape and of every weight: two models with one fingerprint are one."""
        named = sorted(self.model.state_dict().items()) if self.digest is None else []
        # A run that was measured with transformers' norm over all groups is a run of another model.
        grouped = "-grouped-norm" if groups_of(self.config) > 1 else ""
        return (self.digest or files.weights_digest(named)) + grouped

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def weight(self, component: str) -> torch.Tensor:
        """The weight of a component that may be quantized; with `state`, this makes it a `WeightSource`."""
        entry = self.anatomy.component(component)
        if not entry.quantizable:
            raise FormatError(f"{component} cannot be quantized: {entry.reason}")
        return self.tensor(entry.weight)

    def state(self, component: str) -> Hashable:
        """Changes with the component's weight."""
        parameter = self.model.get_parameter(self.anatomy.component(component).weight)
        untouched = self.residency is not None and self.residency.is_untouched(parameter)
        return None if untouched else state_of(parameter)

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter's values, read from disk if they are not in memory."""
        parameter = self.model.get_parameter(name)
        return (
            parameter.detach()
            if self.residency is None
            else self.residency.original(parameter)
        )

    def present(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Within the block, the weights of `module` are in memory: a block's, or for the whole model those outside the
        blocks."""
        return nullcontext() if self.residency is None else self.residency.present(module)

    def require_memory(self, what: str) -> None:
        """Raises if the weights are not all in memory; `what` needs them."""
        if self.residency is not None:
            raise CheckpointError(f"{self.name}: {what} needs weights='memory'")

    def parameters_of(self, component: Component) -> list[torch.nn.Parameter]:
        """Every parameter object with this weight: one, unless a library ties by storage."""
        suffix = component.weight.removeprefix(component.name)
        names = [component.weight, *(other + suffix for other in component.tied_with)]
        unique = {id(p): p for p in (self.model.get_parameter(name) for name in names)}
        return list(unique.values())

    @property
    def unread_tokens(self) -> str | None:
        """A line about tokens that the embedding has no row for; None: there are none."""
        rows = (
            None
            if self.tokenizer is None or self.classifier
            else vocabulary_size(self.model)
        )
        known = {} if rows is None else self.tokenizer.get_vocab()  # type: ignore[union-attr]
        beyond = sorted((token, text) for text, token in known.items() if token >= rows)
        if not beyond:
            return None
        token, text = beyond[0]
        return (
            f"the embedding has {rows} rows, and the tokenizer {len(beyond)} tokens more, from {text!r} ({token}) on: "
            "text with one of them is refused; if this is not the model's own tokenizer, give that with --tokenizer"
        )

    @cached_property
    def further_heads(self) -> dict[str, files.Stored]:
        """The files' tensors of heads for further tokens (`mtp.*`): exports keep them where a runtime has a place."""
        stored = files.stored_tensors(self.folder) if self.left_out else ()
        return {
            tensor.name: tensor for tensor in stored if tensor.name.startswith("mtp.")
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how it was opened."""
        if not self.left_out:
            return self.anatomy.notes
        what = f"{self.left_out[0]}{files.and_more(self.left_out)}"
        line = f"Not opened: {what}. Heads for further tokens and vision towers are no part of the language model."
        return (*self.anatomy.notes, line)

    def require_tokenizer(self) -> Any:
        return LanguageTask(self.tokenizer, self.name).require_tokenizer()


def load(
    source: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    trust_remote_code: bool = False,
    task: str | None = None,
    images: str | None = None,
    weights: str = MEMORY,
    memory_budget: int | None = None,
) -> LoadedModel:
    """Opens a causal language model, or an image classifier.

    Args:
        source: a folder, a hub id (`org/name` or `org/name@revision`), or `reference:mamba|mamba2|hybrid|hymba|vision`.
        dtype: data type for computing. Use float32: half precision hides the damage of 8 bits in its own noise.
        device: where to compute; `auto`: the GPU if there is one and the model fits.
        revision: branch, tag or commit on the hub.
        tokenizer: folder, `tokenizer.json` or hub id, if the model has none or you want another.
        trust_remote_code: run the Python code that comes with the checkpoint. Off unless you read that code.
        task: `text` or `image` (default: from config.json).
        images: default folder of images for a classifier.
        weights: `memory`; `disk`: read one block at a time; `auto`: `disk` for a language model that does not fit.
            `disk` works for measuring, statistics and quantizing only.
        memory_budget: bytes for such a model (default: free memory).

    Raises:
        CheckpointError: says in one line what is wrong and what to do.

    Example:
        >>> model = load("reference:mamba")
        >>> len(model.chain), len(model.anatomy.candidates)
    """
    folder = model_folder(source, revision=revision)
    config = files.read_config(folder)
    is_folder = os.path.isdir(os.path.expanduser(source))
    known = (
        pinned_name(folder) if _is_on_hub(source) else str(source)
    )  # opens the same weights again
    name = folder.name if is_folder else known.partition("@")[0]
    chosen = _dtype(dtype)
    place = _device(device, folder, chosen, weights)
    files.check_sizes(folder, config)
    files.refuse_quantized(folder, config)
    architectures.register(str(config.get("model_type")))
    kind = task_of(config, task)
    layout = "mamba_ssm" if mamba_ssm.is_layout(config) else "transformers"
    checkpoint = _Checkpoint(folder, config, kind, chosen, place, trust_remote_code)
    residency = None
    read = None
    not_on_disk = ""
    if kind == TEXT and belongs_on_disk(folder, chosen, place, weights, memory_budget):
        try:
            read = residency = checkpoint.streamed(memory_budget)
        except CheckpointError as error:
            if weights == DISK:
                raise
            not_on_disk = str(error)
    to_gpu = kind == TEXT and place.type == "cuda" and chosen == torch.float32
    if read is None and (to_gpu or layout == "mamba_ssm"):
        try:
            read = checkpoint.streamed(None, whole=True)
        except torch.OutOfMemoryError as error:
            raise CheckpointError(
                f"{name} does not fit onto {place} ({one_line(error)})"
            ) from error
        except (CheckpointError, NotImplementedError):
            if layout == "mamba_ssm":
                raise
            # torch raises the latter for a parameter that the files lack. transformers fills such ones in foreign code,
            # and opens other files, through the host's memory; if it cannot, it says what is wrong.
    try:
        model: Any = checkpoint.loaded() if read is None else read.model.eval()
        model.requires_grad_(False)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CheckpointError(
            f"{name} cannot be moved to {place} ({one_line(error)})"
        ) from error
    return LoadedModel(
        name=name,
        folder=folder,
        model=model,
        tokenizer=load_tokenizer(folder, tokenizer, trust_remote_code),
        layout=layout,
        source=str(folder.resolve()) if is_folder else known,
        tokenizer_source=None if tokenizer is None else str(tokenizer),
        classifier=ImageTask.of(folder, config, images or own_images(source))
        if kind == IMAGE
        else None,
        residency=residency,
        digest=None if read is None else read.fingerprint,
        not_on_disk=not_on_disk,
        left_out=tuple(
            t.name for t in files.stored_tensors(folder) if files.LEFT_OUT.match(t.name)
        ),
    )


def own_images(source: str | Path) -> str | None:
    """The images that ship with a model."""
    return DIGITS if str(source) == "reference:vision" else None


def model_folder(
    source: str | Path, *, revision: str | None = None, watch: Watch | None = None
) -> Path:
    """The model's local folder; downloads from the hub if it is not in the cache."""
    text = str(source)
    if revision and not _is_on_hub(source):
        raise CheckpointError(
            f"revision {revision} is for hub ids only, and {text} is none"
        )
    if text.startswith("reference:"):
        name = text.partition(":")[2]
        if name not in REFERENCES:
            raise CheckpointError(
                f"there is no reference model {name!r}; known are {', '.join(REFERENCES)}"
            )
        return reference_path(name)
    # Not pathlib's expanduser and is_dir: they raise for an unknown user or a name that is too long.
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise CheckpointError(
            f"{text} is a file; give the folder with config.json and the weights"
        )
    return download(text, revision, watch=watch)


def pinned(source: str | Path, revision: str | None, watch: Watch) -> str:
    """A source whose content cannot change: of a hub id, `org/name@commit`, downloaded. Others stay as they are."""
    folder = model_folder(source, revision=revision, watch=watch)
    return pinned_name(folder) if _is_on_hub(source) else str(source)


def _is_on_hub(source: str | Path) -> bool:
    return not (
        str(source).startswith("reference:") or os.path.isdir(os.path.expanduser(source))
    )


@dataclass(frozen=True)
class _Checkpoint:
    """A folder, and how it is opened."""

    folder: Path
    config: dict[str, Any]
    task: str
    dtype: torch.dtype
    device: torch.device
    trusted: bool = False

    def streamed(self, budget: int | None, *, whole: bool = False) -> Residency:
        """A language model whose matrices are read from disk when needed; `whole`: now, straight to the device."""
        files.refuse_quantized(self.folder, self.config, "use --weights memory")
        parsed, _ = self._parsed()
        try:
            with weightless():
                model = _LOADERS[TEXT].from_config(
                    parsed, dtype=self.dtype, trust_remote_code=self.trusted
                )
        except (
            Exception
        ) as error:  # what a library raises over a strange setting can be anything
            raise CheckpointError(
                why_not_loaded(self.folder, self.config, error)
            ) from error
        return Residency(model, self.folder, self.dtype, self.device, budget, whole=whole)

    def loaded(self) -> torch.nn.Module:
        """By transformers."""
        parsed, empty = self._parsed()
        try:
            model, info = _LOADERS[self.task].from_pretrained(
                self.folder,
                config=parsed,
                dtype=self.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                trust_remote_code=self.trusted,
            )
        except Exception as error:  # as above
            if self.task == TEXT and isinstance(error, RuntimeError):
                CheckpointTensors(
                    self.folder, empty
                ).close()  # names what transformers cannot join
            raise CheckpointError(
                why_not_loaded(self.folder, self.config, error)
            ) from error
        found = {kind: info[f"{kind}_keys"] for kind in ("missing", "mismatched")}
        files.refuse_misfits(self.folder, **found, unused=info["unexpected_keys"])
        if files.quant_method(self.config):
            for name, tensor in model.state_dict().items():
                if files.is_quantized(
                    name, kind := str(tensor.dtype).removeprefix("torch.")
                ):
                    raise CheckpointError(
                        f"{self.folder}: {name} stays {kind}; {files.ORIGINAL}"
                    )
            model._weight_conversions = (
                None  # they would quantize what is converted or saved from here
            )
        files.refuse_broken_numbers(self.folder, model.state_dict().items())
        if self.task == TEXT:
            join_twins(
                model,
                lambda one, two: model.get_parameter(one).equal(model.get_parameter(two)),
            )
        return model.to(self.device).eval()

    def _parsed(self) -> tuple[Any, Any]:
        """The configuration as transformers reads it, and its model without weights. Raises if the first does not fit
        the files."""
        folder = self.folder
        config = self.config
        is_ssm = mamba_ssm.is_layout(config)
        kind = model_type(config)
        known = is_ssm or kind in transformers.CONFIG_MAPPING
        if "auto_map" in config and not self.trusted and not known:
            code = config["auto_map"].get("AutoModelForCausalLM", "auto_map")
            raise CheckpointError(
                f"{folder} has its own code ({code}): read it, then --trust-remote-code"
            )
        if "auto_map" not in config and not known:
            raise CheckpointError(
                f"{folder / 'config.json'}: transformers {transformers.__version__} does not know model_type {kind!r}; "
                "update transformers, or use a checkpoint with its own code (--trust-remote-code)"
            )
        try:
            parsed = (
                mamba_ssm.configuration(folder, config)
                if is_ssm
                else transformers.AutoConfig.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=self.trusted
                )
            )
            with torch.device("meta"):  # names and shapes only
                empty = _LOADERS[self.task].from_config(
                    parsed, trust_remote_code=self.trusted
                )
        except CheckpointError:
            raise
        except Exception as error:  # as above
            raise CheckpointError(why_not_loaded(folder, config, error)) from error
        wanted = sum(p.numel() for p in empty.parameters())
        stored = files.weight_bytes(folder)
        # Before memory is allocated: no checkpoint stores a parameter in less than two bits.
        if wanted > 4 * stored:
            raise CheckpointError(
                f"{folder}: config.json describes {wanted:,} parameters, but the weights have only {stored:,} bytes; "
                f"{files.BELONG}"
            )
        if files.quant_method(config) in ("fp8", "mxfp4"):
            parsed.quantization_config["dequantize"] = True  # with a GPU too
        if getattr(parsed, "rescale_every", 0) and self.dtype != torch.float16:
            # RWKV halves its hidden states and weights every few blocks, so that float16 does not overflow.
            parsed.rescale_every = 0  # the same function with the weights of the file
        return parsed, empty


def why_not_loaded(folder: Path, config: dict[str, Any], error: Exception) -> str:
    """One line about a library's error over a checkpoint."""
    if isinstance(
        error, KeyError
    ):  # an unknown name, for example of an activation function
        for name, value in config.items():
            if isinstance(value, str) and error.args == (value,):
                return f"{folder / 'config.json'}: {name} is {value!r}, which transformers does not know"
    if method := files.quant_method(config):
        return (
            f"{folder}: the weights are already quantized ({method}), and transformers cannot turn them into floats "
            f"({one_line(error)}); {files.ORIGINAL}"
        )
    return f"{folder} could not be loaded: {type(error).__name__}: {one_line(error)}"


def load_tokenizer(
    folder: Path, override: str | Path | None, trust_remote_code: bool
) -> Any | None:
    """The tokenizer of a checkpoint, or the one at `override`: a folder, a tokenizer.json, a list of tokens (.txt), a
    hub id."""
    place = Path(override) if override is not None else folder
    is_file = os.path.isfile(place)
    if override is not None and not is_file and not os.path.isdir(place):
        place = download(str(override), weights=False)  # weights may be gigabytes
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not is_file and not any((place / name).exists() for name in names):
        if override is None:
            return None
        raise CheckpointError(
            f"{override} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)"
        )
    try:
        if is_file and place.suffix == ".txt":
            tokenizer: Any = listed_tokenizer(place)
        elif is_file:
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(place))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                place, local_files_only=True, trust_remote_code=trust_remote_code
            )
            # Some classes bring their own pattern: a Qwen 3.5 whose files name Qwen2Tokenizer would be split as Qwen 2.
            file = place / names[0]
            fast = transformers.PreTrainedTokenizerFast
            if isinstance(tokenizer, fast) and file.is_file():
                used = _patterns(tokenizer.backend_tokenizer.to_str())
                if used != _patterns(file.read_text(encoding="utf-8")):
                    tokenizer = fast.from_pretrained(place, local_files_only=True)
        # Tokenizers fill all gaps below a huge token id, which takes gigabytes.
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest > _LARGEST_TOKEN:
            raise ValueError(
                f"it has a token with the id {largest}, larger than any vocabulary"
            )
        tokenizer("a")  # some settings only matter once it is used
        return tokenizer
    except (
        Exception
    ) as error:  # tokenizers raises bare Exception on a broken tokenizer.json
        raise CheckpointError(
            f"the tokenizer in {place} could not be read: {one_line(error)}"
        ) from error


def _patterns(specification: str) -> list[str]:
    """The patterns at which a tokenizer.json splits text."""
    step = json.loads(specification).get("pre_tokenizer") or {}
    return [
        each["pattern"]["Regex"]
        for each in step.get("pretokenizers", [step])
        if "Regex" in each.get("pattern", ())
    ]


def listed_tokenizer(path: Path) -> transformers.PreTrainedTokenizerFast:
    """From a list of tokens, one a line in the order of their ids: letters, and longer tokens such as `<eos>`. Nothing
    is merged. Characters that are not listed are dropped, here and in llama.cpp; text with such letters is refused."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if bad := [
        line for line in lines if not line or not line.isascii() or lines.count(line) > 1
    ]:
        raise ValueError(
            f"line {lines.index(bad[0]) + 1}, {bad[0]!r}, is empty, there twice, or not ASCII"
        )
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    single = {
        line: bytewise.pre_tokenize_str(line)[0][0] for line in lines if len(line) == 1
    }
    vocabulary = {single.get(line, line): index for index, line in enumerate(lines)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = bytewise
    backend.decoder = decoders.ByteLevel()
    ends = [line for line in lines if line in _ENDS]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **({"eos_token": ends[0]} if ends else {})
    )
    longer = [line for line in lines if line not in single]
    for special in (True, False):
        some = [each for each in longer if bool(_MARKED.fullmatch(each)) == special]
        tokenizer.add_tokens(
            [tokenizers.AddedToken(t, special=special, normalized=False) for t in some]
        )
    return tokenizer


def _device(
    device: str | torch.device, folder: Path, dtype: torch.dtype, weights: str = MEMORY
) -> torch.device:
    """A torch device that exists; `auto`: the GPU, unless there is none or the whole model does not fit."""
    if device == AUTO:
        gpu = torch.device("cuda")
        fits = torch.cuda.is_available() and not (
            weights == MEMORY and belongs_on_disk(folder, dtype, gpu, AUTO, None)
        )
        device = gpu if fits else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CheckpointError(
            f"--device {device}: torch has none here ({one_line(error, 120)})"
        ) from error
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)  # Triton uses the current device
    return chosen


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    named = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise CheckpointError(
            f"{dtype!r} is not a floating-point dtype; use float32, bfloat16 or float16"
        )
    return named
