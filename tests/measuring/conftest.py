"""Small measured things that the tests of this room share."""

from pathlib import Path

import pytest
import torch

from kl_lens.model import LoadedModel
from kl_lens.run.folder import Run
from kl_lens.run.records import Estimate
from kl_lens.text.windows import UsedDocument, Windows
from tests.families import tiny_model, token_ids


def loaded(family: str) -> LoadedModel:
    return LoadedModel(family, Path(), tiny_model(family), None, source=family)


def some_windows(count: int, length: int, seed: int = 1) -> Windows:
    """Windows of random tokens that extend: the first k of any count are the same."""
    ids = torch.cat([token_ids(1, length, seed * 1000 + index) for index in range(count)])
    document = (UsedDocument("random", "0"),)
    return Windows(
        ids=ids,
        source="random",
        split=None,
        seed=seed,
        stride=None,
        starts=tuple(length * index for index in range(count)),
        documents=(document,) * count,
        stream_tokens=10**6,
    )


def table(run: Run) -> dict[tuple[str, str], dict[str, Estimate]]:
    return {(m.component, m.format): m.metrics for m in run.measurements()}


@pytest.fixture
def mamba() -> LoadedModel:
    return loaded("mamba")
