"""Whether a generated module's ``call`` may be passed by: only if all it does is call its one partition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from graphcap_backend.inductor import _only_calls_partition

_CALL = """
async_compile.wait(globals())

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        s77 = arg0_1
        arg1_1_size = arg1_1.size()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            partition0_args = [arg1_1, s77]
            del arg1_1
            (buf0,) = self.partitions[0](partition0_args)
            del partition0_args
            {more}
        return (reinterpret_tensor(buf0, (4, 2), (2, 1), 0), )

runner = Runner(partitions=[partition_0,])
call = runner.call
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("del arg2_1", True),
        ("arg2_1.copy_(buf0, False)", False),
        ("torch.ops.mylib.log.default(buf0)", False),
        ("buf1 = torch.ops.aten.nonzero.default(buf0)", False),
        ("extern_kernels.mm(buf0, buf0, out=arg2_1)", False),
        ("cpp_fused_0(buf0, arg2_1)", False),
        ("this is no Python", False),
    ],
)
def test_only_calls_partition(more: str, expected: bool) -> None:
    graph = SimpleNamespace(partition_maps=[object()], source_code=_CALL.format(more=more))
    assert _only_calls_partition(graph) is expected


def test_a_module_of_another_form_is_not_passed_by() -> None:
    assert not _only_calls_partition(SimpleNamespace(partition_maps=[object()], source_code="def call(args): pass"))
