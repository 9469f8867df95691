"""What a run was measured with."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata

import torch

_PACKAGES = ("graphcap-backend", "triton", "cuda-bindings", "cupti-python", "nvidia-cuda-cupti")


def versions() -> dict[str, str | None]:
    """Versions by name; None for what is not there. Asks CUDA and CUPTI, so call it when nothing is measured."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    found.update({name: _package(name) for name in _PACKAGES})
    found["CUDA of torch"] = torch.version.cuda
    found["CUDA of the driver"] = _or_none(_driver_cuda)
    found["driver"] = _or_none(_driver)
    found["CUPTI"] = _or_none(_cupti)
    found["GPU"] = _or_none(torch.cuda.get_device_name)
    return found


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _or_none(ask: Callable[[], str]) -> str | None:
    try:
        return ask()
    except (RuntimeError, AttributeError, AssertionError, OSError, subprocess.SubprocessError):
        return None


def _driver_cuda() -> str:
    number: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        raise OSError("no nvidia-smi")
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.splitlines()[0].strip()


def _cupti() -> str:
    from graphcap_backend.annotate import cupti

    number = cupti.version()
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
