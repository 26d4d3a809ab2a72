"""Random seeds, derived by hashing values such as step and micro batch. They do not depend on the topology."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_everything(*components: object) -> None:
    """Seed the random number generators of Python, numpy and torch with a hash of `components`.

    The same components give the same random numbers.
    """
    seed_value = derive_seed(*components)
    random.seed(seed_value)
    np.random.seed(seed_value % 2**32)
    seed_torch(seed_value)


def seed_torch(seed: int) -> None:
    """Seed torch's CPU generator, and its CUDA generators if CUDA is initialized.

    torch.manual_seed is not used: until CUDA is initialized, it records each call with its traceback, which takes 2 ms per call and memory
    that is never freed.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's function has no types
        torch.cuda.manual_seed_all(seed)


def derive_seed(*components: object) -> int:
    """Return a hash of `components` as a seed: an integer from 0 to 2^63 - 1."""
    text = "/".join(str(component) for component in components)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
