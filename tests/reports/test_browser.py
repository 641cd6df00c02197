"""The pages in a browser: headless Chromium lays them out on a phone and at a desk, and finds
nothing to complain of; its keyboard reaches every link.

Run by `make test-ecosystem` where chromium, chromium-browser or google-chrome is on the path.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from halfbyte.reports.evaluation import report
from support.report_pages import LIMITS, evaluated, inspected, quantized

pytestmark = pytest.mark.ecosystem("applications")

MEASURE = """
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, view = page.defaultView;
  const seen = e => { const r = e.getBoundingClientRect(); return r.width > 0 && r.height > 0; };
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.right, r.width, r.height]; };
  const svgs = [...page.querySelectorAll("svg")].filter(seen);
  document.title = JSON.stringify({
    width: view.innerWidth, needed: page.documentElement.scrollWidth, svgs: svgs.map(box),
    bars: svgs.map(s => [...s.querySelectorAll("rect")].filter(seen).length),
    fills: [...new Set([...page.querySelectorAll("rect")].map(r => view.getComputedStyle(r).fill))],
    letters: svgs.map(s => Math.min(...[...s.querySelectorAll("text")].map(t => t.getBoundingClientRect().height))),
    overlaps: svgs.map(s => {
      const middle = s.getBoundingClientRect().top + 60;
      const below = [...s.querySelectorAll("text.tick:not(.name)")].map(t => t.getBoundingClientRect());
      const ticks = below.filter(r => r.top > middle);
      return ticks.slice(1).filter((r, i) => r.left < ticks[i].right).length;
    }),
    cut: svgs.map(s => {
      const frame = s.getBoundingClientRect();
      const out = r => r.left < frame.left - 1 || r.right > frame.right + 1 || r.top < frame.top - 1;
      return [...s.querySelectorAll("text")].filter(t => out(t.getBoundingClientRect())).length;
    }),
    tables: [...page.querySelectorAll("td,th,h1,.cards div")].filter(e => e.scrollWidth > e.clientWidth + 1).length,
  });
});
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if found is None:
        pytest.skip("no Chromium on the path: apt-get install chromium")
    return found


def measure(browser, folder, page, width):
    """What `MEASURE` finds in a page laid out at a width; nothing is said on the console."""
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{escape(page)}"></iframe><script>{MEASURE}</script>'
    (folder / "page.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frame}", "utf-8")
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={folder}/profile", "--window-size=1400,1000", "--dump-dom", f"file://{folder}/page.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ":CONSOLE" not in done.stderr
    found = json.loads(unescape(re.search(r"<title>(\{.*?\})</title>", done.stdout)[1]))
    assert found["width"] == width
    assert found["needed"] <= width, "the page scrolls sideways"
    for left, right, w, h in found["svgs"]:
        assert left >= 0
        assert right <= width
        assert w > 0.85 * min(width, 900)
        assert h > 150
    assert min(found["letters"]) >= 9, "letters too small to read"
    assert set(found["overlaps"]) == {0}
    assert set(found["cut"]) == {0}, "texts that reach out of their plot"
    assert found["tables"] == 0
    assert found["fills"] == ["rgb(47, 111, 178)"]
    return found


@pytest.mark.parametrize("layers", [2, 26, 80])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_an_evaluation_fits_and_its_plots_are_seen(browser, tmp_path, width, layers):
    found = measure(browser, tmp_path, report([evaluated("gemma-3-270m-it-q4_k_m-imatrix.gguf", 1.0, layers, LIMITS)]), width)
    assert len(found["svgs"]) == 2
    assert found["bars"][0] == layers + 1, "a bar for the embedding and each layer"
    assert found["bars"][1] >= 12, "a histogram of most bins"


@pytest.mark.parametrize("width", [360, 1280])
def test_several_checkpoints_fit(browser, tmp_path, width):
    some = [evaluated(f"a-model-with-a-rather-long-name-q{i}", i / 2) for i in (1, 2, 3, 5)]
    assert len(measure(browser, tmp_path, report(some), width)["svgs"]) == 1 + 2 * 4


@pytest.mark.parametrize("width", [360, 1280])
def test_an_inspection_fits(browser, tmp_path, width):
    assert len(measure(browser, tmp_path, inspected(tmp_path), width)["svgs"]) == 3


@pytest.mark.parametrize("layers", [2, 80])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_a_quantization_fits(browser, tmp_path, width, layers):
    found = measure(browser, tmp_path, quantized(layers), width)
    assert len(found["svgs"]) == 5
    assert found["bars"][0] == layers + 1
    assert found["bars"][2] == layers, "errors of the weights: no bar for the embedding, which stayed dense"


LAUNCH = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, pipe in enumerate(pipes, 3):
    os.dup2(pipe, fd)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads DevTools' commands from descriptor 3 and answers on 4."""

