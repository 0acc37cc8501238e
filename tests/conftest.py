"""What every test shares: one thread, one seed, and reproducible property tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Helpers whose assertions should say as much as those of a test.
pytest.register_assert_rewrite("browsing", "guarding", "photographs", "recorded", "replaying", "solving", "spoiling")

# One thread per process: test processes run side by side, and results do not depend on the number of cores.
torch.set_num_threads(1)

# "ci" draws the same examples on every machine; "thorough" explores (HYPOTHESIS_PROFILE=thorough make test).
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    """Start every test from the same random state, and let none leak its default dtype into the next."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
