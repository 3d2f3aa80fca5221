"""The report in a real browser: laid out at phone, tablet and desktop width, light, dark and printed, and measured.

Screenshots are left in artifacts/report.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_stories
from chromium import Chromium, program, started

from spotheal.fleet.report.page import page
from spotheal.fleet.report.report import make
from spotheal.fleet.sweep import report
from spotheal.fleet.sweep.report_page import page as sweep_page

ARTIFACTS = Path(__file__).resolve().parents[3] / "artifacts" / "report"
STORIES = ("finished", "running", "hostile", "sweep", "hostile_sweep")
LAID_OUT = [("finished", 390), ("finished", 768), ("finished", 1280), ("running", 390), ("hostile", 390),
            ("hostile", 1280), ("sweep", 390), ("sweep", 1280), ("hostile_sweep", 390)]  # fmt: skip

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(program() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]

# Runs in the page. Pairs of texts of one chart that overlap; texts that stick out of it or are too small to read;
# elements wider than their place; texts whose contrast is below WCAG AA (4.5, large ones 3).
MEASURE = """
(() => {
  const seen = e => { const b = e.getBoundingClientRect(); return b.width > 0 && b.height > 0; };
  const found = {overflow: document.documentElement.scrollWidth - innerWidth, overlaps: [], outside: [], small: [],
                 clipped: [], pale: [], charts: 0, texts: 0};
  for (const svg of [...document.querySelectorAll('svg.chart')].filter(seen)) {
    found.charts += 1;
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(t => ({t, b: t.getBoundingClientRect(), s: t.textContent}));
    for (const {t, b, s} of texts) {
      if (b.left < frame.left - 12 || b.right > frame.right + 12) found.outside.push(s.slice(0, 40));
      const scale = frame.width / svg.viewBox.baseVal.width;
      if (parseFloat(getComputedStyle(t).fontSize) * scale < 10.9) found.small.push(s.slice(0, 40));
    }
    texts.forEach((one, i) => texts.slice(i + 1).forEach(two => {
      const w = Math.min(one.b.right, two.b.right) - Math.max(one.b.left, two.b.left);
      const h = Math.min(one.b.bottom, two.b.bottom) - Math.max(one.b.top, two.b.top);
      if (w > 1 && h > 3) found.overlaps.push([one.s.slice(0, 40), two.s.slice(0, 40)]);
    }));
  }
  const channels = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = c => { const [r, g, b] = channels(c).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126*r + 0.7152*g + 0.0722*b; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    const v = channels(c); if (v.length === 3 || v[3] === 1) return c; } return 'rgb(255, 255, 255)'; };
  const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, s = walker.currentNode.textContent.trim();
    if (!s || e.closest('title, desc, summary + *') || !seen(e)) continue;
    found.texts += 1;
    const style = getComputedStyle(e), size = parseFloat(style.fontSize), svg = e instanceof SVGElement;
    const bar = e.classList.contains('in-bar') ? e.parentElement.querySelector('rect.bar') : null;
    const below = bar ? getComputedStyle(bar).fill : ground(e);
    const large = size >= 24 || (size >= 18.7 && style.fontWeight >= 700);
    const contrast = ratio(svg ? style.fill : style.color, below);
    if (contrast < (large ? 3 : 4.5)) found.pale.push([s.slice(0, 40), Math.round(contrast * 100) / 100]);
    if (!svg && e.scrollWidth > e.clientWidth + 1 && style.display !== 'inline' && e.clientWidth > 1)
      found.clipped.push([e.tagName, s.slice(0, 40)]);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with started() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name in STORIES:
        told, more = getattr(report_stories, name)()
        if name.endswith("sweep"):
            body = sweep_page(report.make(told, more, "best_val_acc", False, report_stories.DAY))
        else:
            body = page(make(told, more))
        found[name] = folder / f"{name}.html"
        found[name].write_bytes(body.encode())
    return found


def measured(browser: Chromium) -> dict[str, Any]:
    found: dict[str, Any] = browser.evaluate(MEASURE)
    assert found["texts"] > 40 and found["charts"] >= 3, found
    return found


@pytest.mark.parametrize(("name", "width"), LAID_OUT)
def test_nothing_overlaps_sticks_out_or_is_too_pale_or_small_to_read(
    browser: Chromium, pages: dict[str, Path], name: str, width: int
) -> None:
    for dark in (False, True):
        browser.open(pages[name], width, dark=dark)
        if name != "hostile" or not dark:
            browser.screenshot(ARTIFACTS / f"{name}-{width}-{'dark' if dark else 'light'}.png")
        found = measured(browser)
        wrong = {key: found[key] for key in ("overlaps", "outside", "small", "clipped", "pale") if found[key]}
        assert wrong == {} and found["overflow"] <= 0


@pytest.mark.parametrize("name", STORIES)
def test_the_page_asks_for_nothing_and_breaks_no_rule_of_its_own_policy(
    browser: Chromium, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name], 1280)
    assert [pages[name].resolve().as_uri()] == browser.requests
    assert [] == browser.messages
    assert 0 == browser.evaluate("document.querySelectorAll('script, img, iframe, link, object, [onerror]').length")
    assert "rgb" in browser.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_and_light_differ_and_paper_is_white(browser: Chromium, pages: dict[str, Path]) -> None:
    grounds = []
    for dark, media in ((False, "screen"), (True, "screen"), (True, "print")):
        browser.open(pages["finished"], 794, dark=dark, media=media)
        grounds.append(browser.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor"))
        assert browser.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    browser.screenshot(ARTIFACTS / "finished-print.png")
    assert grounds[0] != grounds[1]
    assert grounds[0] == grounds[2] == "rgb(255, 255, 255)"


def test_every_chart_has_a_name_a_description_and_figures_in_a_table(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.open(pages["finished"], 1280)
    named = """[...document.querySelectorAll('svg.chart')].every(svg => svg.getAttribute('aria-labelledby').split(' ')
               .every(id => document.getElementById(id)?.textContent.length > 3))"""
    assert browser.evaluate(named)
    assert browser.evaluate("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == browser.evaluate(
        "document.querySelectorAll('[id]').length"
    )
    assert browser.evaluate("[...document.querySelectorAll('th')].every(th => th.scope)")
    assert 1 == browser.evaluate("document.querySelectorAll('h1').length")
    assert ["Receipt", "Loss, some of its points"] == [
        browser.evaluate("[...document.querySelectorAll('th')].find(e => e.textContent === 'Receipt').textContent"),
        browser.evaluate("document.querySelector('caption').textContent"),
    ]


def test_the_measuring_finds_what_it_looks_for(browser: Chromium, tmp_path: Path) -> None:
    """A page with each fault, so that silence above means something."""
    sizes = ((5, 12), (20, 6))
    texts = "".join(f'<text x="{x}" y="20" style="font-size:{size}px">overlapping</text>' for x, size in sizes)
    texts += '<text x="85" y="9">out of it</text>'
    chart = f'<svg class="chart" viewBox="0 0 90 30" width="90" height="30">{texts}</svg>'
    style = "<style>p{color:#999;width:80px;white-space:nowrap}div{width:2000px}</style>"
    bad = tmp_path / "bad.html"
    bad.write_text(f"<!doctype html>{style}<main>{chart}<p>pale and longer than its place is</p><div>wide</div></main>")
    browser.open(bad, 390)
    found = browser.evaluate(MEASURE)
    assert all(found[key] for key in ("overlaps", "outside", "small", "clipped", "pale")) and found["overflow"] > 0
