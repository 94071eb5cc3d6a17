"""A headless Chromium, driven over the WebDriver protocol with nothing but the standard library."""

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ABSENT = (
    "" if CHROMIUM and DRIVER else "no chromium and chromedriver on this machine (Debian: chromium, chromium-driver)"
)
CLIPBOARD = (  # what is copied is kept where a test can read it
    "window.kept = []; Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => { kept.push(t) }}})"
)
PATIENCE = 60.0  # seconds: a busy machine is no reason to fail
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    def __init__(self, profile: Path, width: int = 1280, height: int = 900, dark: bool = False):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        environment = os.environ | {"HOME": str(profile)}
        self._process = subprocess.Popen(
            [str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += [
            f"--window-size={width},{height}",
            f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        ]
        if dark:
            arguments.append("--blink-settings=preferredColorScheme=0")
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        try:
            self._wait_for_driver()
            made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        try:
            if self._session:
                self._call("DELETE", self._session)
        finally:
            self._process.terminate()
            self._process.wait(20)

    def go(self, address: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def size(self, width: int, height: int) -> None:
        """Of what the page sees: also narrower than a window can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._call("POST", f"{self._session}/goog/cdp/execute", command)

    def dark(self, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._call("POST", f"{self._session}/goog/cdp/execute", command)

    def find(self, css: str) -> str:
        return str(self._call("POST", f"{self._session}/element", {"using": "css selector", "value": css})[ELEMENT])

    def click(self, css: str) -> None:
        self._on(css, "POST", "click", {})

    def type(self, css: str, text: str) -> None:
        self._on(css, "POST", "value", {"text": text})

    def _on(self, css: str, method: str, what: str, body: Any = None) -> Any:
        """Of an element; found again where the page was drawn anew between the finding and the doing."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self._call(method, f"{self._session}/element/{self.find(css)}/{what}", body)
            except AssertionError as error:
                if "stale element" not in str(error) or time.monotonic() > until:
                    raise

    def keys(self, text: str) -> None:
        """To whatever has the focus, where its caret is."""
        pressed = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keys", "actions": pressed})

    def drag(self, places: Sequence[tuple[float, float]]) -> None:
        """With the mouse, from the first place over the others to the last."""
        moves = [{"type": "pointerMove", "x": round(x), "y": round(y), "duration": 40} for x, y in places]
        down, up = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        self._act({"type": "pointer", "id": "mouse", "actions": [moves[0], down, *moves[1:], up]})

    def _act(self, source: dict[str, Any]) -> None:
        self._call("POST", f"{self._session}/actions", {"actions": [source]})

    def text(self, css: str) -> str:
        return str(self._on(css, "GET", "text"))

    def texts(self, css: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", css))

    def errors(self) -> list[str]:
        """What the page complained of since the last call."""
        found = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]

    def leave(self) -> None:
        """A page whose server has gone, and which complains of it, as it should."""
        self.go("about:blank")
        self.errors()

    def wait(self, script: str, seconds: float = PATIENCE) -> Any:
        until = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < until, f"never came true: {script}"
            time.sleep(0.1)
        return found

    def wait_for(self, wanted: Any, script: str, seconds: float = PATIENCE) -> None:
        """Until the script returns just that; what was there before may still be there for a while."""
        until = time.monotonic() + seconds
        while (found := self.run(script)) != wanted:
            assert time.monotonic() < until, f"{found!r} never became {wanted!r}: {script}"
            time.sleep(0.1)

    def picture(self, path: Path, whole: bool = True) -> None:
        parameters = {"captureBeyondViewport": whole}
        if whole:
            width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
            parameters["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        command = {"cmd": "Page.captureScreenshot", "params": parameters}
        shot = self._call("POST", f"{self._session}/goog/cdp/execute", command)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _wait_for_driver(self) -> None:
        until = time.monotonic() + 60
        while True:
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except OSError:
                assert self._process.poll() is None, "chromedriver ended"
                assert time.monotonic() < until, "chromedriver did not come up"
                time.sleep(0.1)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {json.load(error)['value']['message']}") from None
