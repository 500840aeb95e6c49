"""The story that brimful answers, as an experiment: fixed batches against continuous ones on the same requests."""
