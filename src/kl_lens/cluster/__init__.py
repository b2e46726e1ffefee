"""A sweep done by workers: processes on this machine, or those that Ray keeps, on its GPUs or on many machines."""
