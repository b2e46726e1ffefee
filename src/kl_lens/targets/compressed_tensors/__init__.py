"""Folders in compressed-tensors' `pack-quantized` format, which transformers and vLLM open."""
