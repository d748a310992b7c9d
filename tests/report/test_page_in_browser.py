"""The page of a plan in a real browser: it draws, it answers the pointer and keys, and it fits a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rematch.graph.generators import gpt
from tests.report.test_page import plan_of, points

CHROMIUM, DRIVER = (os.environ.get(name) or shutil.which(program) for name, program in (
    ("CHROMIUM", "chromium"), ("CHROMEDRIVER", "chromedriver")
))  # fmt: skip
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    page = tmp_path_factory.mktemp("page") / "plan.html"
    plan = plan_of(gpt(layers=6))
    plan.report(page, trade_off=points(plan))
    driver.get(page.as_uri())
    yield driver
    driver.quit()


def seen(browser: Any, *, width: int, dark: bool = False) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def text_of(browser: Any, selector: str) -> str:
    return browser.find_element("css selector", selector).text


def test_the_pointer_and_keys_tell_what_holds_the_memory(browser: Any) -> None:
    seen(browser, width=1100)
    at_peak = text_of(browser, "#held")
    assert "GiB" in at_peak and "runs (" in at_peak and "h.*." in at_peak
    actions = webdriver.ActionChains(browser)
    actions.move_to_element_with_offset(browser.find_element("css selector", "#memory svg"), -300, 0).perform()
    pointed = text_of(browser, "#held")
    assert pointed != at_peak and "(forward)" in pointed
    browser.find_element("css selector", "#memory").send_keys(webdriver.Keys.ARROW_RIGHT)
    assert text_of(browser, "#held") != pointed
    browser.find_element("css selector", '[data-view="plain"]').click()
    assert text_of(browser, "#held") != at_peak
    hidden = browser.execute_script("return [...document.querySelectorAll('.view')].map(v => v.hasAttribute('hidden'))")
    assert hidden == [True, False]
    webdriver.ActionChains(browser).move_to_element(browser.find_element("css selector", "#schedule svg")).perform()
    assert text_of(browser, "#pointed").startswith("column: ")
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [320, 390, 1100])
def test_nothing_is_cut_off(browser: Any, width: int) -> None:
    seen(browser, width=width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    drawn = browser.execute_script("return document.querySelector('#memory svg').getBoundingClientRect().width")
    assert drawn > 0.7 * min(width, 960)


def test_light_and_dark(browser: Any, tmp_path: Path) -> None:
    papers = []
    for dark in (False, True):
        seen(browser, width=1100, dark=dark)
        papers.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert papers == ["rgb(255, 255, 255)", "rgb(20, 24, 29)"]
