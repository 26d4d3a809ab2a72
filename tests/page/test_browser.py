"""The page in a real browser: what it draws, that it escapes markup, what it shows without its server; it requests nothing external."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest
import sample_cluster
import sample_run
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from processes import find_run_pids
from test_run_comparison import record_run
from test_server import run_server, store_runs

from swarmtrain.view.dashboard.cluster_source import ClusterDataSource
from swarmtrain.view.dashboard.html_page import ASSET_TYPES, read_asset, render_single_file_page, write_html_report
from swarmtrain.view.dashboard.page_data import build_output_line_data, build_page_data_from_events

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
TIMEOUT_SECONDS = 90.0
"""Maximum wait for something that must happen, in seconds, on a machine that is busy with other suites."""
PHASES = ["data", "forward", "backward", "communication", "optimizer", "validation", "checkpoint", "logging", "other"]
COUNT_COLORS_SCRIPT = """canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) colours.add(pixels.slice(i, i + 3).join());
  return colours.size;
}"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium is not installed; sh requirements/system.sh installs it")
        pytest.skip("chromium is not installed; sh requirements/system.sh installs it")
    expect.set_options(timeout=TIMEOUT_SECONDS * 1000)
    with sync_playwright() as playwright:
        # Chromium's sandbox needs user namespaces, which root does not have in a container. The browser loads only this page.
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-background-networking"],
            env={**os.environ, "HOME": str(tmp_path_factory.mktemp("chromium"))},
        )
        yield opened
        opened.close()


class BrowserSession:
    """A page and its problems: errors in its console, and requests to another origin."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self.problems.append(message.text) if message.type in ("error", "warning") else None)
        page.on("request", lambda request: None if request.url.startswith((origin, "data:")) else self.problems.append(request.url))


@contextlib.contextmanager
def open_page(browser: Browser, url: str, *, width: int = 1280, scheme: str = "light") -> Iterator[BrowserSession]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    context.set_default_timeout(TIMEOUT_SECONDS * 1000)
    # A file is one page; a server has several.
    session = BrowserSession(context.new_page(), urljoin(url, "/") if url.startswith("http") else url)
    session.page.goto(url)
    yield session
    context.close()


@pytest.fixture
def report_url(tmp_path: Path) -> str:
    """The URL of a report of a failed run, with markup in the run's output."""
    return write_report(tmp_path, "failed")


def write_report(folder: Path, outcome: str) -> str:
    events = sample_run.build_events(outcome=outcome)
    end = events[-1].time
    data = {
        **build_page_data_from_events(
            "demo", events, sample_run.build_tasks("complete" if outcome else "running"), sample_run.build_log_lines(end), end
        ),
        "written": end,
    }
    (folder / "demo.html").write_text(
        render_single_file_page(data, [build_output_line_data(line) for line in sample_run.build_log_lines(end)])
    )
    return (folder / "demo.html").as_uri()


def test_it_draws_a_run_and_shows_its_history(browser: Browser, report_url: str) -> None:
    with open_page(browser, report_url) as eyes:
        page = eyes.page
        expect(page).to_have_title("demo: failed")
        expect(page.locator("#state")).to_have_text("failed")
        titles = [title.partition("\n")[0] for title in page.locator(".plot h3").all_text_contents()]
        for title in ("Loss", "Throughput", "MFU", "Learning rate", "Gradient norm", "Step time", "Device memory", "accuracy"):
            assert any(each.startswith(title) for each in titles), title
        canvases = page.locator(".plot canvas").all()
        assert len(canvases) == len(titles) == 8
        assert all(canvas.evaluate(COUNT_COLORS_SCRIPT) > 3 for canvas in canvases)
        labels = page.locator(".plot").first.locator(".mark span").all_text_contents()
        assert labels == ["restart", "3 → 4 nodes", "failed"]
        expect(page.locator("#markers li").first).to_contain_text("node1 rank 3 failed: RuntimeError: CUDA error")
        expect(page.locator("#why-title")).to_have_text(re.compile("^Why it died: .*memory"))
        expect(page.locator("#why .fix")).to_contain_text("micro_batch_size")
        expect(page.locator("#nodes .card")).to_have_count(4)
        expect(page.locator("#links tbody tr")).to_have_count(4)
        expect(page.locator("#checkpoints tbody tr")).to_have_count(10)
        expect(page.locator("#step .phases")).to_contain_text("communication")
        expect(page.locator("#facts")).to_contain_text("580.95.05 node0, node1, node2")
        assert eyes.problems == []


