"""Golden texts of captures on the host. ``EXPECTTEST_ACCEPT=1 pytest`` rewrites them; read the diff."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from expecttest import assert_expected_inline
from helpers import snapshot_models


def test_eager_capture() -> None:
    assert_expected_inline(
        snapshot_models.eager_host_text(),
        """\
0 kernel aten.addmm.default
    scope warm
    source snapshot_models.py:21:forward
1 kernel aten.gelu.default
    scope warm
    source snapshot_models.py:21:forward
2 kernel aten.addmm.default
    scope warm
    source snapshot_models.py:22:forward
3 kernel aten.gelu.default
    scope warm
    source snapshot_models.py:22:forward
4 kernel aten.mul.Tensor
    scope warm
    source snapshot_models.py:23:forward
5 kernel aten.add_.Tensor
    source snapshot_models.py:42:eager_host_text
""",
    )


def test_compiled_capture() -> None:
    assert_expected_inline(
        snapshot_models.compiled_text("cpu"),
        """\
0 kernel aten.addmm.out
    source snapshot_models.py:21:forward
1 kernel cpp_fused_gelu
    source snapshot_models.py:21:forward
2 kernel aten.addmm.out
    source snapshot_models.py:22:forward
3 kernel cpp_fused_gelu_mul
    source snapshot_models.py:23:forward
    source snapshot_models.py:22:forward
""",
    )


def _text_from(directory: Path, before: str) -> str:
    """Both texts, from a copy of the models in ``directory``, in a process that does ``before`` first."""
    directory.mkdir(parents=True)
    script = shutil.copy(snapshot_models.__file__, directory)
    program = f"import runpy, torch\n{before}\nrunpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_same_text_from_another_directory(tmp_path: Path) -> None:
    first = _text_from(tmp_path / "here", before="")
    # Something compiled before moves the counters of graphs, kernels and code objects along.
    moved = "torch.compile(lambda x: x.sin() + 1)(torch.ones(3))"
    assert _text_from(tmp_path / "elsewhere" / "deeper", before=moved) == first
    assert "here" not in first
