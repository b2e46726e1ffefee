"""MambaVision (arXiv 2407.08083) in plain PyTorch: convolutions, then state-space mixers and attention on windows.

Written from the paper and from the published names of parameters and settings, so that folders in the hub's layout
(`nvidia/MambaVision-T-1K`, …) open; the published code needs CUDA packages. Two of its quirks are kept because its
weights were trained with them: the bias of `dt_proj` counts twice, and the mixer's convolutions are not causal.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

# Called by this name: fast kernels and exporters replace it.
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

STATES = 8
KERNEL = 3  # of the mixer, fixed in the published code


class MambaVisionConfig(PretrainedConfig):
    model_type = "mambavision"

    depths: list[int] | tuple[int, ...] = (1, 3, 8, 4)
    num_heads: list[int] | tuple[int, ...] = (2, 4, 8, 16)
    window_size: list[int] | tuple[int, ...] = (8, 8, 14, 7)
    dim: int = 80
    in_dim: int = 32
    mlp_ratio: float = 4
    in_chans: int = 3
    layer_scale: float | None = None
    layer_scale_conv: float | None = None
    # Our additions, for small images; as published by default.
    convolution_stages: int = 2
    patch_strides: list[int] | tuple[int, int] = (2, 2)

    def __post_init__(self, **settings: Any) -> None:
        if "num_classes" in settings:
            settings.setdefault("num_labels", settings.pop("num_classes"))
        elif self.id2label is None:
            settings.setdefault("num_labels", 1000)
        super().__post_init__(**settings)


class MambaVisionMixer(nn.Module):
    """Half of the channels go through a selective scan, the other half bypass it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.rank = math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, dim, bias=False)
        self.x_proj = nn.Linear(half, self.rank + 2 * STATES, bias=False)
        self.dt_proj = nn.Linear(self.rank, half)
        self.A_log = nn.Parameter(
            torch.arange(1, STATES + 1).float().log().repeat(half, 1)
        )
        self.D = nn.Parameter(torch.ones(half))
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.conv1d_x, self.conv1d_z = (
            nn.Conv1d(half, half, KERNEL, padding="same", groups=half, bias=False)
            for _ in range(2)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(windows, positions, width)"""
        x, z = self.in_proj(hidden_states).transpose(1, 2).chunk(2, 1)
        x = functional.silu(self.conv1d_x(x))
        z = functional.silu(self.conv1d_z(z))
        dt, b, c = self.x_proj(x.transpose(1, 2)).split([self.rank, STATES, STATES], -1)
        y = mamba_selective_scan(
            x,
            self.dt_proj(dt).transpose(1, 2),
            -torch.exp(self.A_log.float()),
            b.transpose(1, 2),
            c.transpose(1, 2),
            self.D.float(),
            delta_bias=self.dt_proj.bias.float(),
            delta_softplus=True,
        )
        return self.out_proj(torch.cat([y.to(z.dtype), z], 1).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, positions, width = hidden_states.shape
        split = self.qkv(hidden_states).view(
            batch, positions, 3, self.heads, width // self.heads
        )
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(batch, positions, width))


def _steps(**modules: nn.Module) -> nn.Sequential:
    """One after another, under the published names."""
    return nn.Sequential(OrderedDict(modules))


def _scale(width: int, initial: float | None) -> nn.Parameter | None:
    return None if initial is None else nn.Parameter(torch.full((width,), float(initial)))


class Block(nn.Module):
    """A mixer or attention, then an MLP, each with a norm and a residual connection."""

    def __init__(
        self, config: MambaVisionConfig, dim: int, heads: int, attends: bool
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mixer = Attention(dim, heads) if attends else MambaVisionMixer(dim)
        inner = int(dim * config.mlp_ratio)
        self.mlp = _steps(
            fc1=nn.Linear(dim, inner), act=nn.GELU(), fc2=nn.Linear(inner, dim)
        )
        self.gamma_1 = _scale(dim, config.layer_scale)
        self.gamma_2 = _scale(dim, config.layer_scale)

    def forward(self, hidden_states: Tensor) -> Tensor:
        mixed = self.mixer(self.norm1(hidden_states))
        hidden_states = hidden_states + (
            mixed if self.gamma_1 is None else self.gamma_1 * mixed
        )
        inner = self.mlp(self.norm2(hidden_states))
        return hidden_states + (inner if self.gamma_2 is None else self.gamma_2 * inner)


class ConvBlock(nn.Module):
    def __init__(self, config: MambaVisionConfig, dim: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(dim, dim, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(dim) for _ in range(2))
        self.gamma = _scale(dim, config.layer_scale_conv)

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner = functional.gelu(self.norm1(self.conv1(hidden_states)), approximate="tanh")
        inner = self.norm2(self.conv2(inner))
        if self.gamma is not None:
            inner = inner * self.gamma[:, None, None]
        return hidden_states + inner


class MambaVisionLayer(nn.Module):
    """One stage; later stages work on windows, and all but the last halve height and width."""

    def __init__(self, config: MambaVisionConfig, stage: int) -> None:
        super().__init__()
        dim = config.dim * 2**stage
        depth = config.depths[stage]
        heads = config.num_heads[stage]
        self.windowed = stage >= config.convolution_stages
        self.window_size = config.window_size[stage]
        self.blocks = nn.ModuleList(
            Block(config, dim, heads, attends=index >= (depth + 1) // 2)
            if self.windowed
            else ConvBlock(config, dim)
            for index in range(depth)
        )
        self.downsample = None
        if stage < len(config.depths) - 1:
            halved = nn.Conv2d(dim, 2 * dim, 3, 2, 1, bias=False)
            self.downsample = _steps(reduction=nn.Sequential(halved))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(batch, channels, height, width)"""
        if self.windowed:
            hidden_states = self._on_windows(hidden_states)
        else:
            for block in self.blocks:
                hidden_states = block(hidden_states)
        return (
            hidden_states if self.downsample is None else self.downsample(hidden_states)
        )

    def _on_windows(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        side = self.window_size
        padded = functional.pad(images, (0, -width % side, 0, -height % side))
        rows = padded.shape[2] // side
        columns = padded.shape[3] // side
        windows = padded.reshape(batch, channels, rows, side, columns, side)
        windows = windows.permute(0, 2, 4, 3, 5, 1)
        windows = windows.reshape(batch * rows * columns, side * side, channels)
        for block in self.blocks:
            windows = block(windows)
        whole = windows.reshape(batch, rows, columns, side, side, channels)
        whole = whole.permute(0, 5, 1, 3, 2, 4).reshape(padded.shape)
        return whole[:, :, :height, :width].contiguous()


class MambaVision(nn.Module):
    def __init__(self, config: MambaVisionConfig) -> None:
        super().__init__()
        features = config.dim * 2 ** (len(config.depths) - 1)
        widths = (config.in_chans, config.in_dim, config.dim)
        layers: list[nn.Module] = []
        for before, after, stride in zip(
            widths, widths[1:], config.patch_strides, strict=False
        ):
            layers.append(nn.Conv2d(before, after, 3, stride, 1, bias=False))
            layers += nn.BatchNorm2d(after, eps=1e-4), nn.ReLU()
        self.patch_embed = _steps(conv_down=nn.Sequential(*layers))
        self.levels = nn.ModuleList(
            MambaVisionLayer(config, stage) for stage in range(len(config.depths))
        )
        self.norm = nn.BatchNorm2d(features)
        self.head = nn.Linear(features, int(config.num_labels or 0))

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden_states = self.patch_embed(pixel_values)
        for level in self.levels:
            hidden_states = level(hidden_states)
        return self.head(self.norm(hidden_states).mean((2, 3)))


class MambaVisionForImageClassification(PreTrainedModel):
    """(batch, channels, height, width) → logits over classes."""

    config_class = MambaVisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: MambaVisionConfig) -> None:
        super().__init__(config)
        self.model = MambaVision(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from a file or from training."""

    def forward(
        self, pixel_values: Tensor, **_: Any
    ) -> ImageClassifierOutputWithNoAttention:
        return ImageClassifierOutputWithNoAttention(logits=self.model(pixel_values))