def test_each_marker_of_those_that_are_close_to_each_other_has_its_label(browser: Browser, tmp_path: Path) -> None:
    events = sample_run.build_events()
    now = events[-1].time
    data = {**build_page_data_from_events("demo", events, sample_run.build_tasks(), (), now), "written": now}
    labels = ["3 → 2 nodes", "2 → 3 nodes", "restart", "3 → 4 nodes"]
    steps = [200, 420, 480, 960]
    data["markers"] = [
        {"step": step, "time": now, "kind": "scale", "label": label, "text": label} for step, label in zip(steps, labels, strict=True)
    ]
    (tmp_path / "demo.html").write_text(render_single_file_page(data, []))
    with open_page(browser, (tmp_path / "demo.html").as_uri()) as eyes:
        shown = eyes.page.locator(".plot").first.locator(".mark span")
        assert shown.all_text_contents() == labels
        boxes = [box.bounding_box() or {} for box in shown.all()]
        meet = [
            (one, other)
            for one, other in itertools.combinations(boxes, 2)
            if abs(one["y"] - other["y"]) < one["height"]
            and one["x"] < other["x"] + other["width"]
            and other["x"] < one["x"] + one["width"]
        ]
        assert meet == []


def test_each_phase_of_a_step_has_a_color_of_its_own(browser: Browser, tmp_path: Path) -> None:
    events = sample_run.build_events()
    now = events[-1].time
    data = {**build_page_data_from_events("demo", events, sample_run.build_tasks(), (), now), "written": now}
    data["progress"]["phases"] = dict.fromkeys(PHASES, 0.1)
    data["curves"] = {f"phase.{phase}": {"steps": [1, 2], "values": [0.1, 0.1]} for phase in reversed(PHASES)}
    (tmp_path / "demo.html").write_text(render_single_file_page(data, []))
    with open_page(browser, (tmp_path / "demo.html").as_uri()) as eyes:
        for place in ("#plots .key", "#step .key"):
            keys = eyes.page.locator(place)
            assert [text.partition("100 ms")[0] for text in keys.all_text_contents()] == PHASES
            colors = keys.locator(".swatch").evaluate_all("all => all.map((each) => getComputedStyle(each).backgroundColor)")
            assert len(set(colors)) == len(PHASES), colors


def test_a_cursor_in_one_plot_is_in_all_and_so_is_a_zoom(browser: Browser, report_url: str) -> None:
    with open_page(browser, report_url) as eyes:
        page = eyes.page
        loss, norm = page.locator(".plot").nth(0), page.locator(".plot").nth(4)
        before = norm.locator(".key b").text_content()
        loss.locator(".u-over").hover(position={"x": 40, "y": 60})
        expect(page.locator("#plots-title")).to_have_text(re.compile(r"Curves, at step \d+"))
        assert norm.locator(".key b").text_content() != before
        box = loss.locator(".u-over").bounding_box()
        assert box
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 50, steps=4)
        page.mouse.up()
        expect(page.locator("#show-all-steps")).to_be_visible()
        assert norm.locator(".mark").count() == 0, "none of the marks is among the steps that are shown"
        page.locator("#show-all-steps").click()
        expect(page.locator("#show-all-steps")).to_be_hidden()
        expect(norm.locator(".mark")).to_have_count(3)
        page.locator("#log-loss").check()
        assert page.locator(".plot canvas").first.evaluate(COUNT_COLORS_SCRIPT) > 3
        assert eyes.problems == []


