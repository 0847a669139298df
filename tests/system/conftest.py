"""Models shared by the system tests: built once, cached under build/sim."""

import pytest
from tests.system.standin import standin_model

from rnic_sim.build import build_model


@pytest.fixture(scope="session")
def standin():
    """Gives the model directory of the stand-in NIC of a width."""
    built = {}

    def model(width: int):
        if width not in built:
            built[width] = build_model(*standin_model(width))
        return built[width]

    return model
