"""The report opened in a browser: it works, asks for nothing, and shows what the rows say."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import find_browser, messages, opened, requests
from commands import changed, made_up_rollouts, write_rollouts

from forkpoint import Config, RolloutBatch
from forkpoint.apps.cli import main
from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.loop import replay
from forkpoint.losses import GRPO
from forkpoint.testing import tiny_model
from json_mutations import HOSTILE as HOSTILE_TEXTS
from lanes import slow_besides
from unit.reports import filled, made_up, renamed, write_run

By = pytest.importorskip("selenium.webdriver.common.by", reason="selenium is not installed").By
STEPS = 24
HOSTILE = '</script><img src="x" onerror="document.title=1">&amp;@@body@@'


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A replay of two batches across rows, and a file of rollouts, in one page."""
    find_browser()
    folder = tmp_path_factory.mktemp("report")
    made = made_up_rollouts(groups=2)
    made = [
        changed(r, rollout_id=f"{HOSTILE}{n}", group_id=f"{r.group_id}{HOSTILE}")
        for n, r in enumerate(made)
    ]
    replay(
        tiny_model("qwen3", dtype=torch.float32),
        RolloutBatch(made),
        GRPO(),
        optimizer=adamw,
        steps=STEPS,
        config=Config(sharing="group", boundary="across", max_microbatch_tokens=32),
        folder=ReplayFolder(folder / "run"),
        about={"file": HOSTILE, "command": HOSTILE},
    )
    write_rollouts(folder / "rollouts.jsonl", made)
    page = folder / "report.html"
    arguments = ["report", folder / "run", folder / "rollouts.jsonl", "--output", page, "--json"]
    assert main([str(argument) for argument in arguments]) == 0
    return page


