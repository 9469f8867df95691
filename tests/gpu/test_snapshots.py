"""Golden text of a compiled capture on CUDA: kernels of Triton and cuBLAS with the model's lines."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import snapshot_models


def test_compiled_capture() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the text names cuBLAS kernels of compute capability 9.0")
    assert_expected_inline(snapshot_models.compiled_text("cuda"), """""")
