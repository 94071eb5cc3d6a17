"""A browser for all tests of the page, and the page that most of them open."""

import pytest
from browser import Browser
from runfolders import comparison

from fedbcgd.report import page


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def address(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    page.write([comparison(place / "runs")], place / "r.html")
    return (place / "r.html").as_uri()


@pytest.fixture
def opened(browser, address):
    browser.dark(False)
    browser.size(1280, 900)
    browser.go(address)
    yield browser
    assert browser.errors() == []
