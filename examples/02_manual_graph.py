"""Capture by hand: record once, change the input in place, replay.

The concept: ``graph`` takes a ``torch.cuda.CUDAGraph`` or, without a GPU, a ``HostGraph`` with the
same methods. A capture executes nothing; a replay runs what was recorded, in the same memory, and
no Python of yours. With ``enable_annotations`` every node knows the scope and the line it came from.
"""

from __future__ import annotations

import torch

from graphcap_backend import HostGraph, capture_nodes, get_kernel_annotations, graph, mark_kernels


def main() -> None:
    on_cuda = torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    weight = torch.eye(4, device=device) * 2
    x = torch.ones(3, 4, device=device)
    _ = x @ weight + 1  # a first run outside, so that libraries are set up before the capture

    g = torch.cuda.CUDAGraph() if on_cuda else HostGraph()
    with graph(g, enable_annotations=True):
        with mark_kernels("project"):
            projected = x @ weight
        with mark_kernels({"name": "shift", "layer": 3}):
            y = projected + 1

    g.replay()
    assert torch.equal(y, torch.full((3, 4), 3.0, device=device))
    x.fill_(5)
    g.replay()
    assert torch.equal(y, torch.full((3, 4), 11.0, device=device))

    nodes = capture_nodes(g)
    for node in nodes:
        print(node.index, node.kind, node.name, node.annotation)
    labels = [node.annotation["name"] for node in nodes if node.annotation]
    assert labels[0] == "project"
    assert labels[-1] == "shift"

    assert len(get_kernel_annotations()) == len(labels)
    g.reset()
    assert len(get_kernel_annotations()) == 0, "a graph that is gone leaves no entries"


if __name__ == "__main__":
    main()
