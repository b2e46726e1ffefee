"""What exported files hold, read without the code that wrote them."""

from pathlib import Path

from kl_lens.base.files import bytes_digest
from kl_lens.targets import read_artifact


def shipped_digests(folder: Path) -> dict[str, str]:
    """Tensor name → digest of its bytes as the files hold them now; compare with the artifact's record."""
    artifact = read_artifact(folder)
    if artifact.target == "gguf":
        from gguf import GGUFReader

        parts = [folder / name for name in artifact.files if name.endswith(".gguf")]
        return {
            t.name: bytes_digest(t.data)
            for part in parts
            for t in GGUFReader(part).tensors
        }
    if artifact.target == "mlx":
        from safetensors.numpy import load_file

        arrays = load_file(folder / "model.safetensors")
        digests = {}
        for name, array in arrays.items():
            path, _, part = name.rpartition(".")
            if (
                f"{path}.scales" not in arrays or part == "weight"
            ):  # a quantized matrix with its scales and biases
                more = (
                    [f"{path}.{part}" for part in ("scales", "biases")]
                    if f"{path}.scales" in arrays
                    else []
                )
                digests[name] = bytes_digest(array, *(arrays[suffix] for suffix in more))
        return digests
    from kl_lens.targets.openvino.constants import stored_digests
    from kl_lens.targets.openvino.session import read_graph

    names = {tensor.runtime_name for tensor in artifact.tensors}
    stored = stored_digests(read_graph(folder / "openvino_model.xml"))
    return {name: digest for name, digest in stored.items() if name in names}