def test_the_output_is_filtered_and_stays_text(browser: Browser, report_url: str) -> None:
    with open_page(browser, report_url) as eyes:
        page = eyes.page
        lines = page.locator("#log-lines > div")
        everything = lines.count()
        assert everything > 100
        assert page.locator("#planted").count() == 0
        expect(lines.last).to_contain_text('<b id="planted">markup</b>')
        page.select_option("#log-node", "node3")
        page.fill("#log-text", "cuda OUT")
        expect(lines).to_have_count(1)
        expect(page.locator("#log-count")).to_have_text(f"1 of {everything} lines")
        page.fill("#log-text", "/shard [2-4] of/")
        expect(lines).to_have_count(3)
        page.fill("#log-text", "/[/")
        expect(page.locator("#log-text")).to_have_attribute("aria-invalid", "true")
        page.fill("#log-text", "")
        page.select_option("#log-node", "")
        page.select_option("#log-rank", "2")
        expect(lines.first).to_contain_text("node1 rank 2")
        assert eyes.problems == []


def test_it_is_readable_on_a_phone(browser: Browser, report_url: str) -> None:
    with open_page(browser, report_url, width=390) as eyes:
        expect(eyes.page.locator(".plot canvas")).to_have_count(8)
        assert eyes.page.evaluate("document.documentElement.scrollWidth") == 390
        assert [box for each in eyes.page.locator("section:visible").all() if (box := each.bounding_box()) and box["width"] > 390] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_text_contrasts_with_its_background(browser: Browser, report_url: str, scheme: str) -> None:
    """A contrast ratio of at least 4.5:1 by WCAG's formula, for every visible text."""
    with open_page(browser, report_url, scheme=scheme) as eyes:
        ground = eyes.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert compute_luminance(ground) > 0.8 if scheme == "light" else compute_luminance(ground) < 0.05
        texts = eyes.page.evaluate(TEXT_COLORS_SCRIPT)
        assert len(texts) > 100
        faint = {(text, ink, paper) for text, ink, paper in texts if compute_contrast(ink, paper) < 4.5}
        assert faint == set()


def test_curves_grow_from_their_first_point_on(browser: Browser) -> None:
    """The test answers in place of the server, so that the page gets one step, the same step again, and then more."""
    answers = [0, 1, 1, 4]

    def answer(route: Route) -> None:
        name = route.request.url.partition("//page/")[2]
        if name.startswith("api/page"):
            step = answers.pop(0) if len(answers) > 1 else answers[0]
            events = [
                event
                for event in sample_run.build_events()
                if event.time < sample_run.START_TIME + 15 or 0 < event.data.get("step", 0) <= step
            ]
            route.fulfill(
                json={
                    "version": f"{step}.{len(answers)}",
                    "page": build_page_data_from_events("demo", events, sample_run.build_tasks(), (), sample_run.START_TIME),
                }
            )
        elif name.startswith("api/lines"):
            route.fulfill(json={"lines": [], "last": 0})
        else:
            route.fulfill(body=read_asset(name or "index.html"), content_type=ASSET_TYPES.get(name, "text/html"))

    context = browser.new_context()
    context.route("**/*", answer)
    eyes = BrowserSession(context.new_page(), "http://page/")
    eyes.page.goto("http://page/")
    expect(eyes.page.locator("#progress-line b").first).to_have_text("4")
    assert eyes.page.locator(".plot canvas").first.evaluate(COUNT_COLORS_SCRIPT) > 3
    expect(eyes.page.locator("#show-all-steps")).to_be_hidden()
    assert eyes.problems == []
    context.close()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[sample_cluster.FakeBackend, str]]:
    """A sample cluster, and the URL of its page, which the real server serves."""
    monkeypatch.setattr("swarmtrain.view.dashboard.cluster_source.POLL_SECONDS", -1.0)
    store_runs()
    backend = sample_cluster.FakeBackend()
    with run_server(ClusterDataSource(backend)) as port:
        yield backend, f"http://127.0.0.1:{port}/"


