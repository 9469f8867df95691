"""Take a capture: what runs on the device, written down once and replayed.

    graph -> session -> targets (CUDA, host)    one capture, every step undone if a later one fails
    record, template                            what a capture leaves behind, and how it dies
    nodes, cuda_nodes, render, diff, dot        the captured nodes as data and as text
    host, host_*                                HostGraph, the graph for machines without a GPU
    replay, instance, inputs, outputs, arena    a callable that captures itself and is replayed

Knows nothing of the compile backend above it; scopes and stacks come from ``annotate`` below it. State
lives in a session or in a captured graph's record. The exception is ``process``: the garbage collector
and the capture streams are shared by all captures whether we like it or not.
"""

from __future__ import annotations
