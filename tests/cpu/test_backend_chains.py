"""Chains of graphs on HostGraph: the scenarios of helpers/backend_chains.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import backend_chains
from helpers.backend_calls import Scenario, fresh_compiler, scenario_name, scenarios

# Dynamo of torch 2.14 asks inputs that are no leaves for their gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.mark.parametrize("scenario", scenarios(backend_chains), ids=scenario_name)
def test_chains(scenario: Scenario) -> None:
    scenario("cpu")
