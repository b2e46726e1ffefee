"""Our CPU kernels against transformers' own forward, side by side in one run, with the largest difference.

python benchmarks/scan.py [--repeats 3] [--write docs/results/speed.csv]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import interleaved, machine, shape  # isort: skip  (first: it sets the environment that torch reads)

import torch
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2

from kl_lens.checkpoints.kernels import fast_kernels
from kl_lens.checkpoints.kernels.chunked_scan import chunked_scan
from kl_lens.checkpoints.kernels.convolution import causal_convolution, causal_convolution_reference
from kl_lens.checkpoints.kernels.head_scan import head_scan
from kl_lens.checkpoints.kernels.selective_scan import selective_scan, selective_scan_reference
from result_files import add_option, write_speed


def report(what: str, times: dict[str, float], difference: float, file: Path | None) -> None:
    first = next(iter(times.values()))
    numbers = {(name, "s"): f"{seconds:.3f}" for name, seconds in times.items()}
    numbers["ours", "times as fast"] = f"{first / times['ours']:.1f}"
    numbers["ours", "largest difference"] = f"{difference:.1e}"
    print(f"{what}: " + ", ".join(f"{name} {q} {n}" for (name, q), n in numbers.items()), flush=True)
    write_speed(file, {"benchmark": "scan", "model": what, "threads": str(torch.get_num_threads())}, numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    add_option(parser)
    arguments = parser.parse_args()
    repeats, file = arguments.repeats, arguments.write
    torch.set_grad_enabled(False)
    print(machine())
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    batch, time, channels, states = 8, 512, 768, 16
    x, dt = normal(batch, time, channels), torch.nn.functional.softplus(normal(batch, time, channels) - 2)
    a = -torch.arange(1.0, states + 1).repeat(channels, 1)
    b, c = normal(batch, time, states), normal(batch, time, states)

    ours = selective_scan(x, dt, a, b, c)[0]
    times = interleaved(
        {
            "recurrence": lambda: selective_scan_reference(x, dt, a, b, c),
            "ours": lambda: selective_scan(x, dt, a, b, c),
        },
        repeats,
    )
    difference = float((ours - selective_scan_reference(x, dt, a, b, c)[0]).abs().max())
    report(
        f"selective scan, {batch} × {time} × {channels} × {states}, plain recurrence", times, difference, file
    )

    layout = [t.transpose(1, 2).contiguous() for t in (x, dt, b, c)]

    def library() -> torch.Tensor:
        return modeling_mamba.mamba_selective_scan(layout[0], layout[1], a, layout[2], layout[3])

    times = interleaved({"transformers": library, "ours": lambda: selective_scan(x, dt, a, b, c)}, repeats)
    difference = float((library().transpose(1, 2) - ours).abs().max())
    report(
        f"selective scan, {batch} × {time} × {channels} × {states}, transformers' loop",
        times,
        difference,
        file,
    )

    heads, width, states2 = 24, 64, 128
    x2 = normal(batch, time, heads, width)
    dt2 = torch.nn.functional.softplus(normal(batch, time, heads) - 2)
    a2 = -torch.linspace(1, 16, heads)
    b2, c2 = normal(batch, time, 1, states2), normal(batch, time, 1, states2)

    def library2() -> torch.Tensor:
        return modeling_mamba2.mamba2_chunk_scan(x2, dt2, a2, b2, c2, chunk_size=256)

    times = interleaved(
        {
            "transformers": library2,
            "ours": lambda: head_scan(x2, dt2, a2, b2, c2),
            "in chunks": lambda: chunked_scan(x2, dt2, a2, b2, c2),
        },
        repeats,
    )
    difference = float((library2() - head_scan(x2, dt2, a2, b2, c2)[0]).abs().max())
    report(f"Mamba-2 scan, {batch} × {time} × {heads} × {width} × {states2}", times, difference, file)

    wide, taps, bias = normal(batch, time, 1536), normal(1536, 4), normal(1536)
    times = interleaved(
        {
            "torch": lambda: causal_convolution_reference(wide, taps, bias),
            "ours": lambda: causal_convolution(wide, taps, bias),
        },
        repeats,
    )
    difference = float(
        (causal_convolution(wide, taps, bias) - causal_convolution_reference(wide, taps, bias)).abs().max()
    )
    report(f"causal convolution, {batch} × {time} × 1536", times, difference, file)

    ids = torch.randint(0, 50000, (batch, time), generator=generator)
    for name in ("mamba-130m", "mamba2-130m"):
        model = shape(name).model
        layer = model.backbone.layers[0]
        hidden = model.backbone.embeddings(ids)

        def with_ours(layer: torch.nn.Module = layer, hidden: torch.Tensor = hidden) -> torch.Tensor:
            with fast_kernels(layer):
                return layer(hidden)

        times = interleaved(
            {"transformers": lambda layer=layer, hidden=hidden: layer(hidden), "ours": with_ours}, repeats
        )  # type: ignore[misc]
        difference = float((layer(hidden) - with_ours()).abs().max() / layer(hidden).abs().max())
        report(f"one layer of {name}, projections included", times, difference, file)


if __name__ == "__main__":
    main()
