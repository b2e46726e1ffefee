"""The published way of measuring one layer, timed, in a process without any of our settings.

    python benchmarks/published.py FOLDER WEIGHT WINDOWS

For each layer the published code loads the checkpoint twice, quantizes one layer of the second copy, runs all windows
as one batch through both with transformers' own forward, keeps both sets of logits whole, and takes from them the SQNR,
both KL divergences and both cross-entropies. This does the same, step by step, with three mistakes corrected (the
first KL, means per token, shifted labels), and in float32, because half precision is far slower on a CPU.
Prints the seconds of the fastest repetition.
"""

from __future__ import annotations

import sys
import time

import torch
import transformers
from torch.nn import functional

from kl_lens.weights.formats import get_format

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def load(folder: str) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()


def measure(folder: str, weight: str, ids: torch.Tensor) -> dict[str, float]:
    teacher = load(folder)
    student = load(folder)
    parameter = student.get_parameter(weight)
    parameter.data = get_format("int4").roundtrip(parameter.data)
    with torch.no_grad():
        p = teacher(input_ids=ids).logits
        q = student(input_ids=ids).logits
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    log_p = functional.log_softmax(p, dim=-1)
    log_q = functional.log_softmax(q, dim=-1)
    forward = functional.kl_div(log_q, log_p.exp(), reduction="sum")
    backward = functional.kl_div(
        log_p, functional.log_softmax(q, dim=-1), reduction="sum", log_target=True
    )
    loss_p, loss_q = (
        functional.cross_entropy(x.view(-1, x.shape[-1]), labels.view(-1)) for x in (p, q)
    )
    return {
        "sqnr_db": float(10 * torch.log10(p.square().mean() / (p - q).square().mean())),
        "kl_teacher_to_student": float(forward) / ids.numel(),
        "kl_student_to_teacher": float(backward) / ids.numel(),
        "delta_cross_entropy": float(loss_q - loss_p),
    }


def main(folder: str, weight: str, windows: str) -> None:
    vocabulary = load(folder).get_input_embeddings().weight.shape[0]
    ids = torch.randint(
        0, vocabulary, (int(windows), 512), generator=torch.Generator().manual_seed(0)
    )
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        measure(folder, weight, ids)
        seconds.append(time.perf_counter() - begin)
    print(min(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
