"""A headless Chromium driven over its own pipe: enough to load a page, run script in it, and see what it complains about."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


def find():
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """Messages are JSON ended by a zero byte; the browser reads descriptor 3 and writes 4."""

    def __init__(self, binary, profile_dir, wait=60.0):
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()
        keep = [os.dup(to_read), os.dup(from_write)]
        for fd in (to_read, from_write):
            os.close(fd)
        # the shell puts our ends at 3 and 4; a descriptor that is 3 or 4 already must not be overwritten first
        high = [fd if fd > 9 else os.dup2(fd, fd + 200) for fd in keep]
        script = f'exec "$@" 3<&{high[0]} 4>&{high[1]}'
        command = ["bash", "-c", script, "bash", binary, *FLAGS, f"--user-data-dir={profile_dir}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for fd in {*keep, *high}:
            os.close(fd)
        self._wait, self._buffer, self._number, self.events = wait, b"", 0, []
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        return self._send(method, params, session=self._session)

    def _send(self, method, params, session=None):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._wait
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self, deadline):
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("chromium does not answer")
            data = os.read(self._from, 1 << 16)
            if not data:
                raise RuntimeError("chromium has gone")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path):
        """Load a local file and wait until it is complete."""
        self.events.clear()
        self.call("Page.navigate", url=f"file://{path}")
        deadline = time.monotonic() + self._wait
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(deadline))

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "script failed"))
        return answer["result"].get("value")

    def complaints(self):
        """Console messages, exceptions and log entries (a blocked script or fetch is one) since the page was opened."""
        self.evaluate("1")  # everything sent before this answer has arrived by now
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in kinds]

    def requests(self):
        self.evaluate("1")
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def size(self, width, height, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self):
        try:
            self._send("Browser.close", {})
        except (RuntimeError, TimeoutError, OSError):
            self._process.kill()
        os.close(self._to)
        os.close(self._from)
        self._process.wait(20)
