"""Runs in folders, without their figures."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def without_figures(no_figures: None) -> None:
    pass
