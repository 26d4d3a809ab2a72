// Renders the page of a run from one value, see page_data.py: the one in the file of a report, else what api/page returns, polled.
"use strict";

(() => {
  const {
    $, POLL_MS, GIB, createElement, isFiniteNumber, formatInteger, formatCompact, formatSignificant, formatDuration,
    formatShortDuration, formatBandwidth, formatGibibytes, formatTime, formatDateTime, createTimeElement, formatCount, createColored,
    createSwatch, renderSection, createPoller, describeOutage, showFreshness, onReady,
  } = swarmtrain;
  const { createPlotBoard } = swarmtrainCharts;
  const MAX_LINES = 4000, MAX_SHOWN_LINES = 1500;
  let page = null;

  // ---- plots

  // The phases of a step in the order in which they happen; each has the same color in the curves and in the bar.
  const PHASES = ["data", "forward", "backward", "communication", "optimizer", "validation", "checkpoint", "logging", "other"];
  const comparePhases = (a, b) => (PHASES.indexOf(a) + 1 || PHASES.length) - (PHASES.indexOf(b) + 1 || PHASES.length);
  const PLOTS = [
    { title: "Loss", unit: "", names: { loss: "training", validation: "validation", max_replica_loss: "worst rank" }, log: true },
    { title: "Throughput", unit: "tokens/s", names: { tokens_per_second: "all ranks" }, zero: true },
    { title: "MFU", unit: "% of the devices' peak", names: { mfu: "MFU" }, scale: 100, zero: true },
    { title: "Learning rate", unit: "", names: { learning_rate: "learning rate" }, zero: true },
    { title: "Gradient norm", unit: "before clipping", names: { gradient_norm: "gradient norm" }, zero: true },
    { title: "Step time", unit: "s", prefix: "phase.", write: formatShortDuration, zero: true },
    { title: "Device memory", unit: "GiB, rank 0", prefix: "memory.", only: ["allocated", "reserved", "peak", "total"], scale: 1 / GIB, zero: true },
  ];

  function selectPlots(curves) {
    const plots = [];
    for (const plot of PLOTS) {
      let names = plot.names ?? {};
      if (plot.prefix) {
        const shortName = (name) => name.slice(plot.prefix.length);
        const found = Object.keys(curves).filter((name) => name.startsWith(plot.prefix) && (!plot.only || plot.only.includes(shortName(name))));
        names = Object.fromEntries(found.sort((a, b) => comparePhases(shortName(a), shortName(b))).map((name) => [name, shortName(name)]));
        if (plot.prefix === "phase." && Object.keys(names).length < 2) continue;
      }
      const curveNames = Object.keys(names).filter((name) => curves[name]);
      if (curveNames.length) plots.push({ ...plot, curveNames, labels: curveNames.map((name) => names[name]) });
    }
    for (const name of Object.keys(curves).filter((name) => name.startsWith("metric."))) {
      plots.push({ title: name.slice(7), unit: "", curveNames: [name], labels: [name.slice(7)] });
    }
    return plots;
  }

  function renderPlots() {
    board.render(selectPlots(page.curves), page.curves, page.markers);
  }

  // ---- other sections

  function renderHeader() {
    const { progress, state } = page;
    document.title = `${page.run}: ${state}`;
    $("run").textContent = page.run;
    $("state").textContent = state;
    $("state").className = `badge ${state}`;
    const fraction = progress.steps ? Math.min(1, progress.step / progress.steps) : state === "done" ? 1 : 0;
    $("bar").hidden = !progress.steps;
    $("bar").className = `bar ${state}`;
    $("bar").setAttribute("aria-valuenow", Math.round(fraction * 100));
    $("bar").firstElementChild.style.width = `${fraction * 100}%`;
    renderProgressLine();
  }

  function renderProgressLine() {
    const { progress, started, ended, state } = page, now = getServerTime();
    const facts = [];
    if (isFiniteNumber(progress.step)) facts.push(createElement("span", {}, "step ", createElement("b", {}, formatInteger(progress.step)), progress.steps ? ` of ${formatInteger(progress.steps)}` : ""));
    if (progress.steps && isFiniteNumber(progress.step)) facts.push(`${Math.floor(100 * progress.step / progress.steps)} %`);
    if (isFiniteNumber(progress.eta_seconds) && state === "training") facts.push(createElement("span", {}, createElement("b", {}, formatDuration(progress.eta_seconds - (now - progress.time))), " left"));
    if (isFiniteNumber(started)) facts.push(`${ended ? "took" : "for"} ${formatDuration((ended ?? now) - started)}`, `began ${formatDateTime(started)}`);
    if (page.outcome && state === "done") facts.push(page.outcome);
    $("progress-line").replaceChildren(...facts.flatMap((fact, i) => i ? [" · ", fact] : [fact]));
  }

  function renderDiagnosis() {
    const diagnosis = page.why, failed = page.state === "failed";
    const shown = Boolean(diagnosis) || failed;
    const element = $("why");
    element.hidden = !shown;
    if (!shown) return;
    element.className = failed ? "" : "past";
    $("why-title").textContent = failed ? `Why it died: ${diagnosis?.meaning || page.outcome}` : `The last failure, after which it resumed${diagnosis.meaning ? `: ${diagnosis.meaning}` : ""}`;
    if (!diagnosis) return renderSection("why", true, createElement("p", {}, page.hint));
    const rows = [["first", `${diagnosis.rank_label}${diagnosis.host ? ` on ${diagnosis.host}` : ""}, at ${formatDateTime(diagnosis.time)}${diagnosis.world ? `, in world ${diagnosis.world}` : ""}`],
      ["at", diagnosis.progress], ["exit", diagnosis.exit_status], ["fix", diagnosis.fix || page.hint], ["now", diagnosis.quarantine],
      ...diagnosis.peers.map((other) => [other.node, `${other.state}${[other.last, other.failure].filter(Boolean).map((text) => `; ${text}`).join("")}`])];
    const facts = createElement("dl", {}, ...rows.filter(([, text]) => text).flatMap(([name, text]) => [createElement("dt", {}, name), createElement("dd", { class: name === "fix" ? "fix" : null }, text)]));
    const texts = [diagnosis.traceback, diagnosis.lines.join("\n")].filter(Boolean).map((text) => createElement("pre", { tabindex: 0 }, text));
    const more = failed && !texts.length ? "" : createElement("details", { open: element.querySelector("details")?.open },
      createElement("summary", {}, failed ? "Traceback and last lines" : "Who, how, what the others did"), failed ? "" : facts, ...texts);
    renderSection("why", true, createElement("p", { class: "error" }, diagnosis.error), failed ? facts : "", more);
  }

  function renderTiles() {
    const { progress, validation, world, checkpoints } = page, now = getServerTime();
    const last = checkpoints[checkpoints.length - 1];
    const tiles = [
      ["Loss", isFiniteNumber(progress.loss) && progress.loss.toFixed(4), "", ""],
      ["Validation loss", isFiniteNumber(validation.loss) && validation.loss.toFixed(4), "", isFiniteNumber(validation.step) ? `at step ${formatInteger(validation.step)}` : ""],
      ["Throughput", isFiniteNumber(progress.tokens_per_second) && formatCompact(progress.tokens_per_second), "", ["tokens/s", isFiniteNumber(progress.tflops) && `${formatCompact(progress.tflops)} TFLOP/s`].filter(Boolean).join(", ")],
      ["MFU", isFiniteNumber(progress.mfu) && (100 * progress.mfu).toFixed(1), "%", ""],
      ["Learning rate", isFiniteNumber(progress.learning_rate) && formatSignificant(progress.learning_rate), "", ""],
      ["Gradient norm", isFiniteNumber(progress.gradient_norm) && formatSignificant(progress.gradient_norm), "", ""],
      ["World", isFiniteNumber(world.world_size) && formatCount(world.world_size, "rank"), "", `${formatCount(world.nodes, "node")}${page.worlds > 1 ? `, world ${page.worlds}` : ""}`],
      ["Saved step", last && formatInteger(last.step), "", last && (page.ended ? `at ${formatTime(last.time)}` : `${formatDuration(now - last.time)} ago`)],
    ].filter(([, value]) => value);
    renderSection("numbers", tiles.length > 0, ...tiles.map(([name, value, unit, more]) => createElement("div", { class: "tile" },
      createElement("div", { class: "name" }, name), createElement("div", { class: "value" }, value, unit ? createElement("span", { class: "unit" }, unit) : ""), createElement("div", { class: "more" }, more || "\u00a0"))));
  }

  function renderStepPhases() {
    const phases = Object.entries(page.progress.phases ?? {}).filter(([, seconds]) => isFiniteNumber(seconds) && seconds > 0).sort(([a], [b]) => comparePhases(a, b));
    const all = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
    const bar = createElement("div", { class: "stack", role: "img", "aria-label": phases.map(([name, seconds]) => `${name} ${formatShortDuration(seconds)}`).join(", ") });
    phases.forEach(([name, seconds], i) => {
      const segment = createColored(i, "div", { title: `${name}: ${formatShortDuration(seconds)}` });
      segment.style.flex = `${seconds / all}`;
      bar.append(segment);
    });
    renderSection("step", phases.length > 0, bar, createElement("div", { class: "phases" },
      createElement("span", {}, createElement("b", {}, formatShortDuration(all)), " a step"),
      ...phases.map(([name, seconds], i) => createElement("span", { class: "key" }, createSwatch(i), name, createElement("b", {}, formatShortDuration(seconds)), `${(100 * seconds / all).toFixed(0)} %`))));
  }

  function createMeter(name, part, text, high = 0.92) {
    const fill = createElement("div");
    fill.style.width = `${Math.min(100, 100 * part)}%`;
    return createElement("div", { class: "meter" }, createElement("span", { class: "quiet" }, name), createElement("div", { class: `track${part > high ? " high" : ""}` }, fill), createElement("span", {}, text));
  }

  function renderNodes() {
    const slow = page.straggler.rank, now = getServerTime();
    renderSection("nodes", page.nodes.length > 0, ...page.nodes.map((node) => {
      const meters = [];
      if (isFiniteNumber(node.cpu)) meters.push(createMeter("CPU", node.cpu / node.cpus, `${node.cpu.toFixed(1)} of ${formatSignificant(node.cpus)}`, 1));
      if (isFiniteNumber(node.memory)) meters.push(createMeter("memory", node.memory / node.memory_limit, `${formatGibibytes(node.memory)} of ${formatGibibytes(node.memory_limit)} GiB`));
      node.gpus.forEach((gpu, i) => {
        const more = [isFiniteNumber(gpu.temperature) ? `${Math.round(gpu.temperature)} °C` : "", isFiniteNumber(gpu.power) ? `${Math.round(gpu.power)} W` : ""].filter(Boolean).join(", ");
        meters.push(createMeter(`GPU ${i}`, gpu.utilization / 100, `${Math.round(gpu.utilization)} %${more ? `, ${more}` : ""}`, 1));
        if (isFiniteNumber(gpu.memory)) meters.push(createMeter("", gpu.memory / gpu.memory_total, `${formatGibibytes(gpu.memory)} of ${formatGibibytes(gpu.memory_total)} GiB`));
      });
      const warnings = [...node.warnings, ...(node.restarts ? [`${formatCount(node.restarts.count, "restart")}; the last ${page.ended ? `at ${formatTime(node.restarts.time)}` : `${formatDuration(now - node.restarts.time)} ago`}: ${node.restarts.reason}`] : [])];
      return createElement("article", { class: `card ${node.health}`, "aria-label": node.node },
        createElement("h3", {}, node.node, createElement("span", { class: `badge ${node.health}` }, node.state)),
        createElement("p", { class: "where" }, [node.host, node.address && `${node.address}${node.interface ? ` by ${node.interface}` : ""}`, ...node.reserved].filter(Boolean).join(" · ")),
        node.ranks.length ? createElement("div", { class: "chips" }, ...node.ranks.map((rank) => createElement("span", { class: `chip${rank === slow ? " slow" : ""}`, title: rank === slow ? page.straggler.message : null }, `rank ${rank}`))) : "",
        ...meters, warnings.length ? createElement("ul", { class: "warnings" }, ...warnings.map((text) => createElement("li", {}, text))) : "");
    }));
  }

  function renderLinks() {
    const names = [...new Set(page.links.flatMap((link) => [link.a, link.b]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const rates = new Map(), fastest = Math.max(1, ...page.links.flatMap((link) => [link.forward_bandwidth, link.backward_bandwidth]));
    for (const link of page.links) {
      rates.set(`${link.a} ${link.b}`, [link.forward_bandwidth, link]);
      rates.set(`${link.b} ${link.a}`, [link.backward_bandwidth, link]);
    }
    const cell = (a, b) => {
      if (a === b) return createElement("td", { class: "quiet" }, "–");
      const [speed, link] = rates.get(`${a} ${b}`) ?? [];
      if (!link) return createElement("td", { class: "quiet" }, "?");
      if (link.error) return createElement("td", { class: "l0", title: link.error }, "no way", createElement("small", {}, link.error.slice(0, 40)));
      const level = speed > fastest / 3 ? 3 : speed > fastest / 10 ? 1 : 0;
      return createElement("td", { class: `l${level}` }, formatBandwidth(speed), createElement("small", {}, formatShortDuration(link.round_trip), link.largest_packet ? `, ${link.largest_packet} B` : ""));
    };
    const last = Math.max(0, ...page.links.map((link) => link.time));
    renderSection("links", names.length > 1,
      createElement("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "links between nodes" }, createElement("table", { class: "matrix" },
        createElement("thead", {}, createElement("tr", {}, createElement("th", { scope: "col" }, "from \\ to"), ...names.map((name) => createElement("th", { scope: "col" }, name)))),
        createElement("tbody", {}, ...names.map((a) => createElement("tr", {}, createElement("th", { scope: "row" }, a), ...names.map((b) => cell(a, b))))))),
      createElement("p", { class: "quiet" }, `One TCP stream, the round trip, and the largest packet that arrives; as swarmtrain doctor measured it, ${formatDateTime(last)}.`));
  }

  function renderCheckpoints() {
    const rows = [...page.checkpoints].reverse().map((saved) => createElement("tr", {}, createElement("td", { class: "number" }, formatInteger(saved.step)), createElement("td", {}, createTimeElement(saved.time)),
      createElement("td", { class: "number" }, isFiniteNumber(saved.seconds) ? formatShortDuration(saved.seconds) : ""), createElement("td", { class: "path" }, saved.path)));
    renderSection("checkpoints", rows.length > 0,
      createElement("div", { class: "tall scroll", tabindex: 0, role: "region", "aria-label": "checkpoints" }, createElement("table", {}, createElement("thead", {}, createElement("tr", {}, createElement("th", { class: "number", scope: "col" }, "step"), createElement("th", { scope: "col" }, "saved at"), createElement("th", { class: "number", scope: "col" }, "took"), createElement("th", { scope: "col" }, "path"))), createElement("tbody", {}, ...rows))),
      page.checkpoint_count > rows.length ? createElement("p", { class: "quiet" }, `the newest ${rows.length} of ${page.checkpoint_count}`) : "");
  }

  function renderHistory() {
    const rows = [...page.history].reverse().map((entry) => createElement("tr", { class: entry.kind === "outcome" ? `outcome-${page.state}` : entry.kind }, createElement("td", {}, createTimeElement(entry.time)), createElement("td", {}, entry.text)));
    renderSection("history", rows.length > 0, createElement("div", { class: "tall", tabindex: 0, role: "region", "aria-label": "history" }, createElement("table", {}, createElement("tbody", {}, ...rows))));
  }

  function renderNodeFacts() {
    const all = new Set(page.node_facts.flatMap((fact) => fact.values.flatMap((each) => each.nodes)));
    renderSection("facts", page.node_facts.length > 0, createElement("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "what runs" }, createElement("table", {}, createElement("tbody", {}, ...page.node_facts.map((fact) => createElement("tr", {},
      createElement("th", { scope: "row" }, fact.name), createElement("td", {}, ...fact.values.map((each) => createElement("div", {}, each.value, each.nodes.length < all.size ? createElement("span", { class: "quiet" }, ` ${each.nodes.join(", ")}`) : "")))))))));
  }

  function renderNavigation() {
    const shown = [...document.querySelectorAll("main section")].filter((each) => !each.hidden && each.querySelector("h2"));
    const titles = { why: "Why", plots: "Curves", step: "Step time", nodes: "Nodes", links: "Links", checkpoints: "Checkpoints", history: "History", log: "Output", facts: "What runs" };
    const as = shown.map((each) => each.id).join();
    const nav = document.querySelector("nav");
    if (nav.dataset.of === as) return;
    nav.dataset.of = as;
    nav.replaceChildren(...shown.map((each) => createElement("a", { href: `#${each.id}` }, titles[each.id])));
  }

  // ---- output of the ranks

  let lines = [];
  const readLogFilter = () => ({ node: $("log-node").value, rank: $("log-rank").value, ...parseLogPattern($("log-text").value.trim()) });
  function parseLogPattern(text) {
    const regex = /^\/(.+)\/$/.exec(text);
    let matches = (line) => line.includes(text), wrong = false;
    if (regex) {
      try {
        const made = new RegExp(regex[1], "i");
        matches = (line) => made.test(line);
      } catch {
        wrong = true;
      }
    } else if (text) {
      const small = text.toLowerCase();
      matches = (line) => line.toLowerCase().includes(small);
    }
    $("log-text").setAttribute("aria-invalid", String(wrong));
    return { matches };
  }

  function appendLines(more) {
    if (!more.length) return;
    lines = lines.concat(more).slice(-MAX_LINES);
    $("log").hidden = false;
    updateSelect("log-node", [...new Set(lines.map((line) => line.node))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })), (node) => node);
    updateSelect("log-rank", [...new Set(lines.map((line) => line.rank).filter(isFiniteNumber))].sort((a, b) => a - b).map(String), (rank) => `rank ${rank}`);
    renderLines();
    renderNavigation();
  }

  function updateSelect(id, values, name) {
    const place = $(id), chosen = place.value;
    if (place.options.length - 1 === values.length) return;
    place.replaceChildren(place.options[0], ...values.map((value) => createElement("option", { value }, name(value))));
    place.value = chosen;
  }

  const ERROR_PATTERN = /\b(error|exception|traceback|fatal|killed|failed)\b/i;
  function renderLines() {
    const place = $("log-lines"), { node, rank, matches } = readLogFilter();
    const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    const found = lines.filter((line) => (!node || line.node === node) && (!rank || String(line.rank) === rank) && matches(line.text));
    const shown = found.slice(-MAX_SHOWN_LINES);
    $("log-count").textContent = found.length === lines.length ? formatCount(lines.length, "line") : `${formatInteger(found.length)} of ${formatCount(lines.length, "line")}`;
    const made = document.createDocumentFragment();
    for (const line of shown) {
      const number = Number(line.node.replace(/\D/g, "")) || 0;
      made.append(createElement("div", { class: ERROR_PATTERN.test(line.text) ? "bad" : null, title: line.time ? formatDateTime(line.time) : null },
        createElement("span", { class: `who n${number % 6}` }, isFiniteNumber(line.rank) ? `${line.node} rank ${line.rank}` : line.node), line.text));
    }
    place.replaceChildren(made);
    if (atEnd) place.scrollTop = place.scrollHeight;
  }

  // ---- data source and polling

  const report = $("data").textContent.trim();
  let last = 0;
  const poller = createPoller("api/page", { render: renderPage, more: pollOutput, renderFreshness });
  const getServerTime = () => report ? page.ended ?? page.written : poller.getServerTime();

  function renderPage(data) {
    page = data;
    renderHeader(); renderDiagnosis(); renderTiles(); renderPlots(); renderStepPhases(); renderNodes(); renderLinks(); renderCheckpoints(); renderHistory(); renderNodeFacts(); renderNavigation();
  }

  function renderFreshness() {
    if (!page) return showFreshness(poller.error, "no answer yet");
    showFreshness(describeOutage(poller, page, "the run"), page.state === "down" ? "what was kept of it" : page.ended ? "it has ended" : `live, ${formatCount(Math.round((Date.now() - poller.answeredAt) / 1000), "second")} ago`);
    if (!page.ended) renderProgressLine();
  }

  async function pollOutput() {
    const output = await (await fetch(`api/lines?after=${last}`, { signal: AbortSignal.timeout(5 * POLL_MS) })).json();
    if (output.last < last) { lines = []; }
    last = output.last;
    appendLines(output.lines);
  }

  let board = null;
  onReady(() => {
    board = createPlotBoard({ describeX: (step) => `step ${formatInteger(step)}`, getXName: () => "steps" });
    for (const id of ["log-node", "log-rank"]) $(id).addEventListener("change", renderLines);
    $("log-text").addEventListener("input", renderLines);
    $("all-runs").hidden = !/\/runs\/[^/]+\/$/.test(location.pathname);
    if (!report) return void poller.start();
    const payload = JSON.parse(report);
    renderPage(payload.page);
    appendLines(payload.lines);
    showFreshness("", `written ${formatDateTime(payload.page.written)}`);
    $("foot").textContent = "Written by swarmtrain report: one file, which asks for nothing else.";
  });
})();
