"""Reproduces the paper (arXiv 2604.13440): its points, its greedy rule, its files, its timing protocol."""
