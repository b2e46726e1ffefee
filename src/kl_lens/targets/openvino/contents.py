"""Which bytes of an IR one token reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kl_lens.run.records import Artifact
from kl_lens.targets.contents import BODY, HEAD, LOOKUP, Contents, StoredWeight
from kl_lens.targets.openvino.folder import IR_FILE
from kl_lens.targets.openvino.session import HEAD_NODE, read_graph

# Operations between a stored constant and its user, besides the zero point and the product with the scale.
_PASSING = ("Convert", "Reshape", "Transpose", "Unsqueeze", "Squeeze")


def graph_contents(folder: Path, artifact: Artifact) -> Contents:
    """Sizes come from the record; roles (multiplied or looked up) and states come from the graph.

    Experts count whole: the exported graph multiplies with all of them.
    """
    graph = read_graph(folder / IR_FILE)
    constants = {n.get_friendly_name(): n for n in graph.get_ops() if n.get_type_name() == "Constant"}
    weights, seen = [], set()
    for tensor in artifact.tensors:
        if tensor.runtime_name in seen:
            continue
        seen.add(tensor.runtime_name)
        node = constants.get(tensor.runtime_name)
        if node is None:  # inside a loop's body
            weights.append(StoredWeight(tensor.runtime_name, tensor.bytes, 0, BODY))
            continue
        shape = tuple(node.get_output_shape(0))
        users = _users(node)
        role, share = BODY, 1.0
        if any(name == HEAD_NODE for _, name in users):
            role = HEAD
        elif users and all(kind == "Gather" for kind, _ in users) and len(shape) >= 2:
            role, share = LOOKUP, 1 / shape[0]
        weights.append(StoredWeight(tensor.runtime_name, tensor.bytes, math.prod(shape), role, share))
    fixed, growing = 0, 0.0
    for variable in graph.get_variables():
        shape = variable.info.data_shape
        sizes = [d.get_length() if d.is_static else None for d in shape]
        size = math.prod(s for s in sizes if s is not None)
        if None in sizes[1:]:
            growing += 2 * size  # sessions keep keys and values in f16
        else:
            fixed += variable.info.data_type.size * size
    return Contents(tuple(weights), fixed, growing)


def _users(node: Any) -> set[tuple[str, str]]:
    """(type, name) of the operations that use a constant."""
    users = set()
    own = {f"{node.get_friendly_name()}/{part}" for part in ("scaled", "zero_point/subtract")}
    waiting = [node]
    while waiting:
        for reader in waiting.pop().output(0).get_target_inputs():
            user = reader.get_node()
            if user.get_type_name() in _PASSING or user.get_friendly_name() in own:
                waiting.append(user)
            else:
                users.add((user.get_type_name(), user.get_friendly_name()))
    return users
