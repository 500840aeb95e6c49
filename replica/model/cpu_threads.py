"""How many threads compute on the CPU: one number for PyTorch's kernels and for our compiled ones.

Both run on OpenMP threads, and starting numba's sets OpenMP's number for the whole process to that of all cores: so it
is started first and PyTorch's number is set after it. A test or replica with one thread would otherwise compute with
one per core, which costs ten times its time where cores are short.
"""

from __future__ import annotations

import torch

from replica.model import cpu_compiler


def use_cpu_threads(number: int | None) -> None:
    """For this thread's forwards; None: what PyTorch is set to."""
    number = number or torch.get_num_threads()
    cpu_compiler.use_threads(number)
    torch.set_num_threads(number)