Cluster = tuple[sample_cluster.FakeBackend, str]


def test_the_page_of_a_cluster_shows_runs_queue_and_who_holds_which_gpu(browser: Browser, cluster: Cluster) -> None:
    with open_page(browser, cluster[1]) as eyes:
        page = eyes.page
        expect(page.locator("#runs tbody tr")).to_have_count(4)
        expect(page.locator("#summary")).to_have_text("4 runs: 2 training, 2 queued · 4 machines · 9 of 12 GPUs allocated")
        expect(page.locator("#runs tbody tr").last).to_contain_text("1,200 of 4,000, 30 %")
        expect(page.locator("#runs tbody tr").last).to_contain_text("3.1416")
        assert page.locator("#planted").count() == 0
        expect(page.locator("#runs tbody tr").nth(2)).to_contain_text("<b id='planted'>anna</b>")
        queue = page.locator("#queue tbody tr")
        assert [row.locator("td").first.text_content() for row in queue.all()] == ["", "1", "2"]
        expect(queue.nth(1)).to_contain_text("1 min 30 s")
        expect(queue.nth(2)).to_contain_text("0 of 2 nodes free; allocated to baseline")
        expect(queue.nth(2)).to_contain_text("4 NVIDIA-GPU, 32 cores")
        machines = page.locator("#machines .card")
        assert [text.replace("GPU ", "") for text in machines.nth(1).locator(".gpus li").all_text_contents()] == [
            "0notebook",
            "1baseline",
            "2free",
            "3baseline",
        ]
        assert machines.nth(2).locator(".gpus li").all_text_contents() == ["2 of 4 GPUsurgent"]
        expect(machines.nth(2)).to_contain_text("drained")
        expect(machines.nth(3)).to_contain_text("used by sweep")
        page.locator("#queue [data-since]").first.evaluate("element => element.textContent = ''")
        expect(page.locator("#queue [data-since]").first).to_have_text(re.compile("^[0-9]"))  # although the server sends no new page
        assert eyes.problems == []


def test_from_the_cluster_to_a_run_and_to_a_comparison(browser: Browser, cluster: Cluster) -> None:
    with open_page(browser, cluster[1]) as eyes:
        page = eyes.page
        page.locator("#runs a", has_text="demo").click()
        expect(page).to_have_title("demo: done")
        expect(page.locator(".plot canvas")).to_have_count(8)
        page.locator("#all-runs").click()
        expect(page.locator("#compare")).to_be_hidden()
        for run in ("demo", "baseline"):
            page.locator(f"#runs input[data-run={run}]").check()
        expect(page.locator("#runs input[data-run=sweep]")).to_be_disabled()
        page.locator("#compare").click()
        expect(page).to_have_title("baseline and demo")
        canvases = page.locator(".plot canvas")
        expect(canvases).to_have_count(2)
        assert all(canvas.evaluate(COUNT_COLORS_SCRIPT) > 3 for canvas in canvases.all())
        assert [re.sub(r"[\d.]+$", "", key) for key in page.locator(".plot").first.locator(".key").all_text_contents()] == [
            "baseline",
            "demo",
        ]
        expect(page.locator(".plot div[role=img]").first).to_have_attribute("aria-label", re.compile("^Training loss over steps: baseline"))
        page.select_option("#axis", "tokens")
        expect(page.locator(".plot div[role=img]").first).to_have_attribute("aria-label", re.compile("^Training loss over tokens: "))
        page.locator(".plot .u-over").first.hover(position={"x": 100, "y": 60})
        expect(page.locator("#plots-title")).to_have_text(re.compile(r"Curves, at [\d.,]+[kM]? tokens"))
        expect(page.locator("#config")).to_contain_text("its config is not recorded on this machine")
        page.locator("#all-runs").click()
        expect(page.locator("h1")).to_have_text("Cluster")
        assert eyes.problems == []


