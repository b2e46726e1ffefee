"""GGUF files for llama.cpp: write them from a plan, run them, and predict what running them does.

Needs the extra `gguf` (the packages gguf and xllamacpp).
"""
