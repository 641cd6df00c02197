"""The pages in a browser: headless Chromium lays them out on a phone and at a desk, and finds
nothing to complain of.

Run by `make test-ecosystem` where chromium, chromium-browser or google-chrome is on the path.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest

from halfbyte.reports.evaluation import report
from support.report_pages import LIMITS, evaluated, inspected

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