def test_the_page_of_a_cluster_follows_it_and_keeps_a_choice(browser: Browser, cluster: Cluster) -> None:
    backend, url = cluster
    with open_page(browser, url) as eyes:
        page = eyes.page
        page.locator("#runs input[data-run=demo]").check()
        queue = backend.page.queue
        assert queue
        overdue = [dataclasses.replace(row, estimate=0.0) for row in queue.runs]
        backend.page = dataclasses.replace(backend.page, queue=dataclasses.replace(queue, runs=tuple(overdue)))
        expect(page.locator("#queue tbody tr").nth(1)).to_contain_text("soon")
        backend.page = dataclasses.replace(backend.page, runs=backend.page.runs[1:], queue=None, queue_note="there is no scheduler")
        expect(page.locator("#runs tbody tr")).to_have_count(3)
        expect(page.locator("#queue .body")).to_have_text("there is no scheduler")
        expect(page.locator("#runs input[data-run=demo]")).to_be_checked()
        backend.is_away = True
        expect(page.locator("#freshness")).to_have_text("the cluster does not answer: no answer")
        expect(page.locator("#runs tbody tr")).to_have_count(3)
        assert eyes.problems == []


def test_what_cannot_be_compared_is_shown_with_the_reason(browser: Browser, cluster: Cluster) -> None:
    with open_page(browser, f"{cluster[1]}compare?run=demo&run=demo") as eyes:
        expect(eyes.page.locator("#problem")).to_contain_text("both runs are the same one: demo, id aaaaaaaaaaaa (name two different runs")
        expect(eyes.page.locator("#plots")).to_be_hidden()
    with open_page(browser, f"{cluster[1]}runs/never/") as eyes:
        expect(eyes.page.locator("#freshness")).to_contain_text("run never: unknown run; existing runs: demo")


def test_runs_with_numbers_as_names_keep_their_order(browser: Browser, tmp_path: Path) -> None:
    sources = [
        record_run(run, run_id, config={"optimizer": {"beta1": beta}})
        for run, run_id, beta in (("20", "a" * 12, 0.9), ("10", "b" * 12, 0.8))
    ]
    write_html_report(sources, tmp_path / "comparison.html", overwrite=False)
    with open_page(browser, (tmp_path / "comparison.html").as_uri()) as eyes:
        expect(eyes.page.locator("#config th")).to_have_text(["Key", "20", "10"])
        expect(eyes.page.locator("#config td")).to_have_text(["optimizer.beta1", "0.9", "0.8"])
        assert eyes.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["", "compare?run=demo&run=baseline"])
def test_the_pages_of_a_cluster_are_readable(browser: Browser, cluster: Cluster, path: str, scheme: str) -> None:
    """On a phone nothing is wider than the screen, and every visible text has a contrast of at least 4.5:1."""
    with open_page(browser, f"{cluster[1]}{path}", width=390, scheme=scheme) as eyes:
        expect(eyes.page.locator("#runs tbody tr").first).to_be_visible()
        if path:
            expect(eyes.page.locator(".plot canvas")).to_have_count(2)
        assert eyes.page.evaluate("document.documentElement.scrollWidth") == 390
        texts = eyes.page.evaluate(TEXT_COLORS_SCRIPT)
        assert len(texts) > 20
        assert {(text, ink, paper) for text, ink, paper in texts if compute_contrast(ink, paper) < 4.5} == set()
        assert eyes.problems == []


TEXT_COLORS_SCRIPT = """() => {
  const found = [], walker = document.createTreeWalker(document.querySelector("body"), NodeFilter.SHOW_TEXT);
  const solid = (colour) => !/, 0\\)$|transparent/.test(colour);
  while (walker.nextNode()) {
    const of = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !of.getClientRects().length || of.closest("select, noscript, script")) continue;
    let under = of;
    while (under && !solid(getComputedStyle(under).backgroundColor)) under = under.parentElement;
    found.push([text.slice(0, 30), getComputedStyle(of).color, getComputedStyle(under).backgroundColor]);
  }
  return found;
}"""


