"""The page as a person uses it: a real browser, the embedded base, and nothing but clicks and keys."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from causal_qwen import convert

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser's driver is missing: make setup")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
# Where screenshots go; the docs show two of them (SCREENSHOTS=docs/assets pytest tests/serving/test_page.py).
SCREENSHOTS = os.environ.get("SCREENSHOTS")
SECONDS = 120_000  # milliseconds that an answer may take on a busy machine
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def address(tmp_path_factory, calibrated_once):
    """A server of the embedded base, in a process of its own."""
    directory = tmp_path_factory.mktemp("served") / "smollm2"
    convert("smollm2", directory)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "import causal_qwen_command as c; c.main()", "serve", str(directory)]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        yield _once_ready(process, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _once_ready(process, address):
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(process.stderr.read())
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return address
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server is not ready after two minutes")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    """A new visit; whatever the page asks of another address, or says to the console, is an error."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    context.set_default_timeout(SECONDS)
    page = context.new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if address not in request.url else None)
    yield page
    context.close()
    assert not complaints


def visit(page, address, view):
    page.goto(f"{address}/#{view}")
    page.wait_for_selector("form")


def shot(page, name):
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png", full_page=True)


def finished(page):
    # By an assertion of the driver: what it would evaluate in the page, the server's policy forbids.
    sync_api.expect(page.locator("#status")).to_have_text(re.compile(r" s$"), timeout=SECONDS)


def test_a_text_is_written_token_by_token(page, address):
    visit(page, address, "write")
    page.fill("#field-prompt", "Once upon a time there was a bridge that")
    page.click("#go")
    finished(page)
    tokens = page.locator(".said .token")
    assert tokens.count() > 3
    first = page.locator(".said").first.inner_text()
    tokens.nth(1).hover()
    assert page.locator("#card").is_visible()
    assert page.locator("#card .row").count() == 5
    page.keyboard.press("Escape")
    # By keyboard: the text takes the focus, and arrows walk along it.
    page.locator(".said").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".said .token.here").count() == 1
    shot(page, "page-write")
    # The address now holds all of it: another visit says the same.
    again = page.context.new_page()
    again.goto(page.url)
    finished(again)
    assert again.locator(".said").first.inner_text() == first


def test_a_chat_goes_on(page, address):
    visit(page, address, "write")
    page.select_option("#field-form", "chat")
    page.fill("#field-max_tokens", "12")
    for message in ("Hello!", "And what did I say before?"):
        page.fill("#field-prompt", message)
        page.click("#go")
        finished(page)
    assert page.locator(".turn.user").count() == 2
    assert page.locator(".turn .answer").count() == 2


def test_a_slider_moves_six_individuals(page, address):
    visit(page, address, "individuals")
    page.fill("#field-max_tokens", "16")
    page.click("#go")
    finished(page)
    assert page.locator(".cards .answer").count() == 6
    before = page.locator(".cards .said").all_inner_texts()
    assert len(set(before)) > 1
    shot(page, "page-individuals")
    page.locator("#field-temperature").focus()
    page.keyboard.press("Home")  # to 0: no noise, and all agree
    page.wait_for_url("**temperature=0*run=1*")
    finished(page)
    assert len(set(page.locator(".cards .said").all_inner_texts())) == 1


def test_what_if_marks_what_changed(page, address):
    visit(page, address, "what-if")
    page.fill("#field-max_tokens", "16")
    page.click("#go")
    finished(page)
    assert page.locator(".cards .answer").count() == 3
    assert page.locator(".cards ins").count() > 0
    shot(page, "page-what-if")
    page.fill("#field-instead", page.input_value("#field-prompt"))
    page.click("#go")
    page.wait_for_selector("text=identical to the factual text")


def test_a_comparison_grows(page, address):
    visit(page, address, "compare")
    page.fill("#field-pairs", "6")
    page.click("#go")
    page.wait_for_selector("svg .dot")
    finished(page)
    assert page.locator("tbody tr").count() == 6
    assert page.locator("svg .dot").count() == 6
    assert page.locator("svg .band").count() == 1
    shot(page, "page-compare")


def test_rows_of_a_table_are_predicted_and_bad_ones_named(page, address):
    visit(page, address, "table")
    page.fill("#field-rows", "weight,year\n2500,76\n4200")
    page.fill("#field-template", "A car of {weight} lbs from {year} drives {mpg} miles per gallon.")
    page.fill("#field-target", "mpg")
    page.click("#go")
    page.wait_for_selector("#status.bad")
    assert "row 2 has 1 cells" in page.locator("#status").inner_text()
    page.fill("#field-rows", "weight,year\n2500,76\n4200,72")
    page.click("#go")
    finished(page)
    assert page.locator("tbody tr").count() == 2
    assert page.locator("tbody .track").count() == 2


def test_code_that_is_copied_says_the_same(page, address):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
    visit(page, address, "write")
    page.fill("#field-max_tokens", "8")
    page.click("#go")
    finished(page)
    said = page.locator(".said").first.inner_text().removeprefix(page.input_value("#field-prompt"))
    page.click("text=Copy as Python")
    page.wait_for_selector("text=Python copied")
    code = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == said.strip()
    page.click("text=Copy as curl")
    page.wait_for_selector("text=curl copied")
    line = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, timeout=120)
    assert said.strip().split("\n")[0][:20] in done.stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_no_view_is_wider_than_the_window(browser, address, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    for view in ("write", "individuals", "what-if", "compare", "table"):
        visit(page, address, view)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 3 * 128) == (scheme == "light")
    context.close()
