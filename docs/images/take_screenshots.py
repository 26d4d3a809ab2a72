"""Take the pictures of the dashboard: screenshots of real runs on a lab of four nodes. `make pictures` runs this.

1. The quickstart trains on three nodes. A rank is killed, and later the run is scaled to four nodes. dashboard.png and
   dashboard-phone.png show it while it trains.
2. The same model with a memory leak in its training script, leak.py, in containers with a memory limit. The kernel kills its ranks
   until the run fails. dashboard-failed.png shows that.
3. The quickstart with two learning rates on two nodes each, a job that holds fake GPUs of the lab, and one that waits for all of them in
   the queue. cluster.png shows them, and comparison.png the two trainings after their last step.

Each step waits for the run's progress, not for a time. Needs root, Chromium, and what the lab needs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
IMAGES = Path(__file__).parent
NODES = ("node0", "node1", "node2", "node3")
STATE_FOLDER = ROOT / "build" / "pictures"
"""What `swarmtrain` keeps of these runs on this machine, apart from what it keeps of other runs."""
IMAGE = "registry.lab:5000/swarmtrain:latest"
CONFIG = "examples/quickstart.yml"
RUN_NAME = "quickstart"
LEAKING_RUN_NAME = "activations"

STEPS = 2000
STEPS_BEFORE_KILL = 300
STEPS_BEFORE_SCALING = 200
STEPS_BEFORE_SCREENSHOT = 300
TRAINING_SETTINGS = {
    # A restart waits for all three nodes, also on a busy machine, so that each marker in the picture is one that this script caused.
    "runner.min_nodes": 3,
    # The lab's GPUs do not exist.
    "runner.swarm.gpu": "none",
    "trainer.train_iterations": STEPS,
    "trainer.save_interval": 100,
    "trainer.eval_interval": 50,
    "trainer.eval_iterations": 2,
}
MEMORY_LIMIT = "700m"
LEAKING_SETTINGS = {
    **TRAINING_SETTINGS,
    "runner.script": "docs/images/leak.py",
    "runner.code": "[training_code.py, datautils.py]",
    "runner.docker_config.memory": MEMORY_LIMIT,
    "runner.max_restarts_per_hour": 1,
}

CLUSTER_STEPS = 400
CLUSTER_SETTINGS = {
    **TRAINING_SETTINGS,
    "runner.nodes": 2,
    "runner.min_nodes": 2,
    "runner.docker_config.cpus": 1,
    "trainer.train_iterations": CLUSTER_STEPS,
    "trainer.eval_interval": 25,
}
LEARNING_RATES = {"rate-3e-3": 3e-3, "rate-1e-3": 1e-3}
"""Learning rate of each of the two runs that are compared."""
STEPS_BEFORE_CLUSTER_SCREENSHOT = 100
GPUS = 2
"""Fake GPUs of each engine of the lab: runs can hold them, but they do not exist."""
GPU_CONFIG = """\
runner:
  script: sleep.py
  nodes: {nodes}
  stop_grace: 5
  swarm: {{gpu: visible}}
  docker_config: {{docker_container: {image}, cpus: 0.5}}
"""

STALL_TIMEOUT_SECONDS = 300.0
"""Seconds without a new step or state after which a run counts as stalled."""
POLL_SECONDS = 1.0
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
KILL_FIRST_RANK_COMMAND = "kill -KILL $(grep -l '^rank' /proc/[0-9]*/comm | head -n 1 | cut -d/ -f3)"


class ScreenshotError(Exception):
    """Raised if a screenshot cannot be taken. The message has the place and the reason, `hint` the next step."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Screen:
    """The window that a picture shows, in CSS pixels. Without a height it ends below the element `last`."""

    width: int
    height: int | None = None
    last_selector: str = "#plots"
    dark: bool = False


MARGIN = 16
DEVICE_SCALE_FACTOR = 2
"""Pixels of a picture per CSS pixel, so that text is sharp on every display."""
DESKTOP_SCREEN = Screen(1240)
FAILED_SCREEN = Screen(1240, last_selector=".plot:nth-child(4)", dark=True)
PHONE_SCREEN = Screen(390, 844)
CLUSTER_SCREEN = Screen(1240, last_selector="#machines")
COMPARISON_SCREEN = Screen(1240, last_selector="#config")


def main() -> int:
    parser = argparse.ArgumentParser(prog="take_screenshots.py", description="Take the dashboard's pictures from real runs on a lab.")
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder for the pictures (default: docs/images)")
    parser.add_argument("--lab", default="pictures", help="name of the lab to bring up (default: pictures)")
    parser.add_argument("--only", choices=("training", "failed", "cluster"), help="take only these pictures")
    parser.add_argument("--keep", action="store_true", help="use the lab if it is up already, and leave it up")
    options = parser.parse_args()
    for number in SIGNALS:
        signal.signal(number, _raise_interrupt)
    try:
        take_screenshots(options.lab, options.output.absolute(), only=options.only, keep=options.keep)
    except ScreenshotError as error:
        sys.stderr.write(f"error: {error}\nhint: {error.hint}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the pictures that were not taken yet are unchanged\n")
        return 130
    return 0


