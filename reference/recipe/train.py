"""Makes the reference checkpoints: one command from the text archive to the finished folders.

    python reference/recipe/train.py --corpus corpus.tar.xz --model mamba --out reference/mamba
    python reference/recipe/train.py --corpus corpus.tar.xz --model all --out reference

Several models (``--model mamba2 hybrid``, or ``all``) train at the same time, one process each, on one GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import card
import evaluate
import numpy as np
import prepare
import torch
from check import check_scans
from data import MIXTURE
from models import PUBLISHED, configuration, language_model, next_token_losses
from optimizer import Optimizer
from publish import save_checkpoint, verify_checkpoint
from torch import Tensor

MODELS = ("mamba", "mamba2", "hybrid", "hymba")  # those that ship
# Set for the process of each model when several train side by side: the names of all of them.
SIDE_BY_SIDE = "KL_LENS_RECIPE_MODELS"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        required=True,
        help="corpus.tar.xz, or the folder it unpacks to",
    )
    parser.add_argument(
        "--model", choices=[*MODELS, *PUBLISHED, "all"], nargs="+", required=True
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder to write (of several models: the parent)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="reuse this tokenizer.json instead of training one"
    )
    parser.add_argument(
        "--work", type=Path, help="keep the token ids and the n-gram result here"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="of enwik8 and the books; WikiText-2 whole",
    )
    parser.add_argument("--tokens", type=int, default=280_000_000, help="training tokens")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop then, the rates decayed by time",
    )
    parser.add_argument("--batch", type=int, default=32, help="windows per step")
    parser.add_argument("--window", type=int, default=1024, help="tokens per window")
    parser.add_argument(
        "--muon-rate", type=float, default=5e-3, help="0: AdamW for everything"
    )
    parser.add_argument("--adam-rate", type=float, default=1.2e-2)
    parser.add_argument(
        "--evaluations", type=int, default=12, help="validations during training"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = parser.parse_args(given)
    args.models = list(MODELS) if "all" in args.model else args.model
    if 0 < sum(name in PUBLISHED for name in args.models) < len(args.models):
        parser.error(
            "models that ship and models of a published shape have different vocabularies"
        )
    args.ships = args.models[0] not in PUBLISHED
    return args


class Windows:
    """Random training windows, each from one source drawn by ``MIXTURE``; all ids live on the device."""

    def __init__(self, ids: dict[str, np.ndarray], device: str, seed: int) -> None:
        stream = np.concatenate([ids[name] for name in MIXTURE]).astype(np.int32)
        self.stream = torch.from_numpy(stream).to(device)
        self.lengths = torch.tensor([len(ids[name]) for name in MIXTURE], device=device)
        self.offsets = self.lengths.cumsum(0) - self.lengths
        self.shares = torch.tensor(list(MIXTURE.values()), device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def batch(self, count: int, length: int) -> Tensor:
        # Drawn on the device: a copy from the host would make every step wait for the last.
        device = self.stream.device
        source = torch.multinomial(
            self.shares, count, replacement=True, generator=self.generator
        )
        place = torch.rand(
            count, generator=self.generator, device=device, dtype=torch.float64
        )
        start = self.offsets[source] + (place * (self.lengths[source] - length)).long()
        return self.stream[start[:, None] + torch.arange(length, device=device)].long()


def learning_rate_scale(progress: float, warmup: float = 0.02) -> float:
    """Linear rise, then linear decay to zero at the end of training."""
    return min(progress / warmup, (1 - progress) / (1 - warmup))


def train(args: argparse.Namespace, ids: dict[str, np.ndarray]) -> dict[str, object]:
    """Trains one model, writes its folder, and returns what the model card reports."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    on_gpu = args.device.startswith("cuda")
    (name,) = args.models
    config = configuration(name)
    model = language_model(config).to(args.device)
    optimizer = Optimizer(model, args.muon_rate, args.adam_rate)
    windows = Windows(ids, args.device, args.seed)
    losses = next_token_losses
    if (
        on_gpu
    ):  # blocks share one compiled graph: the code is the same, only the weights differ
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks():
            block.compile()
        losses = torch.compile(next_token_losses)
    autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()

    per_step = args.batch * args.window
    steps = max(args.tokens // per_step, 1)
    history: list[dict[str, float]] = []
    best = float("inf")
    started = time.monotonic()
    recent: list[Tensor] = []

    def progress(done: float) -> float:
        return max(done / steps, (time.monotonic() - started) / (60 * args.minutes))

    step = 0
    while progress(step) < 1:
        step += 1
        batch = windows.batch(args.batch, args.window + 1)
        with autocast:
            features = model.features(batch[:, :-1])
            loss = losses(features, model.embedding_weight(), batch[:, 1:]).mean()
        loss.backward()
        optimizer.step(learning_rate_scale(min(progress(step - 0.5), 1)))
        recent.append(loss.detach())
        if progress(step) * args.evaluations >= len(history) + 1:
            record = {
                "step": step,
                "tokens": step * per_step,
                "training": float(torch.stack(recent).mean()),
            }
            recent.clear()
            with autocast:
                for text in ("wikitext2", "enwik8"):
                    record[text] = evaluate.mean_loss(
                        model, ids[f"valid/{text}"], args.device
                    )
            history.append(record | {"seconds": round(time.monotonic() - started, 1)})
            validation = (record["wikitext2"] + record["enwik8"]) / 2
            print(name, json.dumps(history[-1]), flush=True)
            if validation < best:
                best = validation
                save_checkpoint(model, config, args.out)
    minutes = (time.monotonic() - started) / 60
    return {
        "model": name,
        "trained_beside": [
            other for other in os.environ.get(SIDE_BY_SIDE, "").split() if other != name
        ],
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": step * per_step,
        "steps": step,
        "batch": args.batch,
        "window": args.window,
        "muon_rate": args.muon_rate,
        "adam_rate": args.adam_rate,
        "seed": args.seed,
        "minutes": round(minutes, 2),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "history": history,
    }


def make_one(args: argparse.Namespace) -> None:
    """Checks the kernels, trains, proves the saved folder, and leaves ``training.json`` in it."""
    print(
        *args.models,
        "scan errors against the plain recurrence:",
        check_scans(args.device),
        flush=True,
    )
    ids = prepare.load(args.work)
    args.out.mkdir(parents=True, exist_ok=True)
    prepare.copy_tokenizer(args.work, args.out)
    report = train(args, ids)
    report["verification"] = verify_checkpoint(
        args.out, ids["test/wikitext2"], args.device, args.ships
    )
    report["test"] = evaluate.test_report(
        args.out, ids["test/wikitext2"], prepare.facts(args.work), args.device
    )
    report["data"] = prepare.facts(args.work)
    card.write_json(args.out / "training.json", report)
    print(
        *args.models,
        json.dumps({k: report[k] for k in ("verification", "test", "minutes")}),
        flush=True,
    )


def make_several(args: argparse.Namespace, given: list[str]) -> None:
    """One process per model; the work folder is shared, each writes its own folder."""
    processes = {}
    for name in args.models:
        own = ["--model", name, "--out", str(args.out / name), "--work", str(args.work)]
        command = [sys.executable, __file__, *given, *own]
        processes[name] = subprocess.Popen(
            command, env=os.environ | {SIDE_BY_SIDE: " ".join(args.models)}
        )
    failed = [name for name, process in processes.items() if process.wait() != 0]
    if failed:
        raise SystemExit(
            f"training failed for {', '.join(failed)}; see the messages above"
        )


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        args.work = args.work or Path(temporary)
        ngrams = None
        if SIDE_BY_SIDE not in os.environ:
            vocabulary = max(configuration(name).vocab_size for name in args.models)
            prepare.tokenise(
                args.corpus, args.work, args.tokenizer, args.share, vocabulary
            )
        if args.ships and SIDE_BY_SIDE not in os.environ:
            ngrams = subprocess.Popen(
                [sys.executable, str(Path(prepare.__file__)), str(args.work)]
            )
        several = len(args.models) > 1
        if several:
            make_several(args, sys.argv[1:])
        else:
            make_one(args)
        if ngrams is not None:
            if ngrams.wait() != 0:
                raise SystemExit("the n-gram yardstick failed; see the messages above")
            for name in args.models:
                card.write_card(
                    args.out / name if several else args.out,
                    prepare.ngram_result(args.work),
                )


if __name__ == "__main__":
    main()
