"""Arguments that every kind of run checks alike."""

import numpy as np
import pytest

from fedbcgd import UserError
from fedbcgd.engine.assemble import check_integer


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, 0, 2**63])
def test_what_is_no_integer(value):
    """True is an int to Python, but nobody means one round by it."""
    with pytest.raises(UserError, match="rounds: expected an integer ≥ 1, got"):
        check_integer("rounds", value, 1)


@pytest.mark.parametrize("value", [1, np.int64(3)])
def test_integers(value):
    check_integer("rounds", value, 1)
