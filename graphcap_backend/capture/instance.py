"""One captured graph of a callable, with the buffers and outputs that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphcap_backend.capture.inputs import InputRoles, Staging
from graphcap_backend.capture.outputs import Buffer, OwnedOutput, copy_outputs, hand_out, plan_outputs

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig
    from graphcap_backend.capture.arena import Arena
    from graphcap_backend.capture.record import CapturedGraph

_use_count = torch._C._storage_Use_Count


class Instance:
    """A graph, its input buffers, and its outputs.

    Ownership: outputs handed out by ``replay`` alias the graph's memory, which the next ``replay``
    overwrites; call it only when ``idle()``. With ``copies`` outputs are the caller's own.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        inputs: Sequence[Any],
        roles: InputRoles,
        *,
        arena: Arena,
        donated: frozenset[int] = frozenset(),
        constants: Sequence[Tensor] = (),
        copies: bool = False,
        annotations: AnnotationConfig | None = None,
    ) -> None:
        """Capture ``run`` as called with ``inputs``. Executes nothing; raises what the capture raises."""
        self.copies = copies
        self.num_replays = 0
        self._arena = arena
        device = arena.device
        self.graph = device.new_graph()
        session = device.session(self.graph, arena.pool(), annotations)
        read = arena.owned_by_graphs([inputs[i] for i in roles.static])
        held_before = [out.use_count() for out in read]
        if not device.staging_in_capture:
            self._staging = Staging(inputs, roles)
            self._staging.load(inputs)
        with session:
            if device.staging_in_capture:
                self._staging = Staging(inputs, roles)
            staged = self._staging.stand_in(inputs)
            outputs = list(run(list(staged)))
        self.captured: CapturedGraph = session.captured
        self.graph.instantiate()
        self._plan, own = plan_outputs(outputs, inputs, staged, donated)
        del outputs, staged
        self._own = [tensor.detach() for tensor in own]
        del own
        self._only_buffers = [output.slot for output in self._plan if isinstance(output, Buffer)] == list(
            range(len(self._plan))
        )
        foreign = {constant.untyped_storage()._cdata for constant in constants}
        self.owned = self._own_storages(foreign)
        self.ranges = arena.ranges()
        self._watched: list[OwnedOutput] = [] if copies else list(self.owned)
        self._probes = [out.probe() for out in self._watched]
        arena.add(self)
        # A host graph holds what it reads; that is no use of an output by a caller.
        self._holds = [(out, out.use_count() - before) for out, before in zip(read, held_before, strict=True)]
        arena.adjust_baselines(self._holds)

    def _own_storages(self, foreign: set[int]) -> list[OwnedOutput]:
        owned: dict[int, OwnedOutput] = {}
        for tensor in self._own:
            cdata = tensor.untyped_storage()._cdata
            if cdata not in owned and cdata not in foreign:
                owned[cdata] = OwnedOutput(tensor)
        for out in owned.values():
            out.set_baseline()
        return list(owned.values())

    def idle(self) -> bool:
        """Whether a replay would overwrite nothing that somebody still holds."""
        for storage, baseline in self._probes:
            if _use_count(storage) > baseline:
                return False
        return True

    def watch(self, outputs: Sequence[OwnedOutput]) -> None:
        """Take outputs of another graph into account: they lie in memory that this one writes to."""
        self._watched.extend(outputs)
        self.refresh_probes()

    def refresh_probes(self) -> None:
        """Baselines of watched outputs have changed."""
        self._probes = [out.probe() for out in self._watched]

    def unwatch_released(self) -> None:
        """Drop watched outputs whose graph is gone and that nobody holds."""
        self._watched = [out for out in self._watched if not out.released or out.in_use()]
        self.refresh_probes()

    def replay(self, inputs: list[Any]) -> list[Any]:
        """Run the graph on this call's inputs. Gradients must be off; the arena's lock must be held."""
        self._staging.load(inputs)
        self.graph.replay()
        self._staging.write_back(inputs)
        self.num_replays += 1
        if self.copies:
            return hand_out(self._plan, copy_outputs(self._own), inputs)
        if self._only_buffers:
            return [tensor.detach() for tensor in self._own]
        return hand_out(self._plan, [tensor.detach() for tensor in self._own], inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes that this instance keeps allocated: input buffers and outputs."""
        buffers = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._staging.buffers.values()}
        return sum(buffers.values()) + sum(out.num_bytes for out in self.owned)

    def release(self) -> None:
        """Give the graph and its memory back; outputs that callers hold stay valid."""
        self._arena.forget(self)
        self.graph.reset()
        self._arena.adjust_baselines([(out, -held) for out, held in self._holds])
        self._holds = []
        self._own = []
        self._staging.buffers.clear()
