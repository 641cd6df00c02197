"""The report in a browser: headless Chromium lays it out on a phone and at a desk, and finds
nothing to complain of.

Run by `make test-ecosystem` where chromium, chromium-browser or google-chrome is on the path.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape

import numpy as np
import pytest

from halfbyte.evaluation import Thresholds
from halfbyte.evaluation.compare import Comparison, LayerDrift
from halfbyte.evaluation.perplexity import Perplexity
from halfbyte.evaluation.report import report

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
      const ticks = [...s.querySelectorAll("text.tick")].map(t => t.getBoundingClientRect()).filter(r => r.top > middle);
      return ticks.slice(1).filter((r, i) => r.left < ticks[i].right).length;
    }),
    tables: [...page.querySelectorAll("td,th,h1,.cards div")].filter(e => e.scrollWidth > e.clientWidth + 1).length,
  });
});
"""


def comparison(layers: int = 26) -> Comparison:
    rng = np.random.default_rng(0)
    drifts = [LayerDrift(i, 1 - 0.003 * i, 0.9 - 0.01 * i, 0.01 * (i + 2)) for i in range(-1, layers)]
    model, baseline = Perplexity(10200, 29000.0, 130000.0), Perplexity(10200, 28000.0, 120000.0)
    return Comparison(model, baseline, 0.87, np.exp(rng.normal(-3, 2, 10200)), drifts[0], tuple(drifts[1:]), 0.97)


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if found is None:
        pytest.skip("no Chromium on the path: apt-get install chromium")
    return found


@pytest.mark.parametrize("layers", [2, 26, 80])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_fits_and_its_plots_are_seen(browser, tmp_path, width, layers):
    measured = comparison(layers)
    path = "/a/folder/with/a/long/name/and-no-place-to-break-it-anywhere-near/models/gemma-3-270m-it-q4_k_m-imatrix.gguf"
    facts = {"path": path, "baseline": path, "bytes": 142_621_184, "baseline_bytes": 246_956_544, "tokens_per_s": 8.86}
    page = report(facts, measured, Thresholds(0.01, 0.95, 0.99).verdicts(measured))
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{escape(page)}"></iframe><script>{MEASURE}</script>'
    (tmp_path / "page.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frame}", "utf-8")
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/profile", "--window-size=1400,1000", "--dump-dom", f"file://{tmp_path}/page.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ":CONSOLE" not in done.stderr
    found = json.loads(unescape(re.search(r"<title>(\{.*?\})</title>", done.stdout)[1]))
    assert found["width"] == width
    assert found["needed"] <= width, "the page scrolls sideways"
    assert len(found["svgs"]) == 2
    assert found["bars"][0] == layers + 1, "a bar for the embedding and each layer"
    assert found["bars"][1] >= 12, "a histogram of most bins"
    for left, right, w, h in found["svgs"]:
        assert left >= 0
        assert right <= width
        assert w > 0.85 * min(width, 900)
        assert h > 150
    assert min(found["letters"]) >= 9, "letters too small to read"
    assert found["overlaps"] == [0, 0]
    assert found["tables"] == 0
    assert found["fills"] == ["rgb(47, 111, 178)"]