def take_screenshots(lab_name: str, output: Path, *, only: str | None, keep: bool) -> None:
    """Take the pictures into the folder `output`. Raises PicturesError; the lab is down afterwards unless `keep`."""
    started_at = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(STATE_FOLDER, ignore_errors=True)
    with running_browser() as browser, running_lab(lab_name, keep=keep) as machines:
        print_progress(f"building the image {IMAGE} and pushing it to the lab's registry")
        machines.run_swarmtrain("image", "build", ".", "--tag", IMAGE, "--push")
        print_progress("pulling the image on every node")
        for node in NODES:
            machines.run_on_node(node, "docker", "pull", "--quiet", IMAGE)
        for name, take in SCENES.items():
            if only in (None, name):
                take(machines, browser, output)
    print_progress(f"took the pictures in {time.monotonic() - started_at:.0f} s")


def take_training_screenshots(machines: LabMachines, browser: Browser, output: Path) -> None:
    """Take dashboard.png and dashboard-phone.png of a run that survives a killed rank, and is scaled up."""
    with machines.deployed_run(RUN_NAME, TRAINING_SETTINGS) as dashboard:
        dashboard.wait_for_step(STEPS_BEFORE_KILL)
        worlds = dashboard.read_page()["worlds"]
        print_progress("killing a rank on node1 with SIGKILL")
        machines.run_on_node("node1", "docker", "exec", machines.find_container(RUN_NAME, "node1"), "sh", "-c", KILL_FIRST_RANK_COMMAND)
        dashboard.wait_until("restarts its ranks", lambda page: page["worlds"] > worlds)
        dashboard.wait_for_more_steps(STEPS_BEFORE_SCALING)
        print_progress("scaling to four nodes")
        machines.run_swarmtrain("scale", RUN_NAME, "--nodes", "4", "--yes")
        dashboard.wait_until("trains on four nodes", lambda page: page["world"].get("nodes") == 4)
        dashboard.wait_for_more_steps(STEPS_BEFORE_SCREENSHOT)
        take_screenshot(browser, dashboard.address, DESKTOP_SCREEN, output / "dashboard.png")
        take_screenshot(browser, dashboard.address, PHONE_SCREEN, output / "dashboard-phone.png")
        if dashboard.read_page()["state"] != "training":
            raise ScreenshotError(
                f"run {RUN_NAME}: it ended before its pictures were taken", "raise STEPS in docs/images/take_screenshots.py"
            )


def take_failed_screenshots(machines: LabMachines, browser: Browser, output: Path) -> None:
    """Take dashboard-failed.png of a run whose ranks use more and more memory, until the kernel kills them."""
    with machines.deployed_run(LEAKING_RUN_NAME, LEAKING_SETTINGS) as dashboard:
        dashboard.wait_until("fails for want of memory", lambda page: page["state"] == "failed", may_fail=True)
        take_screenshot(browser, dashboard.address, FAILED_SCREEN, output / "dashboard-failed.png")


def take_cluster_screenshots(machines: LabMachines, browser: Browser, output: Path) -> None:
    """Take cluster.png of two trainings, a job with GPUs, and a queue; and comparison.png of the trainings after their last step."""
    machines.run_swarmtrain("queue", "up", "--image", IMAGE)
    with contextlib.ExitStack() as stack:
        runs = {
            name: stack.enter_context(machines.deployed_run(name, {**CLUSTER_SETTINGS, "learning_rate_scheduler.learning_rate": rate}))
            for name, rate in LEARNING_RATES.items()
        }
        for name, nodes in (("render", 1), ("sweep", 4)):
            stack.enter_context(machines.gpu_run(name, nodes))
        for run in runs.values():
            run.wait_for_step(STEPS_BEFORE_CLUSTER_SCREENSHOT)
        address = stack.enter_context(machines.serve_dashboard())
        render = DashboardClient("render", f"{address}runs/render/")
        render.wait_until("runs", lambda page: any(node["state"] == "running" for node in page["nodes"]))
        take_screenshot(browser, address, CLUSTER_SCREEN, output / "cluster.png", "#queue tbody tr")
        for run in runs.values():
            run.wait_until("ends", lambda page: bool(page["ended"]), may_fail=True)
        query = "&".join(f"run={name}" for name in runs)
        take_screenshot(browser, f"{address}compare?{query}", COMPARISON_SCREEN, output / "comparison.png", ".plot canvas")
    machines.run_swarmtrain("queue", "down", "--yes")


