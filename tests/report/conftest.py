"""A browser for all tests of the page, and the page that most of them open."""

import pytest

from fedbcgd.report import page
from tests.report.browser import Browser
from tests.report.runfolders import comparison


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    chromium = Browser(tmp_path_factory.mktemp("chromium"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="session")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    page.write([comparison(folder / "runs")], folder / "r.html")
    return (folder / "r.html").as_uri()


@pytest.fixture
def opened(browser, address):
    browser.dark(False)
    browser.size(1280, 900)
    browser.go(address)
    yield browser
    assert browser.errors() == []


@pytest.fixture(scope="session")
def real_run(tmp_path_factory):
    """A short run as the command leaves it."""
    from fedbcgd.runs import config
    from fedbcgd.runs.execute import execute

    folder = tmp_path_factory.mktemp("real") / "run"
    settings = {
        "data": {"clients": 20},
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedbcgd", "local_steps": 1, "blocks": 2},
        "run": {"rounds": 4, "cohort": 4, "evaluate_every": 2, "workers": 0},
    }
    execute(config.check(settings, "test"), folder, figures=False)
    return folder