def compute_luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def compute_contrast(first: str, second: str) -> float:
    light, dark = sorted((compute_luminance(first), compute_luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


TRAIN = """
import os, pathlib, signal, time
import torch, torch.distributed as dist
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol import Event
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
state, died, go = pathlib.Path("made"), pathlib.Path("died"), pathlib.Path("go")
first = int(state.read_text()) if state.exists() else 0
coordinator = CoordinatorClient(os.environ["SWARMTRAIN_COORDINATOR"])
for step in range(first + 1, 31):
    inputs = torch.randn(32, 8)
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if dist.get_rank() == 0:
        state.write_text(str(step))
        coordinator.post_event(Event("progress", {"step": step, "steps": 30, "loss": loss.item(), "learning_rate": 0.05}))
        print(f"step {step} loss {loss.item():.3f}", flush=True)
    if step == 12 and dist.get_rank() == 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while step == 20 and not go.exists():
        time.sleep(0.05)
    dist.barrier()
    time.sleep(0.15)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a run of two local nodes, one of which is killed once. Leftover processes are killed at the end."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "small.yml").write_text("runner: {runner_type: local, nodes: 2, script: train.py, stop_grace: 5}\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for pid in find_run_pids(tmp_path / "home"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start_swarmtrain(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "swarmtrain", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_training_run_is_followed_through_a_death_and_a_lost_server(browser: Browser, project: Path) -> None:
    deployed = start_swarmtrain("deploy", "small.yml", "--detach", "--yes").communicate(timeout=TIMEOUT_SECONDS)
    server, address = start_dashboard(0)
    try:
        with open_page(browser, address) as eyes:
            page = eyes.page
            expect(page.locator("#markers li")).to_contain_text(["restart"])
            expect(page.locator("#markers li")).to_contain_text(["SIGKILL"])
            expect(page.locator("#progress-line b").first).to_have_text("20")
            expect(page.locator("#state")).to_have_text("training")
            expect(page.locator("#log-lines")).to_contain_text("step 20 loss")
            assert page.locator(".plot canvas").first.evaluate(COUNT_COLORS_SCRIPT) > 3
            assert eyes.problems == []
            interrupt_dashboard(server)
            expect(page.locator("#freshness")).to_contain_text("the dashboard has not answered for")
            eyes.problems.clear()
            server, _ = start_dashboard(int(address.rsplit(":", 1)[1].strip("/")))
            (project / "go").touch()
            expect(page.locator("#state")).to_have_text("done")
            expect(page.locator("#freshness")).to_have_text("it has ended")
            assert [wrong for wrong in eyes.problems if "net::ERR_" not in wrong] == []
        interrupt_dashboard(server)
        server, address = start_dashboard(0, run=None)
        with open_page(browser, address) as eyes:
            row = eyes.page.locator("#runs tbody tr")
            expect(row).to_contain_text(["small"])
            expect(row.locator(".badge")).to_have_text("done")
            expect(row).to_contain_text(["30 of 30, 100 %"])
            expect(eyes.page.locator("#queue .body")).to_contain_text("swarm")
            row.locator("a").click()
            expect(eyes.page.locator("#markers li")).to_contain_text(["SIGKILL"])
            assert eyes.problems == []
    finally:
        interrupt_dashboard(server)
        start_swarmtrain("down", "small").communicate(timeout=TIMEOUT_SECONDS)
    assert deployed[0] == ""


def start_dashboard(port: int, run: str | None = "small") -> tuple[subprocess.Popen[str], str]:
    """Start the dashboard of a run, or of all runs; return its process and its URL, once it answers."""
    process = start_swarmtrain("dashboard", *([run] if run else []), "--port", str(port))
    line = process.stderr.readline()  # type: ignore[union-attr]  # it is a pipe
    found = re.search(r"http://\S+", line)
    assert found, line + process.communicate()[1]
    time.sleep(0.5)
    return process, found[0]


def interrupt_dashboard(process: subprocess.Popen[str]) -> None:
    """End the dashboard with SIGINT, as Ctrl-C does."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
