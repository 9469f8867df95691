"""Show what captures know, in files and tools that people already open.

    saved, saved_json    one capture in one file, to be read without CUDA and without the model
    profile, measure     time by node; sums by line, scope, module and kernel
    tracing              labels in traces of torch.profiler
    flame                flame graphs (speedscope, collapsed stacks)
    precapture           capture ahead, with a progress bar
    commands             the command line's own work
    page                 one self-contained HTML page

Imports capture, annotate and report; only the command line and the package's own names import it.
"""

from __future__ import annotations
