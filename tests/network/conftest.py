"""Runs in folders without figures, which take longer than the runs and are tested elsewhere."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_figures() -> Iterator[None]:
    from fedbcgd.display import plots

    with pytest.MonkeyPatch.context() as patch:
        for name in ("curves", "label_counts"):
            patch.setattr(plots, name, lambda *_: None)
        yield
