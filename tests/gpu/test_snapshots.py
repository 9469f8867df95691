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
    assert_expected_inline(
        snapshot_models.compiled_text("cuda"),
        """\
0 memcpy device to device, 256 B
    source snapshot_models.py:20:forward
1 kernel gemmSN_TN_kernel<float> [grid 2x1x1, block 128x1x1, shared 0 B]
    source snapshot_models.py:21:forward
2 kernel triton_poi_fused_addmm_gelu [grid 1x1x1, block 32x1x1, shared 0 B]
    source snapshot_models.py:21:forward
3 kernel gemmSN_TN_kernel<float> [grid 2x1x1, block 128x1x1, shared 0 B]
    source snapshot_models.py:22:forward
4 kernel triton_poi_fused_addmm_gelu_mul [grid 1x1x1, block 32x1x1, shared 0 B]
    source snapshot_models.py:23:forward
    source snapshot_models.py:22:forward
""",
    )
