"""Keep a capture in a file, and see later what a change did to it.

The concept: ``save_capture`` writes all that is known of a capture to one JSON file; ``load_capture`` reads it
without CUDA and without the model. Two files are compared node by node, in Python or by
``python -m graphcap_backend diff A B``, whose exit status is 1 where something changed: enough for CI.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from graphcap_backend import load_capture, save_capture
from graphcap_backend.__main__ import main as graphcap


def softmax(x: Tensor) -> Tensor:
    shifted = x - x.amax(dim=-1, keepdim=True)
    exponents = shifted.exp()
    return exponents / exponents.sum(dim=-1, keepdim=True)


def softmax_of_product(x: Tensor) -> Tensor:
    return softmax(x @ x.T)


def capture(function: Callable[[Tensor], Tensor], path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compiled = torch.compile(function, backend="graphcap", options={"host_capture": device == "cpu"})
    for _ in range(2):
        compiled(torch.ones(8, 8, device=device))
    save_capture(path, compiled)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before.json"), Path(folder, "after.json.gz")
        capture(softmax, before)
        capture(softmax_of_product, after)

        loaded = load_capture(before)
        nodes = loaded.graphs[0].nodes
        print(f"{loaded.graphs[0].name}: {len(nodes)} nodes")
        assert any("05_saved_captures.py" in line for node in nodes for line in node.sources)

        assert graphcap(["diff", str(before), str(before)]) == 0
        assert graphcap(["diff", str(before), str(after)]) == 1


if __name__ == "__main__":
    main()
