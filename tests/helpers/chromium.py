"""A real headless Chromium, driven over its own debugging protocol through two pipes: no driver, no port, no package.

    with Chromium(profile_folder) as browser:
        page = browser.open(path_of_html, width=1280)
        assert page.run("document.title") == "..." and page.errors == []
"""
import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.helpers.progress import PATIENCE_S

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
         "--autoplay-policy=no-user-gesture-required", "--remote-debugging-pipe")


class Chromium:
    """One browser process. profile: an empty folder."""

    def __init__(self, profile):
        self.profile, self.last, self.events, self.buffer = Path(profile), 0, [], b""

    def __enter__(self):
        to_browser, self.commands = os.pipe()
        self.answers, from_browser = os.pipe()
        self.log = open(self.profile.with_suffix(".log"), "wb")
        # it reads commands from file descriptor 3 and writes to 4; without readers it ends by itself
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", PROGRAM, *FLAGS,
             f"--user-data-dir={self.profile}", "about:blank"], pass_fds=(to_browser, from_browser), stderr=self.log,
            stdout=self.log, start_new_session=True)
        os.close(to_browser)
        os.close(from_browser)
        return self

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        self.log.close()

    def call(self, method, session=None, **parameters):
        """Send one command, return its result; events that come meanwhile are kept."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while (answer := self.receive(end)).get("id") != self.last:
            assert time.monotonic() < end, f"{method}: no answer in {PATIENCE_S} s"
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def receive(self, end):
        """The next message; an event is also kept in self.events."""
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0, end - time.monotonic()))
            part = os.read(self.answers, 1 << 20) if ready else b""
            assert part, f"Chromium is silent or gone\n{self.profile.with_suffix('.log').read_text()[-2000:]}"
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(message)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path, width=1280, height=900, dark=False):
        """A new Page, loaded."""
        return Page(self, path, width, height, dark)


class Page:
    """A tab. errors: console errors, exceptions and refused loads so far; requests: every address asked for."""

    def __init__(self, browser, path, width, height, dark):
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme",
                                                           "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        end = time.monotonic() + PATIENCE_S
        while not any(event["method"] == "Page.loadEventFired" for event in self.events()):
            browser.receive(end)

    def call(self, method, **parameters):
        return self.browser.call(method, session=self.session, **parameters)

    def events(self):
        return [event for event in self.browser.events if event.get("sessionId") == self.session]

    def run(self, expression):
        """Value of a JavaScript expression; a promise is waited for."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]["exception"].get("description", done)
        return done["result"].get("value")

    @property
    def errors(self):
        self.run("0")       # what was sent before has come in
        return [event["params"] for event in self.events() if event["method"] in (
            "Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")]

    @property
    def requests(self):
        self.run("0")
        return [event["params"]["request"]["url"] for event in self.events()
                if event["method"] == "Network.requestWillBeSent"]

    def picture(self, path, height=None):
        """The whole page, or its upper part, as PNG."""
        width, whole = self.run("[innerWidth, document.documentElement.scrollHeight]")
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={
            "x": 0, "y": 0, "width": width, "height": height or whole, "scale": 1})["data"]
        Path(path).write_bytes(base64.b64decode(shot))
