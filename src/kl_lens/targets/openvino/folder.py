"""Names of the files in an exported folder. OpenVINO GenAI and optimum-intel look for the same ones."""

from __future__ import annotations

from pathlib import Path

from kl_lens.targets.exporting import read_artifact

IR_FILE = "openvino_model.xml"
WEIGHT_FILE = "openvino_model.bin"
TOKENIZER_FILE = "openvino_tokenizer.xml"
# Where a graph says how its activations are rounded, to every program that opens it.
ACTIVATION_GROUPS = ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]
DETOKENIZER_FILE = "openvino_detokenizer.xml"


def graph_file(path: Path) -> Path:
    """The graph in an exported folder; an .xml file is returned as it is."""
    if path.suffix == ".xml":
        return path
    read_artifact(path)  # says in one line what is missing
    return path / IR_FILE