SCENES = {"training": take_training_screenshots, "failed": take_failed_screenshots, "cluster": take_cluster_screenshots}


class LabMachines:
    """The lab's machines, and commands on them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._environment = {**os.environ, "XDG_STATE_HOME": str(STATE_FOLDER)}

    def load_environment(self) -> None:
        """Point `docker` and `swarmtrain` at the lab."""
        exported = self._get_output(_build_command("lab", "env", "--name", self.name))
        for line in exported.splitlines():
            if match := re.fullmatch(r"export (DOCKER_HOST)=(\S+)", line):
                self._environment[match[1]] = match[2].strip("'\"")

    def run_swarmtrain(self, *argv: str, cwd: Path = ROOT) -> None:
        """Run a command to its end; what it prints is shown. Raises PicturesError if it fails."""
        code = subprocess.run(_build_command(*argv), cwd=cwd, env=self._environment, stdout=sys.stderr, check=False).returncode
        if code:
            raise ScreenshotError(
                f"swarmtrain {' '.join(argv)}: exit code {code}", "the lines above have the reason; docs/how-to/lab.md has what a lab needs"
            )

    def run_on_node(self, node: str, *argv: str) -> str:
        """Return what a command prints on a node. Raises PicturesError if it fails."""
        return self._get_output(_build_command("lab", "enter", "--name", self.name, node, *argv))

    def find_container(self, run: str, node: str) -> str:
        """Return the id of the container with the node's ranks. Raises PicturesError if there is none."""
        container_ids = self.run_on_node(node, "docker", "ps", "-q", "--filter", f"name={run}_{node}.").split()
        if not container_ids:
            raise ScreenshotError(f"run {run}: {node} has no container", f"swarmtrain logs {run} --node {node}")
        return container_ids[0]

    @contextlib.contextmanager
    def deployed_run(self, name: str, settings: dict[str, Any]) -> Iterator[DashboardClient]:
        """Deploy the quickstart as `name` with these settings, serve its page, and take it down at the end."""
        values = {**settings, "trainer.save_dir": f"runs/{name}"}
        options = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        print_progress(f"deploying {CONFIG} as {name}")
        self.run_on_node("node0", "rm", "-rf", f"/mnt/shared/{name}")
        self.run_swarmtrain("deploy", CONFIG, "--name", name, "--yes", "--detach", *options)
        with self.serve_dashboard(name) as address:
            yield DashboardClient(name, address)
        self.run_swarmtrain("down", name)

    @contextlib.contextmanager
    def gpu_run(self, name: str, nodes: int) -> Iterator[None]:
        """Deploy a job that holds all GPUs of `nodes` nodes and only sleeps, and take it down at the end."""
        print_progress(f"deploying {name}, which holds the GPUs of {nodes} nodes")
        config = STATE_FOLDER / f"{name}.yml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(GPU_CONFIG.format(nodes=nodes, image=IMAGE))
        (STATE_FOLDER / "sleep.py").write_text("import time\n\ntime.sleep(3600)\n")
        self.run_swarmtrain("deploy", str(config), "--yes", "--detach", cwd=STATE_FOLDER)
        yield
        self.run_swarmtrain("down", name)

    @contextlib.contextmanager
    def serve_dashboard(self, *run: str) -> Iterator[str]:
        """Serve the page of a run, or of the cluster, and yield its address."""
        process = subprocess.Popen(
            _build_command("dashboard", *run, "--port", "0"),
            cwd=ROOT,
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield _read_address(process)
        finally:
            process.terminate()
            process.wait()

    def _get_output(self, argv: list[str]) -> str:
        completed = subprocess.run(argv, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)
        if completed.returncode:
            raise ScreenshotError(f"{' '.join(argv[3:])}: {completed.stderr.strip()}", f"swarmtrain lab status --name {self.name}")
        return completed.stdout


class DashboardClient:
    """A run, seen by the page of it that is served at `address`."""

    def __init__(self, run: str, address: str) -> None:
        self._run, self.address = run, address
        self.step = 0

    def read_page(self) -> dict[str, Any]:
        """Return what the page shows."""
        import urllib3

        retries = urllib3.Retry(8, backoff_factor=0.2)
        try:
            page_data: dict[str, Any] = urllib3.request("GET", f"{self.address}api/page", timeout=30, retries=retries).json()["page"]
        except urllib3.exceptions.HTTPError as error:
            raise ScreenshotError(f"dashboard of {self._run}: {error}", f"swarmtrain dashboard {self._run}") from None
        return page_data

    def wait_for_step(self, step: int) -> None:
        """Return when the run has completed `step`."""
        self.wait_until(f"completes step {step}", lambda page: page["progress"].get("step", 0) >= step)

    def wait_for_more_steps(self, steps: int) -> None:
        """Return when the run has completed so many steps more."""
        self.wait_for_step(self.step + steps)

    def wait_until(self, goal: str, is_reached: Callable[[dict[str, Any]], bool], *, may_fail: bool = False) -> None:
        """Return when `true` holds for the page. Raises PicturesError if the run stalls, or ends before that."""
        print_progress(f"waiting until {self._run} {goal}")
        last_state, changed_at, reported_at = None, time.monotonic(), time.monotonic()
        while True:
            page = self.read_page()
            self.step = page["progress"].get("step", 0)
            state = self.step, page["state"], page["worlds"]
            if is_reached(page):
                return
            if page["ended"] and not may_fail:
                raise ScreenshotError(f"run {self._run}: {page['state']} before it {goal}", f"swarmtrain why {self._run}")
            now = time.monotonic()
            if state != last_state:
                last_state, changed_at = state, now
            if now - changed_at > STALL_TIMEOUT_SECONDS:
                raise ScreenshotError(
                    f"run {self._run}: no progress for {STALL_TIMEOUT_SECONDS:.0f} s, at step {self.step}",
                    "repeat it with --keep, then: swarmtrain status",
                )
            if now - reported_at > 10:
                reported_at = now
                print_progress(f"  step {self.step}, {page['state']}, {page['world'].get('nodes', 0)} nodes")
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def running_lab(name: str, *, keep: bool) -> Iterator[LabMachines]:
    """Bring up a lab, and take it down at the end, also after an error. Raises PicturesError if it cannot start."""
    is_up = subprocess.run(_build_command("lab", "status", "--name", name), cwd=ROOT, capture_output=True, check=False).returncode == 0
    down_command = f"swarmtrain lab down --name {name} --keep-images"
    if is_up and not keep:
        raise ScreenshotError(f"lab {name}: it is up already", f"{down_command}, or use --keep")
    machines = LabMachines(name)
    try:
        if not is_up:
            print_progress(f"bringing up a lab of {len(NODES)} nodes")
            machines.run_swarmtrain("lab", "up", "--name", name, "--nodes", str(len(NODES)), "--gpus", str(GPUS))
        machines.load_environment()
        yield machines
    finally:
        if not keep:
            # A second Ctrl-C would leave half a lab.
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            print_progress("removing the lab")
            subprocess.run(_build_command(*down_command.split()[1:]), cwd=ROOT, check=False)


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Open a headless Chromium. Raises PicturesError if there is none."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise ScreenshotError("browser: chromium is not installed", "sh requirements/system.sh")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise ScreenshotError("browser: the Python package playwright is not installed", "make install-test") from None
    with sync_playwright() as playwright:
        # Chromium's own sandbox needs user namespaces, which root lacks in a container; it loads this page only.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-background-networking"])
        yield browser
        with contextlib.suppress(Exception):
            browser.close()


def take_screenshot(browser: Browser, address: str, screen: Screen, path: Path, awaited_selector: str = "#log-lines div") -> None:
    """Write a screenshot of the top of the page as a PNG with a palette of 256 colors, when it has an element `awaited_selector`."""
    context = browser.new_context(
        viewport={"width": screen.width, "height": screen.height or screen.width},
        device_scale_factor=DEVICE_SCALE_FACTOR,
        color_scheme="dark" if screen.dark else "light",
        reduced_motion="reduce",
    )
    try:
        page = context.new_page()
        page.goto(address)
        # The page of a run draws its curves when it has the first answer, and its output a request later.
        page.locator(awaited_selector).first.wait_for(state="attached")
        page.wait_for_timeout(500)
        if screen.height is None:
            page.set_viewport_size({"width": screen.width, "height": _find_bottom(page, screen.last_selector) + MARGIN})
            page.wait_for_timeout(500)
        page.screenshot(path=path)
    finally:
        context.close()
    reduce_colors(path)
    print_progress(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)")


def _find_bottom(page: Page, selector: str) -> int:
    box = page.locator(selector).first.bounding_box() or {"y": 0, "height": 0}
    return round(box["y"] + box["height"])


def reduce_colors(path: Path) -> None:
    """Rewrite a PNG with a palette: flat colors lose nothing that can be seen, and the file is a third as large."""
    from PIL import Image

    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def print_progress(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"{text}\n" if text.startswith(" ") else f"== {text}\n")
    sys.stderr.flush()


def _build_command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "swarmtrain", *argv]


def _read_address(process: subprocess.Popen[str]) -> str:
    stderr = process.stderr or io.StringIO()
    line = stderr.readline()
    match = re.search(r"http://\S+", line)
    if not match:
        raise ScreenshotError(f"dashboard: {line}{stderr.read()}".strip(), "the line above has the reason")
    return match[0]


def _raise_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
