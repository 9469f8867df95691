"""The captured callable: which graph serves a call, and what else serves it when none may.

One key (shape key and static addresses) goes through these states:

    unseen -> warm (ran once uncaptured) -> captured -> ... -> released (least recently used, or inputs gone)
                      |
                      '-> refused (capture failed, or inputs that cannot be copied in)

A call at a captured key takes the first way that is open (``Family.next_instance``):

    1. an idle instance whose outputs are handed out as aliases, captured when all others are in use: two take
       turns in ``y = f(x)`` loops,
    2. the copying instance, captured when callers hold too many; its outputs are the caller's own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphcap_backend.capture.arena import Arena
from graphcap_backend.capture.callee import Callee, ReplayLimits, Runner
from graphcap_backend.capture.capturer import Capturer
from graphcap_backend.capture.device import ALIGNMENT
from graphcap_backend.capture.family import Family
from graphcap_backend.capture.family_table import FamilyTable
from graphcap_backend.capture.input_copies import SourceRefusedError
from graphcap_backend.capture.inputs import (
    InputRoles,
    assign_roles,
    input_kinds,
    reads_any,
    refuse_inputs,
    refuse_layout,
    refuse_written_overlap,
    run_on_aligned_copies,
    written_ranges,
)
from graphcap_backend.capture.instance import Instance
from graphcap_backend.capture.key_history import Key, KeyHistory
from graphcap_backend.capture.outputs import any_in_use
from graphcap_backend.capture.skip import SkipKind, SkipReason
from graphcap_backend.errors import NotWarmedUpError

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig

logger = logging.getLogger("graphcap_backend")


def _same_addresses_in_python(tensors: list[Any], addresses: list[int], indices: list[int]) -> bool:
    return all(tensors[i].data_ptr() == addresses[i] for i in indices)


# CPU builds of torch lack the C++ call.
_same_addresses: Callable[[list[Any], list[int], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _same_addresses_in_python
)
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


class Replayed:
    """A callable that is captured at the second call of each key and replayed from then on.

    Calls return what ``callee.run`` returns. Outputs alias graph memory but are never overwritten while
    somebody holds them. Safe to call from several threads.
    """

    def __init__(
        self,
        callee: Callee,
        *,
        limits: ReplayLimits,
        annotations: AnnotationConfig | None,
        on_skip: Callable[[SkipReason], None],
        on_capture: Callable[[Instance], None] | None = None,
    ) -> None:
        self.callee = callee
        self.runner = Runner(callee)
        self.fallbacks: Counter[SkipKind] = Counter()
        self.refused: SkipReason | None = None
        self._limits = limits
        self._on_skip = on_skip
        self._arena = Arena.of(callee.device)
        self._lock, self._gone = self._arena.lock, self._arena.gone
        self._is_capturing = self._arena.device.is_capturing
        self._current_stream = self._arena.device.current_stream
        self._roles: InputRoles | None = None
        self._keys = KeyHistory(limits, callee, on_skip)
        self._table = FamilyTable(limits.max_graphs, self._keys.say_room_is_made)
        self._capturer = Capturer(
            callee,
            self.runner,
            arena=self._arena,
            table=self._table,
            limits=limits,
            annotations=annotations,
            on_skip=on_skip,
            on_capture=on_capture,
        )
        self._static: list[int] = []
        self._copied: tuple[int, ...] = ()
        self._keyed: InputRoles | None = None
        """The roles, if calls with the same static addresses may still differ in their keys."""
        self._kinds: tuple[torch.device | None, ...] | None = None
        self._met: dict[tuple[torch.device | None, ...] | None, InputRoles | SkipReason] = {}

    @property
    def families(self) -> tuple[Family, ...]:
        """Captured keys, least recently used first."""
        return tuple(self._table)

    @property
    def notices(self) -> tuple[SkipReason, ...]:
        """What about the calls, rather than about one key, stands against capturing."""
        return tuple(self._keys.notices)

    @property
    def num_replays(self) -> int:
        """Replays so far, those of released graphs included."""
        live = sum(instance.num_replays for family in self._table for instance in family.instances)
        return live + self._table.num_replays_released

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Serve one call. ``inputs`` is cleared, as Inductor's callables do."""
        if self._is_capturing():
            return self._run_inside(inputs)
        grad = _is_grad_enabled()
        with self._lock:
            if self._gone:
                self._arena.settle()
            family = self._table.current
            if (
                family is not None
                and _same_addresses(inputs, family.static_addresses, self._static)
                and (self._keyed is None or family.key[:2] == self._keyed.variable_key(inputs))
                and (not family.written or not reads_any(inputs, self._copied, family.written))
            ):
                for instance in family.instances:
                    if not any_in_use(instance.probes) and (
                        instance.plain or (instance.finds(inputs) and instance.is_clear())
                    ):
                        arena = self._arena
                        elsewhere = arena.several_streams or self._current_stream() != arena.last_stream
                        if elsewhere and not arena.order(instance):
                            break
                        if grad:
                            _set_grad_enabled(False)
                        try:
                            outputs = instance.replay(inputs)
                        except SourceRefusedError:
                            break  # the other way meets it again, and knows what to do
                        finally:
                            if grad:
                                _set_grad_enabled(True)
                        inputs.clear()
                        return outputs
            with self._arena.device.made_current():
                try:
                    served = self._other_way(inputs)
                except SourceRefusedError as error:
                    self._copy_outside(error)
                    served = self._other_way(inputs)
        if not isinstance(served, partial):
            return served
        # Not under the lock: what runs uncaptured may be the user's code, which may wait for another thread's call.
        with self._arena.device.made_current():
            return served()

    def _run_inside(self, inputs: list[Any]) -> Sequence[Any]:
        if not self.runner.has_run and self.callee.device.type == "cuda":
            raise NotWarmedUpError(
                f"{self.callee.name} is called for the first time inside a capture, where its kernels cannot be "
                "loaded or tuned. Call the compiled function once with such inputs before the capture."
            )
        with self._arena.device.made_current():
            return self._uncaptured(inputs, SkipKind.ALREADY_CAPTURING)()

    def _key(self, inputs: Sequence[Any]) -> Key:
        roles = self._roles_met()
        return (*roles.variable_key(inputs), tuple(inputs[i].data_ptr() for i in roles.static))

    def _family(self, key: Key, inputs: Sequence[Any]) -> Family:
        at = dict(zip(self._static, key[2], strict=True))
        roles = self._roles_met()
        return Family(
            key,
            static_addresses=[at.get(i, 0) for i in range(max(at, default=-1) + 1)],
            written=written_ranges(inputs, roles),
            refused=refuse_layout(inputs, roles),
            statics=tuple(StorageWeakRef(inputs[i].untyped_storage()) for i in self._static),  # type: ignore[no-untyped-call]
        )

    def _other_way(self, inputs: list[Any]) -> Sequence[Any] | partial[Sequence[Any]]:
        """Serve a call that the most recent key's idle instances could not, or say how it is to run uncaptured."""
        self._meet(inputs)
        if self.refused is not None:
            return self._run_refused(inputs, self.refused)
        self._roles_met().check_written_sizes(inputs)
        key = self._key(inputs)
        family = self._table.use(key)
        if family is None:
            if self._demote_volatile(inputs, key):
                key = self._key(inputs)
            self._table.drop_dead(key[2])
            sizes = self._roles_met().sizes(inputs, self.callee.sizes)
            reason = self._keys.not_yet(key, sizes, num_captured=len(self._table), num_ever=self._table.num_captured)
            if reason is not None:
                return self._uncaptured(inputs, reason)
            family = self._family(key, inputs)
            self._table.keep(family)
        if family.refused is not None:
            return self._run_refused(inputs, family.refused)
        overlap = refuse_written_overlap(inputs, self._roles_met(), family.written)
        if overlap is not None:
            return self._run_refused(inputs, overlap)
        instance = self._capturer.open_instance(family, inputs, self._roles_met())
        if instance is None:
            return self._uncaptured(inputs, family.refused.kind if family.refused else SkipKind.OUTPUTS_HELD)
        if not self._arena.order(instance):
            return self._uncaptured(inputs, SkipKind.STREAM_CAPTURED)
        if not self._roles_met().written_back:
            # Which inputs overlap is no part of the key, so with write-backs every call comes this way.
            self._table.current = family
        with torch.no_grad():
            outputs = instance.replay(inputs)
        inputs.clear()
        return outputs

    def _copy_outside(self, error: SourceRefusedError) -> None:
        """Capture anew, with inputs that are copied before each replay. Nothing was replayed yet."""
        logger.debug("graphs of %s cannot copy their inputs themselves: %s", self.callee.name, error)
        self._arena.device.copies_inside = False
        self.release()

    def _roles_met(self) -> InputRoles:
        assert self._roles is not None
        return self._roles

    def _meet(self, inputs: Sequence[Any]) -> None:
        """Look which inputs are tensors, and where: the first time, and whenever that is not as at the last call."""
        kinds = input_kinds(inputs)
        if kinds == self._kinds:
            return
        self._kinds, self._table.current = kinds, None
        met = self._met.get(kinds)
        if met is None:
            device = self.callee.device
            met = refuse_inputs(inputs, device) or assign_roles(inputs, self.callee.static, self.callee.mutated, device)
        self._met[kinds] = met
        self.refused = met if isinstance(met, SkipReason) else None
        if isinstance(met, InputRoles):
            self._take_roles(met)

    def _take_roles(self, roles: InputRoles) -> None:
        self._roles = roles
        self._static, self._copied = list(roles.static), roles.copied
        self._keyed = roles if roles.values or roles.host_scalars else None

    def _demote_volatile(self, inputs: Sequence[Any], key: Key) -> bool:
        """Have inputs copied in that Inductor takes for static but that come at another address each time.

        In a backward these are saved inputs of the user. Parameters get a graph per address instead
        (several modules may share one compiled function), and so do outputs of captured graphs.
        """
        before = self._keys.last_addresses(key)
        if before is None:
            return False
        volatile = {
            i
            for i, old, new in zip(self._static, before, key[2], strict=True)
            # Code made for an aligned parameter cannot read one that is not.
            if (new % ALIGNMENT and not old % ALIGNMENT)
            or (old != new and not isinstance(inputs[i], torch.nn.Parameter) and not self._arena.owns(inputs[i]))
        }
        if not volatile:
            return False
        self.release()
        self._keys.clear()
        static = [i for i in self._static if i not in volatile]
        roles = assign_roles(inputs, static, self.callee.mutated, self.callee.device)
        self._met[self._kinds] = roles
        self._take_roles(roles)
        self._keys.add_warm(self._key(inputs))  # it ran at this shape before
        return True

    def _run_refused(self, inputs: list[Any], reason: SkipReason) -> partial[Sequence[Any]]:
        """Serve a call that cannot be captured. ``on_skip`` hears of each, and may raise: nothing has run yet."""
        self._on_skip(reason)
        return self._uncaptured(inputs, reason.kind)

    def _uncaptured(self, inputs: list[Any], kind: SkipKind) -> partial[Sequence[Any]]:
        self.fallbacks[kind] += 1
        misaligned = self._arena.device.misaligned(inputs)
        if not misaligned:
            return partial(self.runner, inputs)
        return partial(run_on_aligned_copies, self.runner, inputs, misaligned, self.callee.mutated)

    def release(self) -> None:
        """Give all graphs and their memory back. Calls go on, uncaptured or captured anew."""
        with self._lock:
            self._table.clear()
