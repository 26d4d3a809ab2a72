// Draws the page from one value, see data.py: the one that lies in the file of a report, else what /api/page says, again and again.
// Texts of a run reach the document as text alone, never as HTML.
"use strict";

(() => {
  const EVERY = 2000, LINES = 4000, SHOWN = 1500, HEIGHT = 190, COLORS = 9;
  const GIB = 2 ** 30;
  const $ = (id) => document.getElementById(id);

  function el(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined && child !== "").map((child) => child instanceof Node ? child : String(child)));
    return made;
  }

  // ---- numbers and times as people write them

  const known = (value) => typeof value === "number" && Number.isFinite(value);
  const whole = (value) => Math.round(value).toLocaleString("en-US");
  function compact(value) {
    const size = Math.abs(value);
    for (const [unit, word] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit * 10) return `${trim(value / unit)}${word}`;
    return size >= 1000 ? whole(value) : trim(value);
  }
  function trim(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
  }
  function duration(seconds) {
    const s = Math.max(0, Math.round(seconds)), two = (n) => String(n).padStart(2, "0");
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
    if (s < 172800) return `${Math.floor(s / 3600)} h ${two(Math.floor(s % 3600 / 60))} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
  }
  const short = (seconds) => seconds >= 1 ? `${trim(seconds)} s` : seconds >= 1e-3 ? `${trim(seconds * 1e3)} ms` : `${trim(seconds * 1e6)} µs`;
  const rate = (bytes) => bytes * 8 >= 1e9 ? `${(bytes * 8 / 1e9).toFixed(1)} Gbit/s` : `${Math.round(bytes * 8 / 1e6)} Mbit/s`;
  const gib = (bytes) => `${(bytes / GIB).toFixed(1)}`;
  const pad = (n) => String(n).padStart(2, "0");
  function clock(seconds) {
    const t = new Date(seconds * 1000);
    return `${pad(t.getHours())}:${pad(t.getMinutes())}:${pad(t.getSeconds())}`;
  }
  function date(seconds) {
    const t = new Date(seconds * 1000);
    return `${t.getFullYear()}-${pad(t.getMonth() + 1)}-${pad(t.getDate())} ${clock(seconds)}`;
  }
  const moment = (seconds) => el("time", { datetime: new Date(seconds * 1000).toISOString(), title: date(seconds) }, clock(seconds));
  const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
  const swatch = (n) => el("i", { class: `swatch s${n}`, "aria-hidden": "true" });

  // ---- plots

  // The phases of a step in the order in which they happen; each has the same color in the curves and in the bar.
  const PARTS = ["data", "forward", "backward", "communication", "optimizer", "evaluation", "checkpoint", "logging", "other"];
  const byPart = (a, b) => (PARTS.indexOf(a) + 1 || PARTS.length) - (PARTS.indexOf(b) + 1 || PARTS.length);
  const PLOTS = [
    { title: "Loss", unit: "nats per token", names: { loss: "training", held_out: "held out", loss_max: "worst rank" }, log: true },
    { title: "Throughput", unit: "tokens/s", names: { tokens_per_second: "all ranks" }, zero: true },
    { title: "MFU", unit: "% of the devices' peak", names: { mfu: "MFU" }, scale: 100, zero: true },
    { title: "Learning rate", unit: "", names: { learning_rate: "learning rate" }, zero: true },
    { title: "Gradient norm", unit: "before clipping", names: { gradient_norm: "gradient norm" }, zero: true },
    { title: "Step time", unit: "s", prefix: "part.", write: short, zero: true },
    { title: "Device memory", unit: "GiB, rank 0", prefix: "memory.", only: ["allocated", "reserved", "peak", "total"], scale: 1 / GIB, zero: true },
  ];
  let drawn = [], page = null, drawnAs = "", zoom = null;

  function layout(curves) {
    const plots = [];
    for (const plot of PLOTS) {
      let names = plot.names ?? {};
      if (plot.prefix) {
        const of = (name) => name.slice(plot.prefix.length);
        const found = Object.keys(curves).filter((name) => name.startsWith(plot.prefix) && (!plot.only || plot.only.includes(of(name))));
        names = Object.fromEntries(found.sort((a, b) => byPart(of(a), of(b))).map((name) => [name, of(name)]));
        if (plot.prefix === "part." && Object.keys(names).length < 2) continue;
      }
      const present = Object.keys(names).filter((name) => curves[name]);
      if (present.length) plots.push({ ...plot, present, labels: present.map((name) => names[name]) });
    }
    for (const name of Object.keys(curves).filter((name) => name.startsWith("metric."))) {
      plots.push({ title: name.slice(7), unit: "", present: [name], labels: [name.slice(7)] });
    }
    return plots;
  }

  function joined(plot, curves) {
    const scale = plot.scale ?? 1, log = plot.log && $("log-loss").checked;
    const tables = plot.present.map((name) => [curves[name].steps, curves[name].values.map((value) => value === null || (log && value <= 0) ? null : value * scale)]);
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function build(plot, curves, holder) {
    const keys = plot.labels.map((label, i) => el("span", { class: "key" }, swatch(i % COLORS + 1), plot.labels.length > 1 ? label : "", el("b")));
    const heading = el("h3", {}, plot.title, plot.unit ? el("small", {}, plot.unit) : "", ...keys);
    const place = el("div", { role: "img" });
    holder.append(el("div", { class: "plot" }, heading, place));
    const axis = { stroke: colour("--quiet"), font: `11px ${colour("--sans")}`, grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
    const log = plot.log && $("log-loss").checked;
    const data = joined(plot, curves);
    const sparse = (name) => curves[name].steps.length < 60;
    const chart = new uPlot({
      width: Math.max(260, place.clientWidth), height: HEIGHT, padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "run", setSeries: false }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: {
        x: { time: false },
        y: log ? { distr: 3 } : plot.zero ? { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.15 : 1] } : {},
      },
      axes: [
        { ...axis, size: 28, values: (_, ticks) => ticks.map((v) => Number.isInteger(v) ? compact(v) : "") },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => v === null ? "" : compact(v)) },
      ],
      series: [{}, ...plot.present.map((name, i) => ({
        stroke: colour(`--c${i % COLORS + 1}`), width: 1.5, spanGaps: true,
        points: { show: sparse(name) && name === "held_out", size: 5 },
      }))],
      hooks: {
        setCursor: [(u) => tell(u)],
        draw: [(u) => mark(u)],
        setScale: [(u, key) => { if (key === "x") follow(u); }],
      },
    }, data, place);
    const made = { plot, chart, place, keys, marks: [] };
    chart.made = made;
    drawn.push(made);
    mark(chart);
    tell(chart);
  }

  // The values under the cursor, else the newest ones, stand beside the title.
  function tell(chart) {
    const made = chart.made;
    if (!made) return;
    const { plot, keys } = made;
    const at = chart.cursor.idx;
    $("plots-title").textContent = known(at) ? `Curves, at step ${whole(chart.data[0][at])}` : "Curves";
    plot.present.forEach((_, i) => {
      const values = chart.data[i + 1];
      let index = at ?? values.length - 1;
      while (index > 0 && (values[index] === null || values[index] === undefined)) index--;
      const value = values[index];
      keys[i].lastChild.textContent = known(value) ? (plot.write ?? compact)(value) : "–";
    });
    made.place.setAttribute("aria-label", `${plot.title} over steps: ${plot.labels.map((label, i) => `${label} ${keys[i].lastChild.textContent}`).join(", ")}`);
  }

  function mark(chart) {
    const made = chart.made;
    if (!made) return;
    for (const line of made.marks) line.remove();
    made.marks = [];
    const { min, max } = chart.scales.x, width = chart.over.clientWidth;
    // Labels stand in two rows: where markers are close to each other, in the lower one.
    const free = [-1, -1];
    for (const each of page.markers) {
      if (min === undefined || min === null || each.step < min || each.step > max) continue;
      const x = chart.valToPos(each.step, "x");
      const line = el("div", { class: `mark ${each.kind}`, title: each.text });
      const room = 6 * each.label.length + 8, left = x + room > width;
      const row = free.findIndex((end) => x >= end && (!left || x - room >= end));
      if (row >= 0) {
        line.append(el("span", { class: `row${row}` }, each.label));
        if (left) line.classList.add("left");
        free[row] = x + (left ? 4 : room);
      }
      line.style.left = `${x}px`;
      chart.over.append(line);
      made.marks.push(line);
    }
  }

  // What is zoomed into in one plot is in all. uPlot tells of a new scale later, and of those that were set here, too.
  function follow(chart) {
    if (!chart.made) return;
    const { min, max } = chart.scales.x, { min: first, max: last } = span(chart);
    if (zoom && min === zoom.min && max === zoom.max) return;
    const all = min <= first && max >= last;
    if (all && !zoom) return;
    zoom = all ? null : { min, max };
    $("whole").hidden = all;
    for (const other of drawn) if (other.chart !== chart) other.chart.setScale("x", zoom ?? span(other.chart));
  }
  // A scale has a width, though a curve may have one point.
  function span(chart) {
    const steps = chart.data[0], first = steps[0], last = steps[steps.length - 1];
    return first < last ? { min: first, max: last } : { min: first, max: first + 1 };
  }

  function plots(anew) {
    const wanted = layout(page.curves);
    const as = JSON.stringify(wanted.map((plot) => plot.present));
    $("plots").hidden = !wanted.length;
    const holder = $("plots").querySelector(".body");
    if (anew || as !== drawnAs) {
      for (const { chart } of drawn) chart.destroy();
      drawn = [];
      holder.replaceChildren();
      wanted.forEach((plot) => build(plot, page.curves, holder));
      drawnAs = as;
    } else {
      drawn.forEach((made, i) => {
        made.plot = wanted[i];
        made.chart.setData(joined(wanted[i], page.curves), !zoom);
        if (zoom) made.chart.setScale("x", zoom);
        tell(made.chart);
      });
    }
    $("markers").replaceChildren(...page.markers.map((each) => el("li", { class: each.kind },
      el("span", { class: "quiet" }, `step ${whole(each.step)}`), el("span", { class: "label" }, each.label), el("span", { class: "text" }, moment(each.time), ` ${each.text}`))));
  }

  // ---- everything else

  function section(id, shown, ...children) {
    const place = $(id);
    place.hidden = !shown;
    if (shown) place.querySelector(".body").replaceChildren(...children);
  }

  function head() {
    const { progress, state } = page;
    document.title = `${page.run}: ${state}`;
    $("run").textContent = page.run;
    $("state").textContent = state;
    $("state").className = `badge ${state}`;
    const part = progress.steps ? Math.min(1, progress.step / progress.steps) : state === "done" ? 1 : 0;
    $("bar").hidden = !progress.steps;
    $("bar").className = `bar ${state}`;
    $("bar").setAttribute("aria-valuenow", Math.round(part * 100));
    $("bar").firstElementChild.style.width = `${part * 100}%`;
    lineOfNow();
  }

  function lineOfNow() {
    const { progress, started, ended, state } = page, now = clockNow();
    const facts = [];
    if (known(progress.step)) facts.push(el("span", {}, "step ", el("b", {}, whole(progress.step)), progress.steps ? ` of ${whole(progress.steps)}` : ""));
    if (progress.steps && known(progress.step)) facts.push(`${Math.floor(100 * progress.step / progress.steps)} %`);
    if (known(progress.eta_seconds) && state === "training") facts.push(el("span", {}, el("b", {}, duration(progress.eta_seconds - (now - progress.time))), " left"));
    if (known(started)) facts.push(`${ended ? "took" : "for"} ${duration((ended ?? now) - started)}`, `began ${date(started)}`);
    if (page.verdict && state === "done") facts.push(page.verdict);
    $("line").replaceChildren(...facts.flatMap((fact, i) => i ? [" · ", fact] : [fact]));
  }

  function why() {
    const died = page.why, failed = page.state === "failed";
    const shown = Boolean(died) || failed;
    const place = $("why");
    place.hidden = !shown;
    if (!shown) return;
    place.className = failed ? "" : "past";
    $("why-title").textContent = failed ? `Why it died: ${died?.means || page.verdict}` : `The last failure, after which it went on${died.means ? `: ${died.means}` : ""}`;
    if (!died) return section("why", true, el("p", {}, page.hint));
    const rows = [["first", `${died.who}${died.host ? ` on ${died.host}` : ""}, at ${date(died.time)}${died.world ? `, in world ${died.world}` : ""}`],
      ["at", died.progress], ["exit", died.exit], ["fix", died.fix || page.hint], ["now", died.left_out],
      ...died.others.map((other) => [other.node, `${other.state}${[other.last, other.failure].filter(Boolean).map((text) => `; ${text}`).join("")}`])];
    const facts = el("dl", {}, ...rows.filter(([, text]) => text).flatMap(([name, text]) => [el("dt", {}, name), el("dd", { class: name === "fix" ? "fix" : null }, text)]));
    const texts = [died.traceback, died.lines.join("\n")].filter(Boolean).map((text) => el("pre", { tabindex: 0 }, text));
    const more = failed && !texts.length ? "" : el("details", { open: place.querySelector("details")?.open },
      el("summary", {}, failed ? "Traceback and last lines" : "Who, how, what the others did"), failed ? "" : facts, ...texts);
    section("why", true, el("p", { class: "error" }, died.error), failed ? facts : "", more);
  }

  function tiles() {
    const { progress, evaluation, world, checkpoints } = page, now = clockNow();
    const last = checkpoints[checkpoints.length - 1];
    const made = [
      ["Loss", known(progress.loss) && progress.loss.toFixed(4), "", ""],
      ["Held-out loss", known(evaluation.loss) && evaluation.loss.toFixed(4), "", known(evaluation.step) ? `at step ${whole(evaluation.step)}` : ""],
      ["Throughput", known(progress.tokens_per_second) && compact(progress.tokens_per_second), "", ["tokens/s", known(progress.tflops) && `${compact(progress.tflops)} TFLOP/s`].filter(Boolean).join(", ")],
      ["MFU", known(progress.mfu) && (100 * progress.mfu).toFixed(1), "%", ""],
      ["Learning rate", known(progress.learning_rate) && trim(progress.learning_rate), "", ""],
      ["Gradient norm", known(progress.gradient_norm) && trim(progress.gradient_norm), "", ""],
      ["World", known(world.world_size) && counted(world.world_size, "rank"), "", `${counted(world.nodes, "node")}${page.worlds > 1 ? `, world ${page.worlds}` : ""}`],
      ["Saved step", last && whole(last.step), "", last && (page.ended ? `at ${clock(last.time)}` : `${duration(now - last.time)} ago`)],
    ].filter(([, value]) => value);
    section("numbers", made.length > 0, ...made.map(([name, value, unit, more]) => el("div", { class: "tile" },
      el("div", { class: "name" }, name), el("div", { class: "value" }, value, unit ? el("span", { class: "unit" }, unit) : ""), el("div", { class: "more" }, more || "\u00a0"))));
  }

  function parts() {
    const found = Object.entries(page.progress.parts ?? {}).filter(([, seconds]) => known(seconds) && seconds > 0).sort(([a], [b]) => byPart(a, b));
    const all = found.reduce((sum, [, seconds]) => sum + seconds, 0);
    const bar = el("div", { class: "stack", role: "img", "aria-label": found.map(([name, seconds]) => `${name} ${short(seconds)}`).join(", ") });
    found.forEach(([name, seconds], i) => {
      const part = el("div", { class: `s${i % COLORS + 1}`, title: `${name}: ${short(seconds)}` });
      part.style.flex = `${seconds / all}`;
      bar.append(part);
    });
    section("step", found.length > 0, bar, el("div", { class: "parts" },
      el("span", {}, el("b", {}, short(all)), " a step"),
      ...found.map(([name, seconds], i) => el("span", { class: "key" }, swatch(i % COLORS + 1), name, el("b", {}, short(seconds)), `${(100 * seconds / all).toFixed(0)} %`))));
  }

  function meter(name, part, text, high = 0.92) {
    const fill = el("div");
    fill.style.width = `${Math.min(100, 100 * part)}%`;
    return el("div", { class: "meter" }, el("span", { class: "quiet" }, name), el("div", { class: `track${part > high ? " high" : ""}` }, fill), el("span", {}, text));
  }

  function nodes() {
    const slow = page.straggler.rank, now = clockNow();
    section("nodes", page.nodes.length > 0, ...page.nodes.map((node) => {
      const meters = [];
      if (known(node.cpu)) meters.push(meter("CPU", node.cpu / node.cpus, `${node.cpu.toFixed(1)} of ${trim(node.cpus)}`, 1));
      if (known(node.memory)) meters.push(meter("memory", node.memory / node.memory_limit, `${gib(node.memory)} of ${gib(node.memory_limit)} GiB`));
      node.gpus.forEach((gpu, i) => {
        const more = [known(gpu.temperature) ? `${Math.round(gpu.temperature)} °C` : "", known(gpu.power) ? `${Math.round(gpu.power)} W` : ""].filter(Boolean).join(", ");
        meters.push(meter(`GPU ${i}`, gpu.use / 100, `${Math.round(gpu.use)} %${more ? `, ${more}` : ""}`, 1));
        if (known(gpu.memory)) meters.push(meter("", gpu.memory / gpu.memory_total, `${gib(gpu.memory)} of ${gib(gpu.memory_total)} GiB`));
      });
      const cares = [...node.cares, ...(node.restarts ? [`${counted(node.restarts.count, "restart")}; the last ${page.ended ? `at ${clock(node.restarts.time)}` : `${duration(now - node.restarts.time)} ago`}: ${node.restarts.why}`] : [])];
      return el("article", { class: `card ${node.health}`, "aria-label": node.node },
        el("h3", {}, node.node, el("span", { class: `badge ${node.health}` }, node.state)),
        el("p", { class: "where" }, [node.host, node.address && `${node.address}${node.interface ? ` by ${node.interface}` : ""}`, ...node.reserved].filter(Boolean).join(" · ")),
        node.ranks.length ? el("div", { class: "chips" }, ...node.ranks.map((rank) => el("span", { class: `chip${rank === slow ? " slow" : ""}`, title: rank === slow ? page.straggler.message : null }, `rank ${rank}`))) : "",
        ...meters, cares.length ? el("ul", { class: "cares" }, ...cares.map((text) => el("li", {}, text))) : "");
    }));
  }

  function links() {
    const names = [...new Set(page.links.flatMap((link) => [link.a, link.b]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const rates = new Map(), fastest = Math.max(1, ...page.links.flatMap((link) => [link.there, link.back]));
    for (const link of page.links) {
      rates.set(`${link.a} ${link.b}`, [link.there, link]);
      rates.set(`${link.b} ${link.a}`, [link.back, link]);
    }
    const cell = (a, b) => {
      if (a === b) return el("td", { class: "quiet" }, "–");
      const [speed, link] = rates.get(`${a} ${b}`) ?? [];
      if (!link) return el("td", { class: "quiet" }, "?");
      if (link.error) return el("td", { class: "l0", title: link.error }, "no way", el("small", {}, link.error.slice(0, 40)));
      const level = speed > fastest / 3 ? 3 : speed > fastest / 10 ? 1 : 0;
      return el("td", { class: `l${level}` }, rate(speed), el("small", {}, short(link.round_trip), link.packet ? `, ${link.packet} B` : ""));
    };
    const last = Math.max(0, ...page.links.map((link) => link.time));
    section("links", names.length > 1,
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "links between nodes" }, el("table", { class: "matrix" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "from \\ to"), ...names.map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, ...names.map((a) => el("tr", {}, el("th", { scope: "row" }, a), ...names.map((b) => cell(a, b))))))),
      el("p", { class: "quiet" }, `One TCP stream, the round trip, and the largest packet that arrives; as swarmtrain doctor measured it, ${date(last)}.`));
  }

  function checkpoints() {
    const rows = [...page.checkpoints].reverse().map((saved) => el("tr", {}, el("td", { class: "number" }, whole(saved.step)), el("td", {}, moment(saved.time)),
      el("td", { class: "number" }, known(saved.seconds) ? short(saved.seconds) : ""), el("td", { class: "path" }, saved.path)));
    section("checkpoints", rows.length > 0,
      el("div", { class: "tall scroll", tabindex: 0, role: "region", "aria-label": "checkpoints" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "number", scope: "col" }, "step"), el("th", { scope: "col" }, "saved at"), el("th", { class: "number", scope: "col" }, "took"), el("th", { scope: "col" }, "path"))), el("tbody", {}, ...rows))),
      page.checkpoints_made > rows.length ? el("p", { class: "quiet" }, `the newest ${rows.length} of ${page.checkpoints_made}`) : "");
  }

  function story() {
    const rows = [...page.history].reverse().map((entry) => el("tr", { class: entry.kind === "verdict" ? `verdict-${page.state}` : entry.kind }, el("td", {}, moment(entry.time)), el("td", {}, entry.text)));
    section("history", rows.length > 0, el("div", { class: "tall", tabindex: 0, role: "region", "aria-label": "history" }, el("table", {}, el("tbody", {}, ...rows))));
  }

  function facts() {
    const all = new Set(page.facts.flatMap((fact) => fact.values.flatMap((each) => each.nodes)));
    section("facts", page.facts.length > 0, el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "what runs" }, el("table", {}, el("tbody", {}, ...page.facts.map((fact) => el("tr", {},
      el("th", { scope: "row" }, fact.name), el("td", {}, ...fact.values.map((each) => el("div", {}, each.value, each.nodes.length < all.size ? el("span", { class: "quiet" }, ` ${each.nodes.join(", ")}`) : "")))))))));
  }

  function contents() {
    const shown = [...document.querySelectorAll("main section")].filter((each) => !each.hidden && each.querySelector("h2"));
    const titles = { why: "Why", plots: "Curves", step: "Step time", nodes: "Nodes", links: "Links", checkpoints: "Checkpoints", history: "History", log: "Output", facts: "What runs" };
    const as = shown.map((each) => each.id).join();
    const nav = document.querySelector("nav");
    if (nav.dataset.of === as) return;
    nav.dataset.of = as;
    nav.replaceChildren(...shown.map((each) => el("a", { href: `#${each.id}` }, titles[each.id])));
  }

  // ---- the output of ranks

  let lines = [];
  const choice = () => ({ node: $("log-node").value, rank: $("log-rank").value, ...pattern($("log-text").value.trim()) });
  function pattern(text) {
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

  function hear(more) {
    if (!more.length) return;
    lines = lines.concat(more).slice(-LINES);
    $("log").hidden = false;
    options("log-node", [...new Set(lines.map((line) => line.node))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })), (node) => node);
    options("log-rank", [...new Set(lines.map((line) => line.rank).filter(known))].sort((a, b) => a - b).map(String), (rank) => `rank ${rank}`);
    showLines();
    contents();
  }

  function options(id, values, name) {
    const place = $(id), chosen = place.value;
    if (place.options.length - 1 === values.length) return;
    place.replaceChildren(place.options[0], ...values.map((value) => el("option", { value }, name(value))));
    place.value = chosen;
  }

  const BAD = /\b(error|exception|traceback|fatal|killed|failed)\b/i;
  function showLines() {
    const place = $("log-lines"), { node, rank, matches } = choice();
    const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    const found = lines.filter((line) => (!node || line.node === node) && (!rank || String(line.rank) === rank) && matches(line.text));
    const shown = found.slice(-SHOWN);
    $("log-count").textContent = found.length === lines.length ? counted(lines.length, "line") : `${whole(found.length)} of ${counted(lines.length, "line")}`;
    const made = document.createDocumentFragment();
    for (const line of shown) {
      const number = Number(line.node.replace(/\D/g, "")) || 0;
      made.append(el("div", { class: BAD.test(line.text) ? "bad" : null, title: line.time ? date(line.time) : null },
        el("span", { class: `who n${number % 6}` }, known(line.rank) ? `${line.node} rank ${line.rank}` : line.node), line.text));
    }
    place.replaceChildren(made);
    if (atEnd) place.scrollTop = place.scrollHeight;
  }

  // ---- from whom, and when

  const report = $("data").textContent.trim();
  let version = "", last = 0, heard = 0, ahead = 0, away = 0, silent = 0;
  const clockNow = () => report ? page.ended ?? page.written : Date.now() / 1000 - ahead;

  function show(data) {
    page = data;
    head(); why(); tiles(); plots(false); parts(); nodes(); links(); checkpoints(); story(); facts(); contents();
  }

  function freshness() {
    const place = $("fresh");
    const lost = away ? `the dashboard does not answer since ${duration((Date.now() - away) / 1000)}; asked again every 2 s` : page?.lost ? `the run cannot be asked: ${page.lost}` : silent > 15 ? `the run has not answered for ${duration(silent)}` : "";
    place.className = `fresh${lost ? " lost" : ""}`;
    place.textContent = lost || (page.state === "down" ? "what was kept of it" : page.ended ? "it has ended" : `live, ${counted(Math.round((Date.now() - heard) / 1000), "second")} ago`);
    if (page && !page.ended) { lineOfNow(); }
  }

  async function ask() {
    try {
      const answer = await fetch(`api/page?have=${version}`, { signal: AbortSignal.timeout(5 * EVERY) });
      silent = Number(answer.headers.get("swarmtrain-age")) || 0;
      if (answer.status === 200) {
        const told = await answer.json();
        version = told.version;
        const sent = Date.parse(answer.headers.get("date"));
        if (sent) ahead = Math.round((Date.now() - sent) / 1000);
        show(told.page);
      } else if (answer.status !== 204) {
        throw new Error((await answer.text()).slice(0, 200));
      }
      const output = await (await fetch(`api/lines?after=${last}`, { signal: AbortSignal.timeout(5 * EVERY) })).json();
      if (output.last < last) { lines = []; }
      last = output.last;
      hear(output.lines);
      away = 0;
      heard = Date.now();
    } catch {
      away ||= Date.now();
    }
    if (page) freshness(); else $("fresh").textContent = "no answer yet";
    setTimeout(ask, EVERY);
  }

  function start() {
    $("log-loss").addEventListener("change", () => plots(true));
    $("whole").addEventListener("click", () => { for (const { chart } of drawn.slice(0, 1)) chart.setScale("x", span(chart)); });
    for (const id of ["log-node", "log-rank"]) $(id).addEventListener("change", showLines);
    $("log-text").addEventListener("input", showLines);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots(true));
    new ResizeObserver(() => {
      for (const { chart, place } of drawn) if (place.clientWidth && place.clientWidth !== chart.width) chart.setSize({ width: place.clientWidth, height: HEIGHT });
    }).observe($("plots"));
    if (!report) return void ask();
    const told = JSON.parse(report);
    show(told.page);
    hear(told.lines);
    $("fresh").textContent = `written ${date(told.page.written)}`;
    $("foot").textContent = "Written by swarmtrain report: one file, which asks for nothing else.";
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();
