"""What every test shares: no hub, nothing of whoever runs it, and patience with slow machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

E2E = Path(__file__).parent / "e2e"
E2E_TIMEOUT_S = 1800  # loading a model and compiling on two busy cores; a hang still ends

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
    os.environ[name] = "1"

# The terminal, the keys and the processes of whoever runs the tests are no part of them.
for name in (
    "CLICOLOR_FORCE",
    "FORCE_COLOR",
    "NO_COLOR",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "DRAFTMILL_API_KEY",
    "OPENAI_API_KEY",
    "VLLM_API_KEY",
    "VLLM_CPU_OMP_THREADS_BIND",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
):
    os.environ.pop(name, None)
os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}

# An example takes as long as it takes on a slow machine, and fixtures of a test serve all its
# examples where it makes what it looks at anew.
settings.register_profile(
    "house",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(E2E):
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
