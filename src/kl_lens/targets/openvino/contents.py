"""Which bytes of an IR one token reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kl_lens.run.records import Artifact
from kl_lens.targets.base import Contents
from kl_lens.targets.openvino.folder import IR_FILE
from kl_lens.targets.openvino.session import read_graph

# Operations between a stored constant and its user, besides the zero point and the product with the scale.
_PASSING = ("Convert", "Reshape", "Transpose", "Unsqueeze", "Squeeze")


def graph_contents(folder: Path, artifact: Artifact) -> Contents:
    """Sizes come from the record; states, and whether a weight is looked up, from the graph.

    Experts count whole: the exported graph multiplies with all of them.
    """
    graph = read_graph(folder / IR_FILE)
    sizes = {tensor.runtime_name: tensor.bytes for tensor in artifact.tensors}
    read = float(sum(sizes.values()))
    for node in graph.get_ops():
        name = node.get_friendly_name()
        if node.get_type_name() == "Constant" and name in sizes and _is_looked_up(node):
            read -= sizes[name] * (1 - 1 / node.get_output_shape(0)[0])  # one row
    fixed, growing = 0, 0.0
    for variable in graph.get_variables():
        shape = variable.info.data_shape
        lengths = [d.get_length() if d.is_static else None for d in shape]
        size = math.prod(n for n in lengths if n is not None)
        if None in lengths[1:]:
            growing += 2 * size  # sessions keep keys and values in f16
        else:
            fixed += variable.info.data_type.size * size
    return Contents(read, fixed, growing)


def _is_looked_up(node: Any) -> bool:
    """Whether rows of a matrix are picked, and it is in no product."""
    own = {f"{node.get_friendly_name()}/{part}" for part in ("scaled", "zero_point/subtract")}
    users, waiting = set(), [node]
    while waiting:
        for reader in waiting.pop().output(0).get_target_inputs():
            user = reader.get_node()
            if user.get_type_name() in _PASSING or user.get_friendly_name() in own:
                waiting.append(user)
            else:
                users.add(user.get_type_name())
    return users == {"Gather"} and len(node.get_output_shape(0)) >= 2
