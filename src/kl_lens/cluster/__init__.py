"""A sweep done by workers that Ray keeps: on the GPUs of one machine, or on many machines."""
