"""Errors of graphcap.

    GraphcapError(RuntimeError)
    |- CaptureError              a capture could not begin, run or end
    |  |- NestedCaptureError     a capture was begun inside another on the same thread
    |  |- UnjoinedStreamError    work was forked to a stream that never joined back
    |  '- NotWarmedUpError       a compiled function met its first call inside a capture
    |- InputLivenessError        a replay would read memory of a tensor that is gone
    |- SkippedError              on_skip="error" met a subgraph that cannot be captured
    |- SavedCaptureError         a saved file is cut off, of another version or not ours
    '- DriverError               a call into a CUDA library failed; carries its name and result
       |- CudaError              libcuda or libcudart, through cuda-bindings
       '- CuptiError             libcupti
          |- CuptiBusyError      somebody else in this process holds CUPTI
          '- CuptiMissingError   libcupti, or a call of it that is needed, was not found

Bad arguments are ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations


class GraphcapError(RuntimeError):
    """Base of every error that graphcap raises on its own account."""


class CaptureError(GraphcapError):
    """A capture could not begin, run or end."""


class NestedCaptureError(CaptureError):
    """A capture was begun inside another one on the same thread."""


class UnjoinedStreamError(CaptureError):
    """Work was forked to a stream that did not join back before the capture ended."""


class NotWarmedUpError(CaptureError):
    """A compiled function met its first call inside a capture; call it once before."""


class InputLivenessError(GraphcapError):
    """A replay would read memory of an input tensor that has been freed."""


class SkippedError(GraphcapError):
    """A subgraph cannot be captured and the caller asked for that to be an error."""


class SavedCaptureError(GraphcapError):
    """A file is not a saved capture, is cut off, or has another schema version."""


class DriverError(GraphcapError):
    """A call into a CUDA library failed.

    Attributes:
        api: name of the function called.
        result: name of the result it gave.
    """

    def __init__(self, api: str, result: str, advice: str = "") -> None:
        self.api = api
        self.result = result
        super().__init__(f"{api} failed with {result}" + (f". {advice}" if advice else ""))


class CudaError(DriverError):
    """A call into libcuda or libcudart failed."""


class CuptiError(DriverError):
    """A call into libcupti failed."""


class CuptiBusyError(CuptiError):
    """CUPTI is held by somebody else in this process (torch.profiler, Nsight, a sanitizer)."""


class CuptiMissingError(CuptiError):
    """libcupti, or a function of it that is needed, was not found."""
