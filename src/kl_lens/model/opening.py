"""Opens a model: a folder, a hub id, `reference:NAME`, or a `mamba_ssm` folder."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from kl_lens.base.errors import CheckpointError, FormatError, one_line
from kl_lens.base.files import reference_path
from kl_lens.base.lazy import OPENERS
from kl_lens.model import architectures, files, mamba_ssm
from kl_lens.model.anatomy import (
    Anatomy,
    anatomy_of,
    groups_of,
    normalise_per_group,
    turn_matrices,
)
from kl_lens.model.beginning import Beginning
from kl_lens.model.chain import Chain, warn
from kl_lens.model.hub import Watch, download, pinned_name
from kl_lens.model.images import ImageTask, is_classifier, own_images
from kl_lens.model.residency import (
    AUTO,
    DISK,
    MEMORY,
    Residency,
    belongs_on_disk,
    weightless,
)
from kl_lens.model.streaming import CheckpointTensors, join_twins
from kl_lens.model.tasks import LanguageTask, Task, vocabulary_size
from kl_lens.model.tokenizer import load_tokenizer
from kl_lens.run.positions import context_of
from kl_lens.run.records import Component
from kl_lens.run.subjects import file_digest
from kl_lens.weights.store import DISK_BUDGET, WeightStore, state_of

REFERENCES = ("mamba", "mamba2", "hybrid", "hymba", "vision")
# What torch raises for a device that it lacks, or that has no room.
_DEVICES = ("cpu", "cuda")  # not Apple's mps, which nobody compared with the CPU
_DEVICE_ERRORS = (RuntimeError, AssertionError, NotImplementedError)


@dataclass(repr=False)
class LoadedModel:
    """An opened model with its tokenizer, chain of blocks, anatomy and weight store."""

    name: str
    folder: Path
    model: nn.Module
    tokenizer: Any | None
    layout: str = "transformers"
    source: str = ""  # argument of load() that opens it again
    tokenizer_source: str | None = None
    classifier: ImageTask | None = None  # of an image classifier
    residency: Residency | None = None  # if its weights stay on disk
    digest: str | None = None  # of its weights, if they were read one by one
    not_on_disk: str = ""  # why they could not stay there, if they should
    left_out: tuple[files.Stored, ...] = ()  # tensors that are not in the model
    template: str | None = None  # a file of the same model, like which others are made
    original: str = (
        ""  # what numbers compare with, if not the weights as they were trained
    )
    warn: Callable[[str], None] = warn  # hears of a kernel that is wrong
    beginning: Beginning = field(default_factory=partial(Beginning, None))  # of texts

    def __post_init__(self) -> None:
        normalise_per_group(self.model)
        turn_matrices(self.model)
        if self.classifier is None and self.beginning.tokenizer is not self.tokenizer:
            self.beginning = Beginning(self.tokenizer)

    @property
    def task(self) -> Task:
        """What its batches are, and what is right."""
        return self.classifier or LanguageTask(
            self.tokenizer,
            self.name,
            vocabulary_size(self.model),
            context_of(self.config),
            partial(self.beginning.settle, self),
            self.beginning.settled,
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

    @cached_property
    def template_digest(self) -> str | None:
        return file_digest(Path(self.template)) if self.template else None

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

    def weight(self, component: str) -> Tensor:
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

    def tensor(self, name: str) -> Tensor:
        """A parameter's values, read from disk if they are not in memory."""
        parameter = self.model.get_parameter(name)
        if self.residency is None:
            return parameter.detach()
        return self.residency.original(parameter)

    def present(self, module: nn.Module) -> AbstractContextManager[None]:
        """Within the block, the weights of `module` are in memory: a block's, or for the whole model those outside the
        blocks."""
        return nullcontext() if self.residency is None else self.residency.present(module)

    def require_memory(self, activity: str) -> None:
        """Raises if the weights are not all in memory; `activity` needs them."""
        if self.residency is not None:
            raise CheckpointError(f"{self.name}: {activity} needs weights='memory'")

    def parameters_of(self, component: Component) -> list[torch.nn.Parameter]:
        """Every parameter object with this weight: one, unless a library ties by storage."""
        suffix = component.weight.removeprefix(component.name)
        names = [component.weight, *(name + suffix for name in component.tied_with)]
        unique = {id(p): p for p in (self.model.get_parameter(name) for name in names)}
        return list(unique.values())

    @property
    def unread_tokens(self) -> str | None:
        """A line about tokens that the embedding has no row for; None: there are none."""
        if self.tokenizer is None or self.classifier:
            return None
        rows = vocabulary_size(self.model)
        vocabulary = self.tokenizer.get_vocab().items()
        beyond = sorted((token, text) for text, token in vocabulary if token >= rows)
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
        return {
            tensor.name: tensor
            for tensor in self.left_out
            if tensor.name.startswith("mtp.")
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how it was opened."""
        notes = (*self.anatomy.notes, *filter(None, [self.original]))
        if not self.left_out:
            return notes
        names = f"{self.left_out[0].name}{files.and_more(self.left_out)}"
        line = f"Not opened: {names}. Heads for further tokens and vision towers are no part of the language model."
        return (*notes, line)

    def require_tokenizer(self) -> Any:
        return LanguageTask(self.tokenizer, self.name).require_tokenizer()


def load(
    source: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
    tokenizer: str | Path | None = None,
    trust_remote_code: bool = False,
    images: str | None = None,
    weights: str = MEMORY,
    memory_budget: int | None = None,
    bos: str = AUTO,
    template: str | Path | None = None,
) -> LoadedModel:
    """Opens a causal language model, or an image classifier.

    Args:
        source: a folder, a hub id (`org/name` or `org/name@revision`), or `reference:mamba|mamba2|hybrid|hymba|vision`.
        dtype: data type for computing. Use float32: half precision hides the damage of 8 bits in its own noise.
        device: where to compute; `auto`: the GPU if there is one and the model fits.
        tokenizer: folder, `tokenizer.json` or hub id, if the model has none or you want another.
        trust_remote_code: run the Python code that comes with the checkpoint. Off unless you read that code.
        images: default folder of images, for an image classifier.
        weights: `memory`; `disk`: read one block at a time; `auto`: `disk` for a language model that does not fit.
            `disk` works for measuring, statistics and quantizing only.
        memory_budget: bytes for such a model (default: free memory).
        bos: `yes`, `no`: whether texts begin with BOS; `auto`: as the tokenizer says, or as two windows show.
        template: a 16-bit GGUF file of the same model, like which GGUF files are made.

    Raises:
        CheckpointError: says in one line what is wrong and what to do.

    Example:
        >>> model = load("reference:mamba")
        >>> len(model.chain), len(model.anatomy.candidates)
    """
    folder = model_folder(source)
    config = files.read_config(folder)
    foreign = files.FOREIGN.get(folder)
    place = foreign.path if foreign else folder
    is_local = os.path.exists(os.path.expanduser(source))
    # Opens the same weights again.
    identity = pinned_name(folder) if _is_on_hub(source) else str(source)
    compute_dtype = _dtype(dtype)
    images = images or own_images(source)
    name = place.stem if foreign else place.name
    if not is_local:
        name = identity.partition("@")[0]
    checkpoint = _Checkpoint(
        name=name,
        folder=folder,
        config=config,
        classifier=ImageTask.of(folder, config, images)
        if images or is_classifier(config)
        else None,
        dtype=compute_dtype,
        device=_device(device, folder, compute_dtype, weights),
        trusted=trust_remote_code,
    )
    opened = checkpoint.opened(weights, memory_budget)
    reader = load_tokenizer(folder, tokenizer, trust_remote_code)
    return replace(
        opened,
        tokenizer=reader,
        beginning=Beginning(None if checkpoint.classifier else reader, bos),
        source=str(place.resolve()) if is_local else identity,
        original=foreign.original if foreign else "",
        tokenizer_source=None if tokenizer is None else str(tokenizer),
        template=_absolute(template),
    )


def _absolute(template: str | Path | None) -> str | None:
    if template is None:
        return None
    path = Path(os.path.expanduser(template))
    if not path.is_file():
        raise CheckpointError(f"--template {template}: no such file; give a .gguf")
    return str(path.resolve())


def model_folder(source: str | Path, *, watch: Watch | None = None) -> Path:
    """The model's local folder; downloads from the hub if it is not in the cache."""
    text = str(source)
    if text.startswith("reference:"):
        name = text.partition(":")[2]
        if name not in REFERENCES:
            raise CheckpointError(
                f"there is no reference model {name!r}; known are {', '.join(REFERENCES)}"
            )
        return reference_path(name)
    # Not pathlib's expanduser and is_dir: they raise for an unknown user or a name that is too long.
    path = Path(os.path.expanduser(text))
    if file := next((file for file in _files(path) if file.suffix in OPENERS), None):
        module, _, function = OPENERS[file.suffix].partition(":")
        folder: Path = getattr(importlib.import_module(module), function)(file)
        return folder
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise CheckpointError(
            f"{text} is a file; give the folder with config.json and the weights, or a .gguf"
        )
    return download(text, watch=watch)


def _files(path: Path) -> list[Path]:
    """The file, or those in a folder that is no checkpoint."""
    if os.path.isfile(path):
        return [path]
    is_checkpoint = os.path.isfile(path / "config.json") or not os.path.isdir(path)
    return [] if is_checkpoint else sorted(path.iterdir())


def pinned(source: str | Path, watch: Watch) -> str:
    """A source whose content cannot change: of a hub id, `org/name@commit`, downloaded. Others stay as they are."""
    folder = model_folder(source, watch=watch)
    return pinned_name(folder) if _is_on_hub(source) else str(source)


def _is_on_hub(source: str | Path) -> bool:
    is_local = os.path.exists(os.path.expanduser(source))
    return not (str(source).startswith("reference:") or is_local)


@dataclass(frozen=True)
class _Checkpoint:
    """A folder, and how it is opened."""

    name: str
    folder: Path
    config: dict[str, Any]
    classifier: ImageTask | None
    dtype: torch.dtype
    device: torch.device
    trusted: bool

    def opened(self, weights: str, budget: int | None) -> LoadedModel:
        files.check_sizes(self.folder, self.config)
        files.refuse_quantized(self.folder, self.config)
        architectures.register(str(self.config.get("model_type")))
        residency, not_on_disk = self._on_disk(weights, budget)
        reading = residency or self._read_directly()
        with files.refusing(
            f"{self.name} cannot be moved to {self.device}", _DEVICE_ERRORS
        ):
            model = self._loaded() if reading is None else reading.model.eval()
            model.requires_grad_(False)
        return LoadedModel(
            self.name,
            self.folder,
            model,
            None,
            layout="mamba_ssm" if self._is_ssm else "transformers",
            classifier=self.classifier,
            residency=residency,
            digest=None if reading is None else reading.fingerprint,
            not_on_disk=not_on_disk,
            left_out=tuple(
                tensor
                for tensor in files.stored_tensors(self.folder)
                if files.LEFT_OUT.match(tensor.name)
            ),
        )

    @property
    def _is_ssm(self) -> bool:
        return mamba_ssm.is_layout(self.config)

    @property
    def _class(self) -> Any:
        if self.classifier:
            return transformers.AutoModelForImageClassification
        return transformers.AutoModelForCausalLM

    def _on_disk(self, weights: str, budget: int | None) -> tuple[Residency | None, str]:
        """A language model whose weights stay on disk, if they belong there; else why they cannot, if they should."""
        stays = not self.classifier and belongs_on_disk(
            self.folder, self.dtype, self.device, weights, budget
        )
        if not stays:
            return None, ""
        try:
            return self._streamed(budget), ""
        except CheckpointError as error:
            if weights == DISK:
                raise
            return None, str(error)

    def _read_directly(self) -> Residency | None:
        """A language model that is read straight to the device; None: transformers has to load it."""
        on_gpu = self.device.type == "cuda" and self.dtype == torch.float32
        if self.folder in files.FOREIGN:
            return self._streamed(None, whole=True)
        if not self._is_ssm and (self.classifier or not on_gpu):
            return None
        try:
            return self._streamed(None, whole=True)
        except torch.OutOfMemoryError as error:
            raise CheckpointError(
                f"{self.name} does not fit onto {self.device} ({one_line(error)})"
            ) from error
        except (CheckpointError, NotImplementedError):
            if self._is_ssm:
                raise
            # torch raises the latter for a parameter that the files lack. transformers fills such ones in foreign code,
            # and opens other files, through the host's memory; if it cannot, it says what is wrong.
            return None

    def _streamed(self, budget: int | None, *, whole: bool = False) -> Residency:
        """A language model whose matrices are read from disk when needed; `whole`: now, straight to the device."""
        files.refuse_quantized(self.folder, self.config, "use --weights memory")
        parsed, _ = self._parsed()
        with files.refusing(self._why_not_loaded), weightless():
            model = self._class.from_config(
                parsed, dtype=self.dtype, trust_remote_code=self.trusted
            )
        turn_matrices(model)
        return Residency(model, self.folder, self.dtype, self.device, budget, whole=whole)

    def _loaded(self) -> nn.Module:
        """By transformers."""
        parsed, empty = self._parsed()
        with files.refusing(self._why_not_loaded):
            try:
                model, info = self._class.from_pretrained(
                    self.folder,
                    config=parsed,
                    dtype=self.dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    local_files_only=True,
                    trust_remote_code=self.trusted,
                )
            except RuntimeError:
                if not self.classifier:  # names what transformers cannot join
                    CheckpointTensors(self.folder, empty).close()
                raise
        files.refuse_misfits(
            self.folder,
            missing=info["missing_keys"],
            unused=info["unexpected_keys"],
            mismatched=info["mismatched_keys"],
        )
        if files.quant_method(self.config):
            for name, tensor in model.state_dict().items():
                kind = files.dtype_name(tensor)
                if files.is_quantized(name, kind):
                    raise CheckpointError(
                        f"{self.folder}: {name} stays {kind}; {files.ORIGINAL}"
                    )
            # They would quantize what is converted or saved from here.
            model._weight_conversions = None
        files.refuse_broken_numbers(self.folder, model.state_dict().items())
        if not self.classifier:
            join_twins(
                model,
                lambda *names: torch.equal(*map(model.get_parameter, names)),
            )
        return model.to(self.device).eval()

    def _parsed(self) -> tuple[Any, Any]:
        """The configuration as transformers reads it, and its model without weights. Raises if the first does not fit
        the files."""
        folder = self.folder
        config = self.config
        kind = config.get("model_type")
        is_known = self._is_ssm or kind in transformers.CONFIG_MAPPING
        if "auto_map" in config and not self.trusted and not is_known:
            code = config["auto_map"].get("AutoModelForCausalLM", "auto_map")
            raise CheckpointError(
                f"{folder} has its own code ({code}): read it, then --trust-remote-code"
            )
        if "auto_map" not in config and not is_known:
            raise CheckpointError(
                f"{folder / 'config.json'}: transformers {transformers.__version__} does not know model_type {kind!r}; "
                "update transformers, or use a checkpoint with its own code (--trust-remote-code)"
            )
        with files.refusing(self._why_not_loaded):
            parsed: Any = (
                mamba_ssm.configuration(folder, config)
                if self._is_ssm
                else transformers.AutoConfig.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=self.trusted
                )
            )
            with torch.device("meta"):  # names and shapes only
                empty = self._class.from_config(parsed, trust_remote_code=self.trusted)
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

    def _why_not_loaded(self, error: Exception) -> str:
        """One line about a library's error over a checkpoint."""
        # An unknown name, for example of an activation function.
        if isinstance(error, KeyError):
            for name, value in self.config.items():
                if isinstance(value, str) and error.args == (value,):
                    return f"{self.folder / 'config.json'}: {name} is {value!r}, which transformers does not know"
        if method := files.quant_method(self.config):
            return (
                f"{self.folder}: the weights are already quantized ({method}), and transformers cannot turn them into "
                f"floats ({one_line(error)}); {files.ORIGINAL}"
            )
        return f"{self.folder} could not be loaded: {type(error).__name__}: {one_line(error)}"


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
    with files.refusing(f"--device {device}: torch has none here", _DEVICE_ERRORS):
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    if chosen.type not in _DEVICES:
        raise CheckpointError(
            f"--device {device}: KL Lens computes on {' and '.join(_DEVICES)}; leave it out"
        )
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
