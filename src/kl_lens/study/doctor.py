"""`doctor`: what is installed, and the command that fixes what is missing."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING

from kl_lens.study.session import Session
from kl_lens.study.settings import Settings, with_options
from kl_lens.targets import TARGETS, describe_target
from kl_lens.targets.abilities import Health

if TYPE_CHECKING:  # torch may not be installed
    from kl_lens.model.kernels import Comparison


@with_options
class DoctorSettings(Settings):
    """It has none."""


@dataclass(frozen=True)
class DoctorResult:
    parts: dict[str, Health]  # PyTorch, then each target

    @property
    def exit_code(self) -> int:
        return 1 if any(health.problem for health in self.parts.values()) else 0


def doctor(settings: DoctorSettings, session: Session) -> DoctorResult:
    targets = {
        describe_target(name).title: describe_target(name).health() for name in TARGETS
    }
    torch = _torch()
    kernels = {"Kernels": _kernels()} if torch.runtime else {}
    return DoctorResult({"PyTorch": torch, **kernels, **targets})


def _torch() -> Health:
    """Needed for measuring and planning, not for `generate`."""
    python = f"Python {platform.python_version()} on {platform.machine()}"
    try:
        import torch
    except ImportError:
        return Health(
            "", (python,), "not installed: nothing can be measured", "pip install kl-lens"
        )
    facts = [python, f"{torch.get_num_threads()} threads"]
    facts.append(
        torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
    )
    facts.append(
        f"transformers {metadata.version('transformers')}, numba {metadata.version('numba')}"
    )
    return Health(f"torch {torch.__version__}", tuple(facts))


def _kernels() -> Health:
    """Ours beside transformers' and torch's own code, in the embedded models, where they run."""
    import torch

    from kl_lens.measuring.metrics import compared_metrics
    from kl_lens.measuring.products import PRECISIONS, compared_products, has_tensor_cores
    from kl_lens.model import load

    worst: dict[str, Comparison] = {}
    devices = {"cpu": "the CPU"} | (
        {"cuda": "the GPU"} if torch.cuda.is_available() else {}
    )
    for device, title in devices.items():
        kernels = [("", compared_metrics(device))]
        for name in ("mamba", "mamba2", "hybrid"):
            model = load(f"reference:{name}", device=device)
            kernels += [
                ("", model.chain.compared_kernels(gradients=gradients))
                for gradients in (False, True)
            ]
            for precision in PRECISIONS[1:] if has_tensor_cores(model) else ():
                kernels.append((f" in {precision}", compared_products(model, precision)))
        for suffix, comparisons in kernels:
            for new in comparisons:
                name = f"{new.kernel}{suffix} on {title}"
                new = replace(new, kernel=name)
                worst[name] = max(
                    new, worst.get(name, new), key=lambda c: c.error / c.limit
                )
    wrong = "; ".join(
        str(comparison) for comparison in worst.values() if not comparison.holds
    )
    problem = (
        wrong and f"wrong: {wrong}. transformers' own code is used; please report this"
    )
    return Health(
        "compared with transformers and torch", tuple(map(str, worst.values())), problem
    )
