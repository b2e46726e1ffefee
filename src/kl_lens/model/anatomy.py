"""The components of a model: one record per weight, whether it may be quantized, and why not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kl_lens.base.errors import CheckpointError
from kl_lens.model.chain import Chain
from kl_lens.run.records import Component

# Siblings that runtimes fuse into one matmul. Members of a group in one parent module share a format.
FUSED_GROUPS = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"query", "key", "value"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"w1", "w3"}),
)

REASONS = {
    "conv1d": "short convolution: a few weights per channel, runtimes need it in full precision",
    "conv2d": "two-dimensional convolution: formats are for matrices",
    "A_log": "state decay: acts through exp(exp(.)), runtimes need it in full precision",
    "D": "skip weights of the state-space layer: one per channel",
    "dt_bias": "time-step bias: acts through softplus, one per channel",
    "norm": "normalisation weights: one per channel",
    "bias": "bias: one per channel",
    "router": "expert router: tiny, and decides which experts run",
    "vector": "not a matrix: one number per channel",
    "input_major": "stored input-major (in × out); per-row formats do not apply",
    "table": "a lookup table, not a matrix product",
    "unseen": "not used in any matrix product of a forward",
}


def component_name(parameter: str, dimensions: int) -> str:
    """The component of a parameter: the module's name for matrices, else the parameter's own."""
    owner, _, leaf = parameter.rpartition(".")
    return owner if leaf == "weight" and dimensions >= 2 else parameter


@dataclass(frozen=True)
class Anatomy:
    """Every weight of a model, each once, in the order the model uses them."""

    model_type: str
    components: tuple[Component, ...]
    blocks: int
    embedding: str  # component that holds the embedding; empty if there is none
    head: str  # component that holds the head; the embedding if they are tied
    notes: tuple[str, ...] = ()

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """Of all components that may be quantized."""
        return {component.shape for component in self.candidates}

    @property
    def candidates(self) -> tuple[Component, ...]:
        """The components that may be quantized."""
        return tuple(c for c in self.components if c.quantizable)

    @property
    def parameters(self) -> int:
        return sum(c.parameters for c in self.components)

    def component(self, name: str) -> Component:
        for candidate in self.components:
            if candidate.name == name or name in candidate.tied_with:
                return candidate
        raise CheckpointError(
            f"there is no component {name!r}; `kl-lens inspect` lists them all"
        )


def anatomy_of(model: nn.Module, chain: Chain) -> Anatomy:
    """Finds every weight of the model. A weight with several names is one component."""
    names_of: dict[int, list[str]] = defaultdict(list)
    parameter_of: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = _identity(parameter)
        names_of[key].append(name)
        parameter_of[key] = parameter
    describe = _Describer(model, chain)
    components = _with_siblings(
        [describe.component(parameter_of[key], names) for key, names in names_of.items()]
    )
    holder = {c.weight: c.name for c in components}
    blocks = len(chain)

    def place(c: Component) -> int:
        """Embedding, blocks in order, then the rest, the head last; stable inside a block."""
        last = blocks + (c.family == "head") if c.block is None else c.block
        return -1 if c.kind == "embedding" else last

    groups = groups_of(model.config)
    note = (
        f"The gated norm is computed in {groups} groups, as the model's authors and llama.cpp compute it. "
        "transformers would normalise over all groups at once."
    )
    return Anatomy(
        model_type=str(getattr(model.config, "model_type", type(model).__name__)),
        components=tuple(sorted(components, key=place)),
        blocks=blocks,
        embedding=""
        if describe.embedding_weight is None
        else holder[names_of[describe.embedding_weight][0]],
        head=holder[names_of[describe.head_weight][0]],
        notes=(note,) if groups > 1 else (),
    )


# Families of layers, by words in the names of modules, or by what is in them.
_LAYERS = {
    "moe": ("moe|expert", {""}),
    "attention": ("attention|attn", {"q_proj", "k_proj", "v_proj"}),
    "mlp": ("mlp|feed_forward", {"up_proj", "down_proj"}),
}


class _Describer:
    """Makes the record of a weight from its place in the module tree."""

    def __init__(self, model: nn.Module, chain: Chain) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        # `GraniteMoeHybridAttention` is attention, not a mixture of experts: the model's name does not count.
        self.model_prefix = type(model).__name__.partition("For")[0]
        self.blocks_name = chain.blocks_name
        embedding: Any = model.get_input_embeddings() if chain.task.generates else None  # type: ignore[operator]
        self.head_kind = chain.task.head_kind
        self.embedding_weight = None if embedding is None else _identity(embedding.weight)
        self.head_weight = _identity(chain.head.weight)
        loose = [p for name, p in model.named_parameters() if self._is_loose(name, p)]
        self.summed = _directions(chain, loose)

    def _is_loose(self, name: str, parameter: nn.Parameter) -> bool:
        """A matrix, or a stack of them, outside a `Linear`: its orientation must be found by watching a forward."""
        owner, leaf = _place(name)
        if parameter.dim() < 2 or leaf in ("A_log", "A", "D") or leaf.endswith("bias"):
            return False
        if _identity(parameter) in (self.embedding_weight, self.head_weight):
            return False
        return not isinstance(self.modules[owner], (nn.Linear, nn.Conv1d))

    def component(self, parameter: nn.Parameter, names: Sequence[str]) -> Component:
        owner, leaf = _place(names[0])
        kind, family, reason = self._classify(parameter, owner, leaf)
        labels = [component_name(name, parameter.dim()) for name in names]
        outside = _identity(parameter) in (self.embedding_weight, self.head_weight)
        prefix = self.blocks_name + "."
        blocks = {
            int(name.removeprefix(prefix).partition(".")[0])
            for name in names
            if name.startswith(prefix) and not outside
        }
        return Component(
            name=labels[0],
            weight=names[0],
            kind=kind,
            family=family,
            block=min(blocks, default=None),
            blocks=tuple(sorted(blocks)),
            shape=tuple(parameter.shape),
            parameters=parameter.numel(),
            tied_with=tuple(labels[1:]),
            quantizable=reason is None,
            reason=reason,
        )

    def _classify(
        self, parameter: nn.Parameter, owner: str, leaf: str
    ) -> tuple[str, str, str | None]:
        """(kind, family, why it is not quantizable or None)."""
        identity = _identity(parameter)
        if identity == self.embedding_weight:
            return "embedding", "embedding", None
        if identity == self.head_weight:
            return self.head_kind, "head", None
        module = self.modules[owner]
        kind = _last_word(owner) if leaf == "weight" else leaf
        family = self._family(owner, kind)
        if isinstance(module, nn.Conv1d):
            return kind if leaf == "weight" else "bias", family, REASONS["conv1d"]
        if isinstance(module, nn.Conv2d) and leaf == "weight":
            return kind, family, _sized("conv2d", parameter)
        if leaf in ("A_log", "A", "D", "dt_bias"):
            return leaf, family, REASONS["A_log" if leaf == "A" else leaf]
        if leaf == "bias" or leaf.endswith("_bias"):
            return "bias", family, REASONS["bias"]
        if "norm" in type(module).__name__.lower():
            return "norm", family, REASONS["norm"]
        directions = self.summed.get(identity)
        along_last = all(directions) if directions else None  # None: in no product
        class_name = type(module).__name__.lower()
        if parameter.dim() == 3 and "expert" in class_name:
            transposed = getattr(module, "is_transposed", False) or along_last is False
            return kind, "moe", _sized("input_major", parameter) if transposed else None
        is_gate = (kind, family) == ("gate", "moe")
        if "router" in class_name or kind == "router" or is_gate:
            return "router", "moe", REASONS["router"]
        if isinstance(module, nn.Linear):
            return kind, family, None
        reason = None
        if max(parameter.shape, default=0) == parameter.numel():
            reason = REASONS["vector"]
        elif isinstance(module, nn.Embedding):
            reason = _sized("table", parameter)
        elif not along_last:
            reason = _sized("unseen" if along_last is None else "input_major", parameter)
        return kind.removesuffix("_weight"), family, reason

    def _family(self, owner: str, kind: str) -> str:
        """From the nearest enclosing module that is clearly a state-space, attention or MLP layer."""
        path = owner
        while path:
            module = self.modules[path]
            children = {name for name, _ in module.named_children()}
            direct = {name for name, _ in module.named_parameters(recurse=False)}
            class_name = type(module).__name__.removeprefix(self.model_prefix)
            word = f"{class_name} {_last_word(path)}".lower()
            is_ssm = {"A", "D"} <= direct and "conv1d" in children
            if is_ssm or {"A_log", "D"} <= direct | children:
                return "ssm"
            for family, (words, members) in _LAYERS.items():
                if re.search(words, word) or members <= children:
                    return family
            if path == self.blocks_name:
                break
            path = path.rpartition(".")[0]
        return "norm" if "norm" in kind.lower() else "other"


def _sized(reason: str, parameter: nn.Parameter) -> str:
    return f"{REASONS[reason]}; its {parameter.numel():,} values are not quantized"


def _identity(parameter: Any) -> int:
    """Equal for two names of one weight, whether they share the object or only the storage."""
    return parameter.data_ptr() if parameter.device.type != "meta" else id(parameter)


def _place(name: str) -> tuple[str, str]:
    """Module and name of a parameter; list indices are skipped, as in `mixer.A_log.0`."""
    owner, _, leaf = name.rpartition(".")
    if leaf.isdigit():
        owner, _, leaf = owner.rpartition(".")
    return owner, leaf


def _last_word(path: str) -> str:
    """`layers.3.mixer.in_proj` → `in_proj`; list indices are skipped: `adapter_list.0` → `adapter_list`."""
    words = [part for part in path.split(".") if not part.isdigit()]
    return words[-1] if words else path


def _with_siblings(components: Sequence[Component]) -> list[Component]:
    together: dict[tuple[str, frozenset[str]], list[str]] = defaultdict(list)
    for c in components:
        for group in FUSED_GROUPS:
            if c.quantizable and c.kind in group:
                together[c.name.rpartition(".")[0], group].append(c.name)
    siblings = {name: names for names in together.values() for name in names}
    return [
        replace(c, fused_with=tuple(n for n in siblings.get(c.name, ()) if n != c.name))
        for c in components
    ]


# Where the factors of a matrix product are among the arguments of a function.
_FACTORS = {
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), (0, 1)),
    "__rmatmul__": (1, 0),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
}


class ProductWatch(TorchFunctionMode):
    """Within the block, `see` gets either factor of every product as a matrix, with the other as its inputs. The axis
    that is summed over comes last in both. Of a linear layer only the weight is a matrix."""

    def __init__(self, see: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        operands = [*args, *(kwargs or {}).values()]
        name = getattr(func, "__name__", "")
        if name == "linear":
            self._see(operands[1], operands[0])
        elif name in _FACTORS:
            left, right = (operands[place] for place in _FACTORS[name])
            turned = right.mT if right.dim() > 1 else right
            self._see(left, turned)
            self._see(turned, left)
        return func(*args, **(kwargs or {}))


def _directions(chain: Chain, parameters: Sequence[nn.Parameter]) -> dict[int, set[bool]]:
    """For each parameter: whether products of it, or of its views, sum over its last axis. Formats quantize along that
    axis. For a `Linear` it is known; one that a module multiplies itself (`self.x_proj_weight @ x`) may be either way
    round."""
    by_identity = {_identity(p): p for p in parameters}
    directions: dict[int, set[bool]] = {identity: set() for identity in by_identity}

    def see(matrix: Tensor, _: Tensor) -> None:
        for identity, parameter in by_identity.items() if matrix.dim() > 1 else ():
            # Compare present addresses: weights on disk are somewhere else each time, or have no size.
            size = min(parameter.nbytes, parameter.untyped_storage().nbytes())
            if 0 <= matrix.data_ptr() - parameter.data_ptr() < size:
                whole = matrix.shape[-1] == parameter.shape[-1]
                along_last = whole and matrix.stride(-1) == parameter.stride(-1)
                directions[identity].add(along_last)

    if parameters:
        with ProductWatch(see):
            chain.full_logits(chain.task.blank(1, 5))
    return directions


def turn_matrices(model: nn.Module) -> None:
    """Linear maps of GPT-2 and its kin keep their matrices transposed; makes them `Linear`, in place, because formats
    have their blocks along the inputs."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module).__name__ != "Conv1D":
            continue
        weight = module.weight.detach().T.contiguous()
        module.__class__ = nn.Linear
        module.out_features, module.in_features = weight.shape
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.is_turned = True


