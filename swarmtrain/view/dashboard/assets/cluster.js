// Renders the page of a cluster from one value, see cluster_page.py, which api/cluster returns, polled.
"use strict";

(() => {
  const {
    $, createElement, isFiniteNumber, formatInteger, formatSignificant, formatDuration, formatCount, renderSection, createTable,
    createPoller, describeOutage, showFreshness, onReady,
  } = swarmtrain;
  const STATE_CLASSES = { unreachable: "bad", waiting: "warn", saving: "warn", incomplete: "warn", running: "training", ready: "ok", drained: "warn", paused: "warn" };
  let page = null;
  const chosen = new Set();

  const createBadge = (state) => createElement("span", { class: `badge ${STATE_CLASSES[state] ?? state}` }, state);
  const createRunLink = (key, text) => createElement("a", { href: `runs/${encodeURIComponent(key)}/` }, text);
  const formatAge = (seconds) => formatDuration(poller.getServerTime() - seconds);
  // Ages grow while the server sends no new page.
  const createAge = (seconds) => seconds ? createElement("span", { "data-since": seconds }, formatAge(seconds)) : "";
  // The estimate is 0 if the runs that a run waits for should have ended by now.
  const formatEstimate = (seconds) => !isFiniteNumber(seconds) ? "unknown" : seconds >= 0.5 ? formatDuration(seconds) : "soon";
  // Cores can be fractions, and so can GPUs whose numbers are unknown.
  const formatAmount = (amount) => formatSignificant(Math.round(amount * 100) / 100);
  const formatCores = (cores) => `${formatAmount(cores)} core${cores === 1 ? "" : "s"}`;

  function renderSummary() {
    const states = new Map();
    for (const run of page.runs) states.set(run.state, (states.get(run.state) ?? 0) + 1);
    const known = page.machines.filter((machine) => machine.gpu_ids.length);
    const gpus = known.reduce((sum, machine) => sum + machine.gpu_ids.length, 0), allocated = known.reduce((sum, machine) => sum + machine.gpus_allocated, 0);
    const facts = [[formatCount(page.runs.length, "run"), [...states].map(([state, count]) => `${count} ${state}`).join(", ")].filter(Boolean).join(": "),
      formatCount(page.machines.length, "machine"), gpus ? `${formatAmount(allocated)} of ${formatCount(gpus, "GPU")} allocated` : ""];
    $("summary").textContent = facts.filter(Boolean).join(" · ");
    document.title = `swarmtrain: ${formatCount(page.runs.length, "run")}`;
  }

  function renderRuns() {
    const rows = [...page.runs].reverse().map((run) => {
      const box = createElement("input", { type: "checkbox", "aria-label": `compare ${run.key}`, "data-run": run.key });
      box.checked = chosen.has(run.key);
      const progress = isFiniteNumber(run.step) ? `${formatInteger(run.step)}${run.steps ? ` of ${formatInteger(run.steps)}, ${Math.floor(100 * run.step / run.steps)} %` : ""}` : "";
      const id = run.key === run.id ? createElement("small", { class: "quiet" }, ` ${run.id}, on ${run.location}`) : "";
      return [box, createElement("span", {}, createRunLink(run.key, run.run), id), run.owner, createBadge(run.state), progress, isFiniteNumber(run.loss) ? run.loss.toFixed(4) : "",
        run.nodes ? `${run.running_nodes}/${run.nodes}` : "", run.gpus || "", createAge(run.created), run.reason];
    });
    const columns = { "": "", Run: "", Owner: "", State: "", Step: "number", Loss: "number", Nodes: "number", GPUs: "number", Age: "number", Remark: "remark" };
    const problems = page.problems.map((text) => createElement("p", { class: "problem" }, `not listed: ${text}`));
    renderSection("runs", true, rows.length ? createTable("runs", Object.entries(columns), rows) : createElement("p", { class: "quiet" }, "no run exists; swarmtrain deploy CONFIG starts one"), ...problems);
  }

  // Two chosen runs can be compared.
  function updateComparison() {
    const keys = page.runs.map((run) => run.key).filter((key) => chosen.has(key));
    $("compare").hidden = keys.length !== 2;
    $("compare").textContent = `Compare ${keys.join(" and ")}`;
    $("compare").href = `compare?${keys.map((key) => `run=${encodeURIComponent(key)}`).join("&")}`;
    for (const box of document.querySelectorAll("#runs input")) box.disabled = keys.length >= 2 && !box.checked;
  }

  function renderQueue() {
    if (!page.queue) return renderSection("queue", true, createElement("p", { class: "quiet" }, page.queue_note));
    const keys = new Map(page.runs.map((run) => [run.id, run.key]));
    let position = 0;
    const rows = page.queue.map((run) => [
      run.state === "waiting" ? ++position : "", createRunLink(keys.get(run.id) ?? run.run, run.run), run.owner, run.priority_class, createBadge(run.state), `${run.nodes}/${run.wanted_nodes}`,
      Object.entries(run.resources_per_node).map(([name, amount]) => name === "cores" ? formatCores(amount) : `${formatAmount(amount)} ${name}`).join(", "), createAge(run.since),
      run.state !== "waiting" ? "" : formatEstimate(run.estimate), [run.reason || run.hosts.join(", "), run.lost_steps ? `${formatCount(run.lost_steps, "step")} lost` : ""].filter(Boolean).join("; "),
    ]);
    const columns = { "#": "number", Run: "", Owner: "", Class: "", State: "", Nodes: "number", "Resources per node": "", Since: "number", "Starts in": "number", Reason: "remark" };
    renderSection("queue", true, rows.length ? createTable("queue", Object.entries(columns), rows) : createElement("p", { class: "quiet" }, "the queue is empty"), createElement("p", { class: "quiet" }, page.scheduler));
  }

  function createGpu(machine, number) {
    const allocations = machine.allocations.filter((allocation) => allocation.gpu_numbers.includes(number));
    const text = allocations.map((allocation) => allocation.user + (allocation.is_saving ? ", saving" : "")).join(" + ");
    return createElement("li", { class: allocations.length ? "allocated" : null, title: machine.gpu_ids[number] || null }, createElement("b", {}, `GPU ${number}`), createElement("span", {}, text || "free"));
  }

  function createMachine(machine) {
    const location = page.machines.some((other) => other.location !== machine.location) ? machine.location : "";
    const uncertain = machine.allocations.filter((allocation) => allocation.gpus > allocation.gpu_numbers.length);
    // Which GPUs these are is unknown, so that no GPU of this machine can be called free.
    const gpus = uncertain.length && machine.gpu_ids.length ? machine.gpu_ids.flatMap((_, i) => machine.allocations.some((allocation) => allocation.gpu_numbers.includes(i)) ? [createGpu(machine, i)] : []) : machine.gpu_ids.map((_, i) => createGpu(machine, i));
    const amounts = uncertain.map((allocation) => createElement("li", { class: "allocated" }, createElement("b", {}, `${formatAmount(allocation.gpus - allocation.gpu_numbers.length)}${machine.gpu_ids.length ? ` of ${machine.gpu_ids.length}` : ""} GPUs`), createElement("span", {}, allocation.user)));
    const others = machine.allocations.filter((allocation) => !allocation.gpus && !allocation.cores);
    const cores = isFiniteNumber(machine.cores) ? `${formatAmount(machine.cores_allocated)} of ${formatCores(machine.cores)} allocated` : "";
    const shares = machine.allocations.filter((allocation) => allocation.cores || allocation.is_shared).map((allocation) => createElement("li", {}, createElement("b", {}, allocation.user),
      createElement("span", {}, [allocation.cores ? formatCores(allocation.cores) : "", allocation.is_shared ? "shared" : "", allocation.is_saving ? "saving" : ""].filter(Boolean).join(", "))));
    return createElement("article", { class: `card ${machine.state === "ready" || !machine.state ? "" : machine.state === "down" ? "bad" : "warn"}`, "aria-label": machine.name },
      createElement("h3", {}, machine.name, machine.state ? createElement("span", { class: `badge ${machine.state === "down" ? "bad" : STATE_CLASSES[machine.state] ?? "warn"}` }, machine.state) : ""),
      createElement("p", { class: "where" }, [location, cores].filter(Boolean).join(" · ")),
      gpus.length || amounts.length ? createElement("ul", { class: "gpus" }, ...gpus, ...amounts) : "",
      shares.length ? createElement("ul", { class: "allocations" }, ...shares) : "",
      others.length ? createElement("p", { class: "where" }, `used by ${others.map((allocation) => allocation.user).join(", ")}`) : "");
  }

  function renderMachines() {
    renderSection("machines", true, page.machines.length ? createElement("div", { class: "cards" }, ...page.machines.map(createMachine)) : createElement("p", { class: "quiet" }, "no machine is known"));
  }

  function renderFreshness() {
    if (!page) return showFreshness(poller.error, "no answer yet");
    for (const element of document.querySelectorAll("[data-since]")) element.textContent = formatAge(Number(element.dataset.since));
    showFreshness(describeOutage(poller, page, "the cluster"), `live, ${formatCount(Math.round((Date.now() - poller.answeredAt) / 1000), "second")} ago`);
  }

  function render(data) {
    page = data;
    const focused = document.activeElement?.dataset.run;
    renderSummary(); renderRuns(); renderQueue(); renderMachines(); updateComparison();
    if (focused) document.querySelector(`#runs input[data-run="${CSS.escape(focused)}"]`)?.focus();
  }

  const poller = createPoller("api/cluster", { render, renderFreshness });
  onReady(() => {
    $("runs").addEventListener("change", (event) => {
      const { run } = event.target.dataset;
      if (event.target.checked) chosen.add(run); else chosen.delete(run);
      updateComparison();
    });
    poller.start();
  });
})();
