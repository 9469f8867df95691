"""Which captured keys go: the least recently used, and those whose weights are gone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphcap_backend.capture.family import Family
from graphcap_backend.capture.family_table import FamilyTable


def _family(number: int, weight: Tensor) -> Family:
    key = ((number,), (), (weight.data_ptr(),))
    return Family(key, [weight.data_ptr()], statics=(StorageWeakRef(weight.untyped_storage()),))  # type: ignore[no-untyped-call]


def _table() -> FamilyTable:
    return FamilyTable(3, on_full=lambda: None)


def test_the_least_recently_used_one_goes() -> None:
    table, weight = _table(), torch.ones(1)
    families = [_family(number, weight) for number in range(4)]
    for family in families[:3]:
        table.keep(family)
    assert table.use(families[0].key) is families[0]
    table.current = families[1]
    table.keep(families[3])
    assert table.current is None
    assert list(table) == [families[2], families[0], families[3]]


def test_a_refusal_to_make_room_releases_nothing() -> None:
    def refuse() -> None:
        raise RuntimeError("full")

    table = FamilyTable(1, on_full=refuse)
    weight = torch.ones(1)
    first = _family(0, weight)
    table.keep(first)
    with pytest.raises(RuntimeError, match="full"):
        table.keep(_family(1, weight))
    assert list(table) == [first]


def test_families_of_weights_that_are_gone_go_when_others_come() -> None:
    table = _table()
    gone, stays = torch.ones(100_000), torch.ones(100_000)
    families = [_family(0, gone), _family(1, stays)]
    for family in families:
        table.keep(family)
    table.drop_dead((1234,))
    assert list(table) == families
    del gone
    table.drop_dead((stays.data_ptr(),))  # known weights in another shape: not looked for
    assert list(table) == families
    table.drop_dead((1234,))
    assert list(table) == families[1:]