# The gated norm of Mamba-2 layers with several groups. mamba_ssm, which these models are trained with, normalises each
# group of channels by itself (`group_size = d_ssm // ngroups`), and llama.cpp follows. transformers does it for Zamba2,
# Falcon-H1 and Nemotron-H. For the families below it normalises over all groups at once, except in mamba_ssm's fused
# kernel, which it calls in training. With one group, as most of their checkpoints have, there is no difference.
# Families whose transformers class normalises over all groups → where their configuration says how many there are.
_NORMALISED_OVER_ALL = {
    "mamba2": "n_groups",
    "bamba": "mamba_n_groups",
    "granitemoehybrid": "mamba_n_groups",
}


def groups_of(config: object) -> int:
    """How many groups the gated norm has that transformers would take as one; 1 where transformers is right."""
    groups = getattr(
        config, _NORMALISED_OVER_ALL.get(getattr(config, "model_type", ""), ""), 1
    )
    return groups if isinstance(groups, int) else 1


def normalise_per_group(model: nn.Module) -> None:
    """Gives the gated norms of a model with several groups transformers' own grouped norm, in place."""
    groups = groups_of(getattr(model, "config", None))
    if groups == 1:
        return
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    for module in model.modules():
        # The same attributes and the same parameter: only `forward` differs, and the size of a group.
        if type(module).__name__.endswith("RMSNormGated"):
            module.__class__ = Zamba2RMSNormGated
            module.group_size = module.weight.numel() // groups  # type: ignore[operator, assignment]
