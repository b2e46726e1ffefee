"""Opens IRs from elsewhere in another process first. A graph that is still as exported is opened directly."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from kl_lens.run.records import Artifact
from kl_lens.targets import quarantine
from kl_lens.targets.artifacts import read_artifact
from kl_lens.targets.openvino.folder import graph_file
from kl_lens.targets.session import Session

GRAPH_DIGEST = "export_graph_digest"  # of an artifact's settings
_STEERING = 4096  # bytes; smaller constants are shapes and axes, larger ones weights
_CONSTANT = re.compile(rb'offset="(\d{1,18})" size="(\d{1,18})"')


def graph_digest(graph: Path) -> str:
    """A digest of what controls the computation: the graph, its small constants and the size of the weight file."""
    content, weights = graph.read_bytes(), graph.with_suffix(".bin")
    digest = hashlib.blake2b(content, digest_size=16)
    places = sorted({(int(offset), int(size)) for offset, size in _CONSTANT.findall(content)})
    with weights.open("rb") as file:
        for offset, size in places:
            if size <= _STEERING:
                file.seek(offset)
                digest.update(file.read(size))
    digest.update(str(weights.stat().st_size).encode())
    return digest.hexdigest()


def is_ours(folder: Path, artifact: Artifact) -> bool:
    recorded = artifact.settings.get(GRAPH_DIGEST)
    try:
        return recorded is not None and recorded == graph_digest(graph_file(folder))
    except OSError:  # weights that are not beside their graph
        return False


def require_safe(folder: Path) -> bool:
    """Whether the folder is as exported. If not, it is tried out; TargetError if opening it crashes or hangs."""
    artifact = read_artifact(folder)
    if ours := is_ours(folder, artifact):
        return ours
    graph = graph_file(folder)
    files = [path for path in (graph, graph.with_suffix(".bin")) if path.is_file()]
    quarantine.require_opens(try_out, folder, files, "OpenVINO")
    return False


def opened(folder: Path) -> Session | None:
    """Compiles for the CPU without a cache. Returns a session, or None for a graph without a head."""
    from kl_lens.targets.openvino.session import compile_graph, open_session, read_graph

    if read_artifact(folder).settings.get("with_head", True):
        return open_session(folder, threads=1, cache=False)
    compile_graph(read_graph(graph_file(folder)), "CPU", threads=1)  # for benchmark_app alone
    return None


def try_out(folder: Path) -> None:
    session = opened(folder)
    if session is None:
        return
    logits = session.logits([0, min(1, session.vocabulary - 1)])
    if read_artifact(folder).settings.get("static_tokens") is None:
        session.step(int(logits[-1].argmax()))
