"""Changed OpenVINO IRs and records: an error about that folder, or the same results."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openvino", reason="needs the extra openvino")

from kl_lens.base.errors import KLLensError, TargetError
from kl_lens.base.files import RECORD_FILE
from kl_lens.model import LoadedModel
from kl_lens.run.records import Plan
from kl_lens.targets import SessionSettings, describe_target, export, open_session
from tests.families import tiny_model
from tests.hostile.aside import forked_quarantine, opens
from tests.hostile.saying import cases
from tests.hostile.test_checkpoints import changed_within

GRAPH = "openvino_model.xml"
WEIGHTS = "openvino_model.bin"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "ir"
    export(
        LoadedModel("tiny", Path(), tiny_model("mamba"), None),
        Plan("plain", {}, "hand"),
        "openvino",
        folder,
    )
    return folder


@pytest.fixture(scope="module")
def warm(healthy: Path) -> Iterator[None]:
    with forked_quarantine("openvino", "kl_lens.targets.openvino.dissection"):
        yield


@pytest.fixture
def copied(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "ir"))


def test_a_record_that_names_files_elsewhere_is_refused(copied: Path) -> None:
    record = json.loads((copied / RECORD_FILE).read_text())
    (copied / RECORD_FILE).write_text(
        json.dumps(record | {"files": ["../../../etc/passwd.xml"]})
    )
    with pytest.raises(TargetError, match="is not a file of its folder"):
        open_session(copied)


def changed_graph(text: str, draw: random.Random) -> str:
    """Another value of an attribute, a word less, a character, or less of all."""
    chance = draw.random()
    if chance < 0.5:
        match = draw.choice(list(re.finditer(r'="([^"]*)"', text)))
        value = draw.choice(
            ["", "-1", "0", "1", "999999999999", "x", "i64", "f16", "?,1", match[1] + "0"]
        )
        return text[: match.start(1)] + value + text[match.end(1) :]
    if chance < 0.8:
        match = draw.choice(list(re.finditer(r"<[^>]*>", text)))
        return text[: match.start()] + text[match.end() :]
    if chance < 0.9:
        at = draw.randrange(len(text))
        return text[:at] + chr(draw.randrange(32, 127)) + text[at + 1 :]
    return text[: draw.randrange(len(text))]


@cases(1, 100)
@pytest.mark.usefixtures("warm")
def test_changed_graphs_never_end_the_process(
    cases: int, healthy: Path, copied: Path
) -> None:
    draw = random.Random(cases)
    text = (healthy / GRAPH).read_text()
    weights = (healthy / WEIGHTS).read_bytes()
    for _ in range(cases):
        content = bytearray(weights)
        if draw.random() < 0.2:
            content = content[: draw.randrange(len(content))]
        elif draw.random() < 0.2:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (copied / WEIGHTS).write_bytes(content)
        (copied / GRAPH).write_text(changed_graph(text, draw))
        with pytest.raises(TargetError, match="was changed after the export"):
            open_session(copied)
        message = ""
        try:  # an autopsy opens it all the same
            session = (
                describe_target("openvino")
                .dissect(copied)
                .open(SessionSettings(threads=1))
            )
            session.logits([0, 1])
        except KLLensError as error:
            message = str(error)
        assert "\n" not in message


@cases(1, 100)
@pytest.mark.usefixtures("warm")
def test_changed_records_never_end_the_process(
    cases: int, healthy: Path, copied: Path
) -> None:
    draw = random.Random(cases)
    record = json.loads((healthy / RECORD_FILE).read_text())
    for _ in range(cases):
        (copied / RECORD_FILE).write_text(json.dumps(changed_within(record, draw)))
        opens(copied)
