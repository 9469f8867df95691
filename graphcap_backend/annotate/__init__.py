"""Who launched each node of a captured graph: scopes, Python stacks, source lines.

    config.py      how one capture records
    scopes.py      mark_kernels, mark_stream: the scope in force on this thread
    backward.py    which forward scope and line a backward node comes from
    node_hooks.py  being told of each autograd node that is made, on any torch
    thread_state.py  objects that autograd takes along to its worker threads
    recording.py   one capture's recording, from before its begin to its end
    cupti.py       node-creation callbacks and ids, by ctypes on libcupti
    edge_walk.py   the same scopes from the capture frontier, where CUPTI is not free
    backward_brackets.py  backward nodes under an edge walk
    line_watch.py  compiled kernels' lines where CUPTI is not free
    stacks.py      raw tracebacks to text; which frames are left out
    origins.py     the model lines behind each kernel call of an Inductor-generated wrapper
    shape.py       how an executable graph numbers the nodes of child graphs
    registry.py    what a captured graph leaves behind, and the process-wide views of it
    profile.py     times joined to nodes and shared out to lines, scopes, modules
    activities.py  activity records of CUPTI, through cupti-python
    trace.py       labels in traces of torch.profiler (trace_join: which event is which node; trace_text: streaming)
    process.py     the one process-wide object

Nothing here imports from ``capture`` or loads CUDA, CUPTI or Inductor when imported.
"""
