"""Folders that mlx-lm loads, and sessions that run them with MLX."""
