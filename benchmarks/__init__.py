"""Measurements of graphcap beside what users would pick instead: ``python -m benchmarks``.

One module per topic; each topic runs in a process of its own, its sides in turns in that process.

    calls        host and end-to-end time of compiled calls, also against a raw replay of the same capture
    breakdown    where the microseconds of a one-kernel call go
    training     a training step
    memory       reserved memory of eight batch sizes
    recording    recording scopes and stacks, per node (peer: the handler of torch 2.15)
    left_behind  what eager launches and replays cost after a recording
    nodes        reading and rendering a list of 10,000 nodes
    liveness     ``check_input_liveness``, per replay
"""

from __future__ import annotations
