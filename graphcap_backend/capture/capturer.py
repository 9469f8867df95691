"""Captures the instances of one callable: into which pool, what it means when that fails, when they are dropped."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphcap_backend.capture.call_watch import CallWatch
from graphcap_backend.capture.input_copies import SourceRefusedError
from graphcap_backend.capture.instance import Instance
from graphcap_backend.capture.memory_pool import HeldMemoryError
from graphcap_backend.capture.skip import SkipKind, SkipReason

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig
    from graphcap_backend.capture.arena import Arena
    from graphcap_backend.capture.callee import Callee, ReplayLimits
    from graphcap_backend.capture.family import Family, NextInstance
    from graphcap_backend.capture.family_table import FamilyTable
    from graphcap_backend.capture.inputs import InputRoles

logger = logging.getLogger("graphcap_backend")

_MUCH_MEMORY_BYTES = 32 << 20
"""From here on graphs are captured where all memory is shared, which may take more captures. cuBLAS's workspace on a
recent GPU is as much, and each pool would have one."""
_FEW_IN_THE_WAY = 2
"""Captures of a key that came to nothing because of results held, before its outputs are copied."""
_FEW_RESIZED = 3
"""Graphs dropped, since callers resized their outputs, before those of the function are copied."""


class Capturer:
    """Finds or makes an instance for a call. All calls under the arena's lock.

    Args:
        run: runs ``callee``.
        table: where the families are.
        on_skip: told when a key cannot be captured; may raise.
        on_capture: told of each instance.
    """

    def __init__(
        self,
        callee: Callee,
        run: Callable[[list[Any]], Sequence[Any]],
        *,
        arena: Arena,
        table: FamilyTable,
        limits: ReplayLimits,
        annotations: AnnotationConfig | None,
        on_skip: Callable[[SkipReason], None],
        on_capture: Callable[[Instance], None] | None,
    ) -> None:
        self._callee = callee
        self._run = run
        self._arena = arena
        self._table = table
        self._limits = limits
        self._annotations = annotations
        self._on_skip = on_skip
        self._on_capture = on_capture
        self._shares = False
        """Whether instances go into the shared pool, since one of some key needed much memory."""
        self._num_resized = 0

    def open_instance(self, family: Family, inputs: list[Any], roles: InputRoles) -> Instance | None:
        """An instance that may be replayed now, captured if need be; None when capturing fails."""
        idle = family.idle_for(inputs)
        if idle is None and self._arena.drop_resized():
            self._table.keep_still(family)
            idle = family.idle_for(inputs)
        if idle is not None or family.full:
            return idle
        captured = self._capture(family, inputs, roles)
        while captured is not None and not family.instances and self._is_misplaced(family, captured):
            captured = self._capture(family, inputs, roles, again=True)
        if captured is None:
            return None
        self._table.num_captured += not family.instances
        family.add(captured)
        self._let_be_dropped(captured, family)
        if self._on_capture is not None:
            self._on_capture(captured)
        return captured

    def _is_misplaced(self, family: Family, first: Instance) -> bool:
        """Whether the first instance of a key is better captured elsewhere. Then it is released, and room was made."""
        if not self._shares and self._callee.may_share_outputs and first.touched.exact:
            self._shares = first.touched.num_bytes >= _MUCH_MEMORY_BYTES
            if self._shares:
                first.release()
                self._table.drop_others(family)
                return True
        if self._arena.is_loose(first):
            first.release()
            self._arena.drop_shared()
            return True
        return False

    def _let_be_dropped(self, instance: Instance, family: Family) -> None:
        """Once somebody resets the graph (the report gives it away) its key is captured anew, at the next call."""
        arena, key = self._arena, family.key
        myself, dropped = weakref.ref(self), weakref.ref(instance)

        def drop(*, resized: bool = False) -> None:
            alive = myself()
            if alive is not None:
                with arena.lock:
                    alive._num_resized += resized
                    alive._table.drop_with(key, dropped())

        instance.drop = drop
        CallWatch.on(instance.graph, "reset").tell(drop)

    def _capture(self, family: Family, inputs: list[Any], roles: InputRoles, *, again: bool = False) -> Instance | None:
        """Capture the family's next instance. When that fails for its first one, its key is given up for good.

        Not if it went well before (``again``): memory that was given up for this may not be there yet.
        """
        read = () if self._callee.is_backward else roles.only_read(inputs)  # a backward may be given memory
        in_place = self._arena.own_among(inputs, read)
        shares = self._shares and self._arena.device.may_share_outputs()
        how = family.next_instance(in_place, self._limits.max_held_instances, shares=shares)
        if self._num_resized > _FEW_RESIZED or family.num_in_the_way > _FEW_IN_THE_WAY:
            how = how._replace(pool="copies")
        try:
            return self._instance(how, inputs, roles)
        except SourceRefusedError:
            raise
        except HeldMemoryError:
            family.num_in_the_way += 1  # the next call may hold less
            return None
        except Exception as error:
            # The capture has unwound itself; the uncaptured function serves this and later calls.
            logger.debug("capture of %s failed", self._callee.name, exc_info=True)
            family.full = not again
            if not family.instances and not again:
                family.refused = SkipReason(
                    kind=SkipKind.CAPTURE_FAILED,
                    detail=f"capturing {self._callee.name} raised {type(error).__name__}: {error}",
                    where=self._callee.where,
                )
                self._on_skip(family.refused)
            return None

    def _instance(self, how: NextInstance, inputs: list[Any], roles: InputRoles) -> Instance:
        # Buffers made here must be usable outside inference mode, whatever mode this call is in.
        with torch.inference_mode(False), torch.no_grad():
            return Instance(
                self._run,
                inputs,
                roles,
                arena=self._arena,
                donated=self._donated(roles),
                constants=self._callee.constants,
                pool=how.pool,
                in_place=how.in_place,
                annotations=self._annotations,
                where=self._callee.entry(),
            )

    def _donated(self, roles: InputRoles) -> frozenset[int]:
        """Inputs whose memory the callable may use for outputs, so that an output there need not be the input.

        A backward may do so with what the forward saved for it alone. At a fixed address it has done so in the
        caller's tensor; of those that are copied in, the caller's still has what it had before.
        """
        saved = frozenset(self._callee.static) if self._callee.is_backward else frozenset()
        return self._callee.donated | saved.intersection(roles.copied)
