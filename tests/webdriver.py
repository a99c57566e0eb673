"""A browser for tests: Chromium behind chromedriver, spoken to in plain WebDriver over HTTP. Needs no package of its own."""

import base64
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
DRIVER = "chromedriver"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # what WebDriver calls a reference to an element
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
              "--disable-background-networking", "--disable-component-update", "--hide-scrollbars")  # fmt: skip


def missing() -> str | None:
    """What keeps a browser from being started here; None when nothing does."""
    if not any(map(shutil.which, CHROMIUM)):
        return "needs Chromium (Debian: chromium)"
    return None if shutil.which(DRIVER) else "needs chromedriver (Debian: chromium-driver)"


class Browser:
    """One window."""

    def __init__(self, http: httpx2.Client, session: str) -> None:
        self._http, self._session = http, session

    def call(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
        """One WebDriver command; raises AssertionError with the browser's own words."""
        found = self._http.request(
            method, f"/session/{self._session}{path}", json=({} if body is None else body) if method == "POST" else None
        )
        value = found.json()["value"]
        assert found.status_code == 200, value.get("message") if isinstance(value, dict) else value
        return value

    def cdp(self, command: str, **params: Any) -> Any:
        """A command of the DevTools."""
        return self.call("/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url: str, width: int = 1280, height: int = 900, *, is_phone: bool = False, scheme: str = "light") -> None:
        """Load a page in a window of so many CSS pixels."""
        scale = 2 if is_phone else 1
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone)
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """What a piece of JavaScript returns."""
        return self.call("/execute/sync", {"script": script, "args": list(args)})

    def find(self, selector: str) -> str:
        """The first element for a CSS selector."""
        return str(self.call("/element", {"using": "css selector", "value": selector})[_ELEMENT])

    def click(self, selector: str) -> None:
        """As a mouse does: what is covered or out of the way cannot be clicked."""
        self.call(f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Keys, one after another; "\\ue007" is Enter."""
        self.call(f"/element/{self.find(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        """What is shown of an element's text; "" where there is no such element."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        """That of all elements."""
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector))

    def until(self, condition: Callable[[], Any], seconds: float = 10.0) -> Any:
        """Wait for something true; fails after so long."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"it never came; the page says: {self.text('body')[:1500]}"
            time.sleep(0.05)
        return found

    def picture(self, path: Path) -> None:
        """A screenshot of what is in the window."""
        path.write_bytes(base64.b64decode(self.call("/screenshot", method="GET")))

    def complaints(self) -> list[str]:
        """What the browser wrote into its console since the last time."""
        return [entry["message"] for entry in self.call("/se/log", {"type": "browser"})]


@contextmanager
def browser() -> Generator[Browser]:
    """A browser of one's own, with an empty profile, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="jaxkv-browser-") as profile:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{_port(driver)}", timeout=60, trust_env=False) as http:
                options = {"binary": next(filter(None, map(shutil.which, CHROMIUM))), "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
                wishes = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
                made = http.post("/session", json={"capabilities": {"alwaysMatch": wishes}}).json()["value"]
                assert "sessionId" in made, made
                try:
                    yield Browser(http, made["sessionId"])
                finally:
                    http.delete(f"/session/{made['sessionId']}")
        finally:
            driver.terminate()
            driver.wait(10)
            assert driver.stdout is not None
            driver.stdout.close()


def _port(driver: "subprocess.Popen[str]") -> int:
    """Where it listens, in its own words."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
    raise AssertionError("chromedriver did not start")
