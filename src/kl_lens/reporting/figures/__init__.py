"""The figures: each takes plain values and gives an HTML figure with an SVG in it."""