@pytest.fixture(scope="module")
def driver(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(page, tmp_path_factory.mktemp("browser")) as driver:
        yield driver


def count(driver: Any, selector: str) -> int:
    return driver.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def hover(driver: Any, element: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    ActionChains(driver).move_to_element(element).perform()


def test_it_shows_everything_and_asks_for_nothing(driver: Any, page: Path) -> None:
    assert count(driver, ".forest path.band") == forest_nodes(page)
    assert count(driver, ".timeline rect.event") > 8
    assert count(driver, ".timeline path.memory") == 4, "dense and shared, of both inputs"
    phases = driver.execute_script(
        "return [...document.querySelectorAll('#schedule-0 rect.event')].map(r => r.dataset.phase)"
    )
    assert {"prefix forward", "leaf forward", "leaf backward", "prefix backward", "rest"} == set(
        phases
    )
    assert count(driver, ".chart svg[role=img] path") > 6
    assert count(driver, ".chart circle") >= STEPS
    assert messages(driver) == []
    assert requests(driver) == []


def forest_nodes(page: Path) -> int:
    """Nodes of the forests that are shown first, by the data in the page."""
    text = page.read_text(encoding="utf-8")
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    forests = [
        figure["choices"][0]["data"] for figure in data.values() if figure["kind"] == "forest"
    ]
    assert len(forests) == 2
    return sum(len(forest["nodes"]) for forest in forests)


def test_text_from_outside_is_text(driver: Any, page: Path) -> None:
    assert count(driver, "img") == 0 and count(driver, "script") == 2
    assert HOSTILE in driver.title
    headings = driver.execute_script(
        "return [...document.querySelectorAll('h2')].map(h => h.textContent)"
    )
    assert headings == [HOSTILE, "rollouts.jsonl"]
    options = driver.execute_script(
        "return [...document.querySelectorAll('#forest-0 option')].map(o => o.textContent)"
    )
    assert f"{HOSTILE}0" in options, "a rollout can be chosen by its id, as it is"
    assert (
        f"step 1: g0{HOSTILE}" in options
        or f"step 13: g0{HOSTILE}" in options
        or any(f"g0{HOSTILE}" in option for option in options)
    )


@pytest.mark.slow
def test_hovering_lights_the_path(driver: Any) -> None:
    bands = driver.find_elements(By.CSS_SELECTOR, "#forest-0 path.band")
    leaf = next(band for band in bands if "own" in band.get_attribute("class"))
    begin = int(leaf.get_attribute("data-begin"))
    expected = {
        n
        for n, band in enumerate(bands)
        if int(band.get_attribute("data-begin")) <= begin < int(band.get_attribute("data-end"))
    }
    assert len(expected) >= 2, "a path of a prefix and a response"
    hover(driver, leaf)
    lit = {n for n, band in enumerate(bands) if "hot" in band.get_attribute("class")}
    assert lit == expected
    tip = driver.find_element(By.ID, "tip")
    assert tip.is_displayed() and "1 rollout" in tip.text and HOSTILE in tip.text
    hover(driver, driver.find_element(By.TAG_NAME, "h1"))
    assert count(driver, "#forest-0 path.band.hot") == 0 and not tip.is_displayed()


def test_choosing_a_rollout_lights_its_path(driver: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    lists = driver.find_elements(By.CSS_SELECTOR, "#forest-0 select")
    rollouts = Select(lists[1])
    rollouts.select_by_index(2)
    assert count(driver, "#forest-0 path.band.hot") >= 2
    rollouts.select_by_index(0)
    assert count(driver, "#forest-0 path.band.hot") == 0


def test_another_batch_is_drawn(driver: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    batches = Select(driver.find_element(By.CSS_SELECTOR, "#schedule-0 select"))
    assert len(batches.options) == 2
    before = driver.find_element(By.CSS_SELECTOR, "#schedule-0 svg[role=img]").text
    batches.select_by_index(1)
    assert driver.find_element(By.CSS_SELECTOR, "#schedule-0 svg[role=img]").text != before


@pytest.mark.slow
def test_zooming(driver: Any) -> None:
    def widest() -> float:
        return driver.execute_script(
            "return Math.max(...[...document.querySelectorAll('#forest-0 path.band')]"
            ".map(b => b.getBBox().width))"
        )

    before = widest()
    zoom, _, fit = driver.find_elements(By.CSS_SELECTOR, "#forest-0 .zoom button")
    zoom.click()
    assert widest() == pytest.approx(1.6 * before, rel=0.05)
    fit.click()
    assert widest() == pytest.approx(before)


def test_the_theme_is_switched(driver: Any) -> None:
    def paper() -> str:
        return driver.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = paper()
    button = driver.find_element(By.ID, "theme")
    button.click()
    assert light == "rgb(255, 255, 255)" and paper() == "rgb(20, 23, 28)"
    assert button.text == "Light"
    button.click()
    assert paper() == light


@pytest.mark.slow
def test_numbers_are_copied_as_a_table(driver: Any) -> None:
    driver.execute_script(
        "navigator.clipboard.writeText = t => { window.copied = t; return Promise.resolve(); }"
    )
    section = driver.find_element(By.CSS_SELECTOR, "#drift-0").find_element(By.XPATH, "..")
    section.find_element(By.TAG_NAME, "summary").click()
    button = section.find_element(By.CSS_SELECTOR, "button.copy")
    hover(driver, button)
    button.click()
    lines = driver.execute_script("return window.copied").split("\n")
    assert lines[0].split("\t")[:2] == ["step", "mean difference"]
    assert len(lines) == 1 + STEPS
    assert all(len(line.split("\t")) == 6 for line in lines)
    assert float(lines[-1].split("\t")[5]) > 1e-4, "the model has moved"
    assert count(driver, "section.figure button.copy") == count(driver, "section.figure")


# Folders that somebody has changed ----------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a folder that has hostile text wherever it may have any."""
    find_browser()
    folder, text = tmp_path_factory.mktemp("hostile"), "".join(HOSTILE_TEXTS[:7])
    run = write_run(folder / "run", renamed(made_up(), text), 3, baseline=True, **filled(text))
    page = folder / "report.html"
    assert main(["report", str(run), "--output", str(page), "--json"]) == 0
    return page


def test_hostile_folders_run_nothing_and_ask_for_nothing(
    hostile_page: Path, tmp_path: Path
) -> None:
    with opened(hostile_page, tmp_path) as driver:
        address = driver.current_url
        for selector in ("#forest-0 path.band", "#schedule-0 rect.event", ".chart svg[role=img]"):
            assert count(driver, selector) > 0, f"{selector} is not drawn"
            hover(driver, driver.find_element(By.CSS_SELECTOR, selector))
        for opener in driver.find_elements(By.TAG_NAME, "summary"):
            opener.click()
        assert driver.execute_script("return typeof window.pwned") == "undefined"
        assert driver.current_url == address and len(driver.window_handles) == 1
        assert count(driver, "script") == 2 and count(driver, "style") == 1
        for name in ("a", "base", "embed", "form", "frame", "iframe", "img", "object", "use"):
            assert count(driver, name) == 0, name
        assert count(driver, "[style*=url], [onerror], [onload], [onclick], [src]") == 0
        assert messages(driver) == [] and requests(driver) == []


def test_markup_that_got_in_would_neither_run_nor_load(hostile_page: Path, tmp_path: Path) -> None:
    """The policy is a second line: it stops what the first would have let through."""
    page, text = tmp_path / "broken.html", hostile_page.read_text(encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(1)
        host = f"http://127.0.0.1:{server.getsockname()[1]}"
        injected = (
            "<script>window.pwned=1</script><style>h1{color:red}</style>"
            f"<script src='{host}/s'></script><link rel=stylesheet href='{host}/l'>"
            f"<img src='{host}/i' onerror='window.pwned=2'><svg onload='window.pwned=3'></svg>"
            f"<iframe src='{host}/f'></iframe><object data='{host}/o'></object>"
            f"<video src='{host}/v'></video><p style='background:url({host}/b)'>x</p>"
            f"<form action='{host}/a'><button id=send>x</button></form>"
        )
        page.write_text(text.replace("<main>", f"<main>{injected}"), encoding="utf-8")
        with opened(page, tmp_path) as driver:
            driver.execute_script("document.getElementById('send').click()")
            color = driver.execute_script(
                "return getComputedStyle(document.querySelector('h1')).color"
            )
            assert color != "rgb(255, 0, 0)"
            assert driver.execute_script("return typeof window.pwned") == "undefined"
            assert driver.current_url == page.resolve().as_uri()
            said = " ".join(messages(driver))
            for directive in ("script-src", "style-src", "img-src", "form-action", "default-src"):
                assert f'"{directive} ' in said, directive
        # For a frame Chromium opens a connection before it looks at the policy, and sends nothing.
        with contextlib.suppress(TimeoutError):
            while True:
                connection, _ = server.accept()
                with connection:
                    assert connection.recv(1000) == b""


@pytest.mark.slow
def test_a_request_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "asking.html"
    page.write_text("<img src='http://127.0.0.1:9/pixel.png'><script>missing()</script>")
    with opened(page, tmp_path) as driver:
        assert requests(driver) == ["http://127.0.0.1:9/pixel.png"]
        assert any("missing is not defined" in message for message in messages(driver))


SHORTENED = 'id="data">'


def test_what_is_short_is_drawn_so_that_it_is_seen(page: Path, tmp_path: Path) -> None:
    """Events of a thousandth of a pixel are widened, and the page says how many."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(SHORTENED)
    data, _, tail = rest.partition("</script>")
    figures = json.loads(data)
    events = figures["schedule-0"]["choices"][0]["data"][1]["events"]
    shortened = [event for event in events if event["key"].startswith("prefix")]
    assert shortened
    for event in shortened:
        event["size"] /= 1e6
    changed_page = tmp_path / "short.html"
    again = json.dumps(figures).replace("<", "\\u003c")
    changed_page.write_text(f"{head}{SHORTENED}{again}</script>{tail}", encoding="utf-8")
    with opened(changed_page, tmp_path) as driver:
        widths = driver.execute_script(
            "return [...document.querySelectorAll('#schedule-0 rect.event')]"
            ".map(r => [r.dataset.phase, r.width.baseVal.value, r.classList.contains('short')])"
        )
        short = [(phase, width) for phase, width, is_short in widths if is_short]
        assert len(short) >= len(shortened) and {width for _, width in short} == {3}
        assert {phase for phase, _ in short} >= {"prefix forward", "prefix backward"}
        said = driver.find_element(By.CSS_SELECTOR, "#schedule-0 .widened").text
        assert said.startswith(f"{len(short)} of ") and "drawn 3 pixels wide" in said
        hover(driver, driver.find_element(By.CSS_SELECTOR, "#schedule-0 rect.short"))
        assert "prefix" in driver.find_element(By.ID, "tip").text


def test_groups_are_named_beside_their_rollouts(driver: Any) -> None:
    names = driver.execute_script(
        "return [...document.querySelectorAll('#forest-1 text.group')].map(t => t.textContent)"
    )
    assert any(name.startswith("g0") for name in names) and len(names) >= 2
    second = driver.execute_script("return document.querySelector('#forest-1 .names').textContent")
    assert "rollouts" in second and "prompt" in second


CUT_OFF = """
const found = [];
for (const text of document.querySelectorAll('svg[role=img] text')) {
  const is = text.getBoundingClientRect(), may = text.ownerSVGElement.getBoundingClientRect();
  const within = is.left >= may.left - 1 && is.right <= may.right + 1
    && is.top >= may.top - 1 && is.bottom <= may.bottom + 1;
  if (is.width > 0 && !within) found.push(text.textContent);
}
for (const element of document.querySelectorAll('h1, h2, h3, p, li, button, .tile, .legend')) {
  const box = element.getBoundingClientRect();
  if (box.right > window.innerWidth + 1 || element.scrollWidth > element.clientWidth + 1) {
    found.push(element.textContent);
  }
}
return found;"""


@pytest.mark.parametrize("width", slow_besides([420], [1280, 420]))
def test_nothing_is_cut_off(page: Path, tmp_path: Path, width: int) -> None:
    with opened(page, tmp_path, width=width) as driver:
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert driver.execute_script(CUT_OFF) == []


@pytest.mark.parametrize("dark", slow_besides([], [False, True]), ids=["light", "dark"])
def test_on_a_phone(page: Path, tmp_path: Path, dark: bool) -> None:
    with opened(page, tmp_path, width=390, height=844, dark=dark) as driver:
        wide = driver.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 390, "the page scrolls sideways"
        paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
        sizes = driver.execute_script(
            "return [...document.querySelectorAll('svg[role=img] text')]"
            ".map(t => t.getBoundingClientRect()).filter(r => r.width > 0)"
            ".map(r => [r.height, r.left, r.right])"
        )
        assert min(height for height, _, _ in sizes) > 10, "text is drawn too small"
        assert messages(driver) == [] and requests(driver) == []