FOCUS = """(() => {
  const e = document.activeElement, style = getComputedStyle(e), r = e.getBoundingClientRect();
  const shown = r.top >= 0 && r.bottom <= innerHeight && r.left >= 0 && r.right <= innerWidth;
  return {tag: e.tagName, href: e.getAttribute("href"), shown, outline: parseFloat(style.outlineWidth),
          style: style.outlineStyle, colour: style.outlineColor, paper: getComputedStyle(document.body).backgroundColor};
})()"""


class Keyboard:
    """A page of headless Chromium, driven by keys through DevTools."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb", 0), os.fdopen(answers, "rb")
        self._ids = itertools.count(1)
        self._session: dict[str, str] = {}

    def attach(self) -> None:
        [target] = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        answer = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": answer["sessionId"]}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; events before it are passed over."""
        number = next(self._ids)
        self._commands.write(json.dumps({"id": number, "method": method, "params": parameters, **self._session}).encode() + b"\0")
        while (answer := json.loads(self._message())).get("id") != number:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _message(self) -> bytes:
        message = b"".join(iter(lambda: self._answers.read(1), b"\0"))
        assert message, "Chromium has closed its pipe"
        return message

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)["result"].get("value")

    def press(self, key: str, code: int, text: str = "", shift: bool = False) -> None:
        same = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **same, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **same)

    def stops(self, count: int, shift: bool = False) -> list[dict[str, Any]]:
        """What has the focus after each of some presses of Tab."""
        found = []
        for _ in range(count):
            self.press("Tab", 9, shift=shift)
            found.append(self.value(FOCUS))
        return found


@contextmanager
def keyboard(browser: str, folder: Path, page: str, width: int, dark: bool = False) -> Iterator[Keyboard]:
    (folder / "page.html").write_text(page, "utf-8")
    (down_read, down_write), (up_read, up_write) = os.pipe(), os.pipe()
    command = [
        sys.executable, "-c", LAUNCH, str(down_read), str(up_write), browser, "--headless=new", "--no-sandbox", "--disable-gpu",
        "--remote-debugging-pipe", f"--user-data-dir={folder}/keys", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, pass_fds=(down_read, up_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(down_read)
    os.close(up_write)
    driven = Keyboard(down_write, up_read)
    try:
        driven.attach()
        driven.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driven.call("Emulation.setEmulatedMedia", features=scheme)
        driven.call("Page.navigate", url=f"file://{folder}/page.html")
        driven.value("new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', () => done()))")
        yield driven
    finally:
        process.terminate()
        process.wait(30)


def pages_of_each_kind(folder: Path) -> dict[str, str]:
    several = [evaluated(f"a-model-q{i}", i / 2) for i in (1, 2, 3)]
    return {
        "one evaluation": report([evaluated("gemma", 1.0, 26, LIMITS)]),
        "several": report(several),
        "an inspection": inspected(folder),
        "a quantization": quantized(),
    }


@pytest.mark.parametrize("kind", ["one evaluation", "several", "an inspection", "a quantization"])
@pytest.mark.parametrize(("width", "dark"), [(360, False), (1280, False), (1280, True)])
def test_the_keyboard_reaches_every_link_and_leaves_the_page(browser, tmp_path, kind, width, dark):
    """Tab visits the links in their order, each with a visible outline, Enter follows one, and the
    last Tab leaves the page, as Shift and Tab do before the first."""
    with keyboard(browser, tmp_path, pages_of_each_kind(tmp_path)[kind], width, dark) as page:
        focusable = "a[href],button,summary,input,select,textarea,[tabindex],[onclick],[contenteditable]"
        links = page.value(f"[...document.querySelectorAll({json.dumps(focusable)})].map(e => e.getAttribute('href'))")
        assert len(links) >= 2
        assert all(link.startswith("#") for link in links)
        assert (
            page.value("[...document.querySelectorAll('a')].filter(e => !document.getElementById(e.hash.slice(1))).length") == 0
        )

        *stops, left = page.stops(len(links) + 1)
        assert [stop["href"] for stop in stops] == links
        assert left["tag"] == "BODY", "the focus is not caught in the page"
        for stop in stops:
            assert stop["shown"]
            assert stop["style"] == "solid"
            assert stop["outline"] >= 2
            assert stop["colour"] != stop["paper"]
        *back, left = page.stops(len(links) + 1, shift=True)
        assert [stop["href"] for stop in back] == links[::-1]
        assert left["tag"] == "BODY"

        page.stops(len(links))
        page.press("Enter", 13, "\r")
        assert page.value("location.hash") == links[-1]
        heading = page.value("document.querySelector(':target').getBoundingClientRect().top")
        assert -1 <= heading < 900, "the section that the link names is on the screen"
