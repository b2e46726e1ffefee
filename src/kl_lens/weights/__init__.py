"""(component, recipe) → the exact bytes that are measured, evaluated and exported. Import from the modules: a small
device that runs a file needs recipes and formats, and no torch."""
