"""Which replica should take a request: the shipped policy beside the simple ones, on the same requests."""
