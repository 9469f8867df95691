"""Control flow on HostGraph: the scenarios of helpers/backend_control_flow.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import backend_control_flow
from helpers.backend_calls import Scenario, fresh_compiler, scenario_name, scenarios


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.mark.parametrize("scenario", scenarios(backend_control_flow), ids=scenario_name)
def test_control_flow(scenario: Scenario) -> None:
    scenario("cpu")
