"""Held outputs on HostGraph: the scenarios of helpers/backend_outputs.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import backend_outputs
from helpers.backend_calls import Scenario, fresh_compiler, scenario_name, scenarios


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.mark.parametrize("scenario", scenarios(backend_outputs), ids=scenario_name)
def test_outputs(scenario: Scenario) -> None:
    scenario("cpu")
