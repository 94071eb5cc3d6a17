"""A headless Chromium, driven by Selenium."""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ABSENT = (
    "" if CHROMIUM and DRIVER else "no chromium and chromedriver on this machine (Debian: chromium, chromium-driver)"
)
CLIPBOARD = (  # puts copied texts where a test can read them
    "window.copied = []; Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => { copied.push(t) }}})"
)
PATIENCE = 60.0  # seconds: a busy machine is no reason to fail


class Browser:
    def __init__(self, profile: Path):
        options = ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
            options.add_argument(f"--{argument}")
        options.add_argument("--window-size=1280,900")
        options.add_argument(f"--user-data-dir={profile}")
        options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = ChromeService(DRIVER, env=os.environ | {"HOME": str(profile)})
        self._driver = Chrome(options, service)
        self.close = self._driver.quit
        self.go = self._driver.get
        self.run = self._driver.execute_script

    def size(self, width: int, height: int) -> None:
        """Of what the page sees: also narrower than a window can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def click(self, css: str) -> None:
        self._on(css, WebElement.click)

    def type(self, css: str, text: str) -> None:
        self._on(css, WebElement.send_keys, text)

    def text(self, css: str) -> str:
        return str(self._on(css, lambda element: element.text))

    def _on(self, css: str, act: Any, *arguments: Any) -> Any:
        """Of an element; found again where the page was drawn anew between the finding and the doing."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return act(self._driver.find_element(By.CSS_SELECTOR, css), *arguments)
            except StaleElementReferenceException:
                if time.monotonic() > until:
                    raise

    def keys(self, text: str) -> None:
        """To whatever has the focus, where its caret is."""
        ActionChains(self._driver).send_keys(text).perform()

    def drag(self, places: Sequence[tuple[float, float]]) -> None:
        """With the mouse, from the first place over the others to the last."""
        actions = ActionBuilder(self._driver, duration=40)
        for k, (x, y) in enumerate(places):
            actions.pointer_action.move_to_location(round(x), round(y))
            if k == 0:
                actions.pointer_action.pointer_down()
        actions.pointer_action.pointer_up()
        actions.perform()

    def download(self, css: str, folder: Path) -> Path:
        """The file that a button saves."""
        before = set(folder.iterdir())
        behaviour = {"behavior": "allow", "downloadPath": str(folder)}
        self._driver.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
        self.run("document.querySelector(arguments[0]).click()", css)
        until = time.monotonic() + PATIENCE
        while not (
            new := [
                p for p in set(folder.iterdir()) - before if not p.name.startswith(".") and p.suffix != ".crdownload"
            ]
        ):
            assert time.monotonic() < until, f"{css} saved nothing"
            time.sleep(0.05)
        return new[0]

    def texts(self, css: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", css))

    def errors(self) -> list[str]:
        """What the page complained of since the last call."""
        found = self._driver.get_log("browser")
        return [entry["message"] for entry in found if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]

    def leave(self) -> None:
        """A page whose server has gone, and which complains of it, as it should."""
        self.go("about:blank")
        self.errors()

    def wait(self, script: str) -> Any:
        until = time.monotonic() + PATIENCE
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"never came true: {script}"
            time.sleep(0.1)
        return value

    def wait_for(self, expected: Any, script: str) -> None:
        """Until the script returns just that; what was there before may still be there for a while."""
        until = time.monotonic() + PATIENCE
        while (value := self.run(script)) != expected:
            assert time.monotonic() < until, f"{value!r} never became {expected!r}: {script}"
            time.sleep(0.1)
