"""Made by scripts/keywords.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

class Run(TypedDict, total=False):
    text: str
    windows: int | None
    window_length: int | None
    seed: int
    ray: str | None
    workers: int | None
    formats: Sequence[str] | str | None
    menu: Literal['short', 'full', 'small'] | None
    max_bytes: int | str | None
    max_loss: float
    max_drop: float | str | None
    memory: int | str | None
    context: int | str | None
    batch: int | None
    budget: float | str | None
    exhaustive: bool
    gradients: bool
    table: str | None
    target: Sequence[Literal['openvino', 'gguf', 'mlx', 'compressed-tensors', 'vllm', 'vllm-cpu']] | str | None
    rivals: Literal['none', 'usual', 'all']
    evaluation_text: str
    evaluation_windows: int | None
    tune: int | None
    held_out: str
    held_out_windows: int
    tasks: Sequence[str] | str | None
    task_data: Path | str | None
    task_limit: int | None
    repeats: int
    threads: int | None
    without: Sequence[str] | str
    again: bool
    estimate: bool

class Inspect(TypedDict, total=False):
    memory: int | str | None
    context: int | str | None
    batch: int | None
    max_bytes: int | str | None

class Calibrate(TypedDict, total=False):
    text: str | None
    windows: int | None
    window_length: int | None
    seed: int | None
    again: bool

class Measure(TypedDict, total=False):
    target: Sequence[Literal['openvino', 'gguf', 'mlx', 'compressed-tensors', 'vllm', 'vllm-cpu']] | str | None
    text: str
    windows: int | None
    window_length: int | None
    seed: int
    held_out: str
    held_out_windows: int
    ray: str | None
    workers: int | None
    formats: Sequence[str] | str | None
    components: str | None
    states: bool
    max_bytes: int | str | None
    max_loss: float | None
    max_drop: float | str | None
    memory: int | str | None
    context: int | str | None
    batch: int | None
    exhaustive: bool
    gradients: bool
    precision: Literal['float32', 'tf32x3', 'tf32'] | None
    shard: str | None

class Rank(TypedDict, total=False):
    ray: str | None
    workers: int | None
    evaluation_text: str
    evaluation_windows: int
    other_text: Sequence[str] | str

class Plan(TypedDict, total=False):
    target: Sequence[Literal['openvino', 'gguf', 'mlx', 'compressed-tensors', 'vllm', 'vllm-cpu']] | str | None
    paper: Literal['cpu', 'gpu'] | None
    metric: str | None
    no_head: bool
    formats: Sequence[str] | str
    name: str | None
    uniform: Sequence[str] | str
    gamma: float | None
    max_bytes: int | str | None
    max_loss: float | None
    max_drop: float | str | None
    memory: int | str | None
    context: int | str | None
    batch: int | None
    max_bpw: float | None
    min_speed: float | None
    minimise: Literal['bytes', 'kl', 'seconds'] | None
    verify: bool
    rivals: Literal['usual', 'all'] | None
    tune: int | None
    held_out: str
    held_out_windows: int
    plan: str | None

class Frontier(TypedDict, total=False):
    target: Sequence[Literal['openvino', 'gguf', 'mlx', 'compressed-tensors', 'vllm', 'vllm-cpu']] | str | None
    paper: Literal['cpu', 'gpu'] | None
    metric: str | None
    no_head: bool
    formats: Sequence[str] | str
    name: str | None
    uniform: Sequence[str] | str
    gamma: float | None
    max_bytes: int | str | None
    max_loss: float | None
    max_drop: float | str | None
    memory: int | str | None
    context: int | str | None
    batch: int | None
    max_bpw: float | None
    min_speed: float | None
    minimise: Literal['bytes', 'kl', 'seconds'] | None
    verify: bool
    rivals: Literal['usual', 'all'] | None
    tune: int | None
    held_out: str
    held_out_windows: int
    plan: str | None

class Export(TypedDict, total=False):
    target: Sequence[Literal['openvino', 'gguf', 'mlx', 'compressed-tensors', 'vllm', 'vllm-cpu']] | str
    format: str | None
    out: Path | str | None
    static_tokens: int | None
    with_head: bool | None
    activation_groups: str | None
    include_tokenizer: bool | None
    part_bytes: int | str | None

class Evaluate(TypedDict, total=False):
    plan: str
    target: Sequence[Literal['openvino', 'gguf', 'mlx', 'compressed-tensors', 'vllm', 'vllm-cpu', 'torch']] | str | None
    perplexity: str | None
    divergence: str | None
    positions: str | None
    window_length: int | None
    stride: int | None
    windows: int | None
    tasks: Sequence[str] | str | None
    task_data: Path | str | None
    task_limit: int | None
    task_drop: float | str | None
    exact: bool
    runtime_device: str
    threads: int | None
    gpu_layers: int | str
    load: Literal['auto', 'lean', 'read', 'mapped', 'read-plain', 'mapped-plain']
    again: bool

class Compare(TypedDict, total=False):
    text: str
    windows: int
    window_length: int
    chart: Path | str | None

class Benchmark(TypedDict, total=False):
    plan: str
    target: Sequence[Literal['openvino', 'gguf', 'mlx', 'compressed-tensors', 'vllm', 'vllm-cpu']] | str | None
    threads: int | None
    gpu_layers: int | str
    load: Literal['auto', 'lean', 'read', 'mapped', 'read-plain', 'mapped-plain']
    quick: bool
    prompt_lengths: Sequence[int | str] | str
    new_tokens: int
    repeats: int

class Autopsy(TypedDict, total=False):
    text: str
    windows: int
    window_length: int | None
    threads: int | None

class Generate(TypedDict, total=False):
    chat: bool
    max_new_tokens: int | None
    temperature: float
    seed: int
    threads: int | None
    gpu_layers: int | str
    load: Literal['auto', 'lean', 'read', 'mapped', 'read-plain', 'mapped-plain']

class Report(TypedDict, total=False):
    out: Path | str | None
    open: bool

class Publish(TypedDict, total=False):
    plan: str | None
    base_model: str | None
    license: str | None
    private: bool
    out: Path | str | None
    dry_run: bool

class EvaluateAlone(TypedDict, total=False):
    run: str | None
    model: str | None
    tokenizer: str | None
    dtype: Literal['float32', 'bfloat16', 'float16', 'float64']
    device: str
    trust_remote_code: bool
    bos: Literal['auto', 'yes', 'no']
    template: str | None
    images: str | None
    working_memory: int | str | None
    plan: str
    target: Sequence[Literal['openvino', 'gguf', 'mlx', 'compressed-tensors', 'vllm', 'vllm-cpu', 'torch']] | str | None
    perplexity: str | None
    divergence: str | None
    positions: str | None
    window_length: int | None
    stride: int | None
    windows: int | None
    tasks: Sequence[str] | str | None
    task_data: Path | str | None
    task_limit: int | None
    task_drop: float | str | None
    exact: bool
    runtime_device: str
    threads: int | None
    gpu_layers: int | str
    load: Literal['auto', 'lean', 'read', 'mapped', 'read-plain', 'mapped-plain']
    again: bool

class CompareAlone(TypedDict, total=False):
    text: str
    windows: int
    window_length: int
    chart: Path | str | None

class BenchmarkAlone(TypedDict, total=False):
    run: str | None
    plan: str
    target: Sequence[Literal['openvino', 'gguf', 'mlx', 'compressed-tensors', 'vllm', 'vllm-cpu']] | str | None
    device: str
    threads: int | None
    gpu_layers: int | str
    load: Literal['auto', 'lean', 'read', 'mapped', 'read-plain', 'mapped-plain']
    quick: bool
    prompt_lengths: Sequence[int | str] | str
    new_tokens: int
    repeats: int

class GenerateAlone(TypedDict, total=False):
    chat: bool
    max_new_tokens: int | None
    temperature: float
    seed: int
    tokenizer: str | None
    device: str
    threads: int | None
    gpu_layers: int | str
    load: Literal['auto', 'lean', 'read', 'mapped', 'read-plain', 'mapped-plain']
