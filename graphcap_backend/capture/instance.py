"""One captured graph of a callable, with the buffers and outputs that belong to it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphcap_backend.capture.allocator import overlap, range_of
from graphcap_backend.capture.input_copies import watch_graph
from graphcap_backend.capture.inputs import InputRoles, Staging
from graphcap_backend.capture.memory_pool import Pool, PoolName, SharedPool
from graphcap_backend.capture.outputs import (
    HandOut,
    OwnedOutput,
    any_in_use,
    copy_outputs,
    plan_outputs,
    unowned_aliases,
)

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig
    from graphcap_backend.capture.arena import Arena
    from graphcap_backend.capture.record import CapturedGraph


_detach: Callable[[Tensor], Tensor] = torch.Tensor.detach


class Drop(Protocol):
    """Drops an instance, since somebody resized an output or for another reason."""

    def __call__(self, *, resized: bool = False) -> None: ...


def _keep(*, resized: bool = False) -> None:
    """Nobody keeps the instance."""


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
        pool: PoolName = 0,
        in_place: tuple[int, ...] = (),
        annotations: AnnotationConfig | None = None,
        where: str | None = None,
    ) -> None:
        """Capture ``run`` as called with ``inputs``. Executes nothing; raises what the capture raises.

        An instance in the pool "copies" hands out copies. ``in_place`` are inputs that are read where they are
        now. ``where`` is the user's line that copies of inputs belong to.
        """
        self.copies = pool == "copies"
        self.in_place = tuple((i, inputs[i].data_ptr()) for i in in_place)
        self.plain = not in_place and pool != "shared"
        """Whether any call of its key finds its inputs there, and probes are all that there is to ask."""
        roles = roles.reading_in_place(in_place)
        donated = donated.difference(in_place)  # there it is the memory of another graph
        self.num_replays = 0
        self.drop: Drop = _keep
        """Has the key of this instance captured anew at its next call. Set by whoever keeps the instance."""
        self._arena = arena
        self.graph = arena.device.new_graph()
        # A host graph holds what it reads; that is no use of an output by a caller. A CUDA graph holds nothing, and
        # what other threads do with those outputs meanwhile must not be taken for its doing.
        static = [] if arena.device.shares_memory else [inputs[i] for i in roles.static]
        read = arena.owned_by_graphs(static)
        held_before = [out.use_count() for out in read]
        self._pool: Pool | None = arena.pool(pool)
        try:
            self._pool.make_room()
            with arena.device.touched_memory(self._pool.token) as self.touched:
                outputs, storages = self._capture(run, inputs, roles, donated, annotations, where)
            self._pool.check(self.touched)
            self.graph.instantiate()
            plan, own = plan_outputs(outputs, storages, self._staging.stand_in(inputs))
        except BaseException:
            # Whoever keeps the exception keeps this object; torch takes no pool whose last graph is gone.
            self._pool = None
            with contextlib.suppress(RuntimeError):
                self.graph.reset()
            raise
        self._launch = arena.device.launcher(self.graph)
        watch_graph(self.graph, self.input_copies, arena.lock)
        del outputs
        self._take_outputs(own, foreign={constant.untyped_storage()._cdata for constant in constants})
        del own
        hand_out = HandOut(plan, len(self._own), len(inputs))
        self._hand_out = None if hand_out.passes_on else hand_out
        arena.add(self)
        self._hold([(out, out.use_count() - before) for out, before in zip(read, held_before, strict=True)])

    def _capture(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        inputs: Sequence[Any],
        roles: InputRoles,
        donated: frozenset[int],
        annotations: AnnotationConfig | None,
        where: str | None,
    ) -> tuple[list[Any], dict[int, int]]:
        """Outputs of the captured run, and which storages are those of inputs."""
        device = self._arena.device
        assert self._pool is not None  # no name for it here: whoever keeps an exception keeps this frame
        session = device.session(self.graph, self._pool.token, annotations)
        if not device.shares_memory:
            self._staging = Staging(inputs, roles)
            if self._staging.fills:
                self._staging.load(inputs)
        with session:
            occupied = self._pool.occupy_held(self.touched)
            if device.shares_memory:
                self._staging = Staging(inputs, roles)
            staged = self._staging.stand_in(inputs)
            candidates = [i for i, value in enumerate(staged) if isinstance(value, Tensor) and i not in donated]
            storages = {staged[i].untyped_storage()._cdata: i for i in reversed(candidates)}
            # The captured callable may drop an input; a weak reference keeps its storage's identity from being reused.
            identities = [StorageWeakRef(staged[i].untyped_storage()) for i in candidates]  # type: ignore[no-untyped-call]
            self.input_copies = device.capture_input_copies(self.graph, inputs, self._staging.buffers, where)
            self._staging.leave_out(copy.index for copy in self.input_copies)
            if device.shares_memory:
                self._staging.disown()
            outputs = list(run(staged))
            del staged, occupied
        self.captured: CapturedGraph = session.captured
        if self.captured.record is not None:
            # Raw tracebacks hold code that Dynamo made, which holds this graph, out of the collector's sight.
            self.captured.record.resolve()
        del identities
        return outputs, storages

    def _take_outputs(self, own: Sequence[Tensor], foreign: set[int]) -> None:
        """Begin to watch who holds the output tensors that belong to the graph."""
        aliases = self._unowned_aliases(own)
        self._own = [aliases.get(id(tensor), tensor) for tensor in own]
        self.owned = [] if self.copies else self._by_storage(own, aliases, foreign)
        for out in self.owned:
            out.set_baseline()
        self._shared = self._pool if isinstance(self._pool, SharedPool) else None
        if self._shared is not None:
            self._end_of_lending = self._shared.lend(self.owned, self)
            self._lent = dict.fromkeys(out for out in self.owned if out.is_lent)
        self._watched = list(self.owned)
        self.refresh_probes()

    def _hold(self, holds: list[tuple[OwnedOutput, int]]) -> None:
        """What the graph holds of other graphs' outputs is no use by a caller, for as long as this instance lives."""
        self._arena.adjust_baselines(holds)
        self._given_back: weakref.finalize[..., Instance] | None = None
        if any(held for _, held in holds):
            self._given_back = weakref.finalize(self, self._arena.gone.append, holds)
            self._given_back.atexit = False

    def _unowned_aliases(self, own: Sequence[Tensor]) -> dict[int, Tensor]:
        """Of output tensors (by id) whose memory other graphs may have between replays: what is handed out of instead.

        That is where outputs are copied right after each replay, and in a shared pool.
        """
        mine: list[Tensor] = []
        if isinstance(self._pool, SharedPool):
            mine = [tensor for tensor in own if overlap(range_of(tensor.untyped_storage()), self.touched.ranges)]
        elif self.copies and self._arena.device.shares_memory:
            mine = [tensor for tensor in own if tensor.device == self._arena.device.torch_device]
        return dict(zip(map(id, mine), unowned_aliases(mine), strict=True))

    def _by_storage(self, own: Sequence[Tensor], aliases: dict[int, Tensor], foreign: set[int]) -> list[OwnedOutput]:
        """The storages of output tensors that belong to the graph, as constants of compiled code do not."""
        over: dict[int, list[Tensor]] = {}
        for tensor in own:
            over.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        return [
            OwnedOutput(
                [aliases.get(id(tensor), tensor) for tensor in tensors],
                self,
                kept=tensors if id(tensors[0]) in aliases else None,
            )
            for storage, tensors in over.items()
            if storage not in foreign
        ]

    def finds(self, inputs: Sequence[Any]) -> bool:
        """Whether the inputs that are read in place are there."""
        for i, address in self.in_place:  # noqa: SIM110 - any() and its generator would take twice as long
            if inputs[i].data_ptr() != address:
                return False
        return True

    def is_clear(self) -> bool:
        """Whether a replay would overwrite no other graph's output, in a shared pool: elsewhere the probes tell."""
        return self._shared is None or not self._shared.holds_any(self._others)

    def idle(self) -> bool:
        """Whether a replay would overwrite nothing that somebody still holds."""
        return not any_in_use(self.probes) and self.is_clear()

    def is_held(self) -> bool:
        """Whether a caller holds an output of it."""
        return any(out.in_use() for out in self.owned)

    def streams(self) -> set[int | None]:
        """Where callers were given what a replay overwrites (None: on the arena's first stream)."""
        return {out.stream for out in self._watched}

    def handed_out_on(self, stream: int) -> None:
        """The next replay's outputs are for callers on ``stream``."""
        for out in self.owned:
            out.stream = stream

    def watch(self, outputs: Sequence[OwnedOutput]) -> None:
        """Take outputs of another graph into account: they lie in memory that this one writes to."""
        self._watched.extend(outputs)
        self.refresh_probes()

    def refresh_probes(self) -> None:
        """Watched outputs or their baselines have changed."""
        # In a shared pool those of others are many, and few of them are handed out: the pool knows which.
        shares = self._shared is not None
        self.probes = [out.probe() for out in (self.owned if shares else self._watched)]
        self._others = frozenset(self._watched if shares else ()).difference(self.owned)

    def unwatch_released(self) -> None:
        """Drop watched outputs whose graph is gone and that nobody holds."""
        unwatched = [out for out in self._watched if out.released and not out.in_use()]
        if unwatched:
            self._arena.streams_left.update(out.stream for out in unwatched)
            self._watched = [out for out in self._watched if out not in unwatched]
            self.refresh_probes()

    def replay(self, inputs: list[Any]) -> list[Any]:
        """Run the graph on this call's inputs. Gradients must be off; the arena's lock must be held.

        Raises:
            SourceRefusedError: the graph cannot read an input where it is; nothing was done.
        """
        held = []  # until the graph is launched
        for copy in self.input_copies:
            tensor = inputs[copy.index]
            if tensor.data_ptr() != copy.source or tensor.is_neg():
                held.append(copy.read_from(tensor))
        staging = self._staging
        if staging.fills:
            staging.load(inputs)
        if self._shared is not None:
            self._shared.hand_out(self._lent)
        self._launch()
        del held
        if staging.writes_back:
            staging.write_back(inputs)
        self.num_replays += 1
        own = copy_outputs(self._own) if self.copies else list(map(_detach, self._own))
        return own if self._hand_out is None else self._hand_out(own, inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes that this instance alone keeps allocated: outputs it hands out, and on the host its input buffers."""
        staging = 0 if self._arena.device.shares_memory else self._staging.num_bytes
        return staging + sum(out.num_bytes for out in self.owned if out.is_allocated)

    @property
    def is_shared(self) -> bool:
        """Whether other graphs may have the memory of its outputs between replays."""
        return self._shared is not None

    def release(self) -> None:
        """Give the graph and its memory back; outputs that callers hold stay valid."""
        self._arena.forget(self)
        self.graph.reset()
        if self._given_back is not None:
            self._given_back()
            self._arena.settle()
        if self._shared is not None:
            self._end_of_lending()
            self._shared = None
        self._own = []
        self.owned = []
        self._watched = []
        self.probes = []
        self._others = frozenset()
        self._staging.buffers.clear()
        self._pool = None
