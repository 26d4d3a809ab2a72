// What the pages share: elements, the formatting of numbers and times, and polling.
// Texts of a run enter the document only as text, never as HTML.
"use strict";

const swarmtrain = (() => {
  const POLL_MS = 2000, COLORS = 9, GIB = 2 ** 30;
  const $ = (id) => document.getElementById(id);

  function createElement(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined && child !== "").map((child) => child instanceof Node ? child : String(child)));
    return element;
  }

  // ---- formatting of numbers and times

  const isFiniteNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const formatInteger = (value) => Math.round(value).toLocaleString("en-US");
  function formatCompact(value) {
    const size = Math.abs(value);
    for (const [unit, word] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit * 10) return `${formatSignificant(value / unit)}${word}`;
    return size >= 1000 ? formatInteger(value) : formatSignificant(value);
  }
  function formatSignificant(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
  }
  function formatDuration(seconds) {
    const s = Math.max(0, Math.round(seconds)), two = (n) => String(n).padStart(2, "0");
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
    if (s < 172800) return `${Math.floor(s / 3600)} h ${two(Math.floor(s % 3600 / 60))} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
  }
  const formatShortDuration = (seconds) => seconds >= 1 ? `${formatSignificant(seconds)} s` : seconds >= 1e-3 ? `${formatSignificant(seconds * 1e3)} ms` : `${formatSignificant(seconds * 1e6)} µs`;
  const formatBandwidth = (bytes) => bytes * 8 >= 1e9 ? `${(bytes * 8 / 1e9).toFixed(1)} Gbit/s` : `${Math.round(bytes * 8 / 1e6)} Mbit/s`;
  const formatGibibytes = (bytes) => `${(bytes / GIB).toFixed(1)}`;
  const padTwo = (n) => String(n).padStart(2, "0");
  function formatTime(seconds) {
    const t = new Date(seconds * 1000);
    return `${padTwo(t.getHours())}:${padTwo(t.getMinutes())}:${padTwo(t.getSeconds())}`;
  }
  function formatDateTime(seconds) {
    const t = new Date(seconds * 1000);
    return `${t.getFullYear()}-${padTwo(t.getMonth() + 1)}-${padTwo(t.getDate())} ${formatTime(seconds)}`;
  }
  const createTimeElement = (seconds) => createElement("time", { datetime: new Date(seconds * 1000).toISOString(), title: formatDateTime(seconds) }, formatTime(seconds));
  const formatCount = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
  // The first series have the colours of page.css; the hues of all others are 137.5 degrees apart (the golden angle), so that no two are equal.
  const getSeriesColor = (i) => i < COLORS ? `var(--c${i + 1})` : `hsl(${(i * 137.508).toFixed(1)} 60% 50%)`;
  const createColored = (i, tag, attributes) => {
    const element = createElement(tag, attributes);
    element.style.background = getSeriesColor(i);
    return element;
  };
  const createSwatch = (i) => createColored(i, "i", { class: "swatch", "aria-hidden": "true" });

  // ---- sections and tables

  function renderSection(id, shown, ...children) {
    const element = $(id);
    element.hidden = !shown;
    if (shown) element.querySelector(".body").replaceChildren(...children);
  }

  // A table in a region that scrolls. `columns`: pairs of title and class; each row has as many cells, texts or elements.
  function createTable(label, columns, rows) {
    const header = columns.map(([title, name]) => createElement("th", { scope: "col", class: name || null }, title));
    const body = rows.map((cells) => createElement("tr", {}, ...columns.map(([, name], i) => createElement("td", { class: name || null }, cells[i]))));
    return createElement("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
      createElement("table", {}, createElement("thead", {}, createElement("tr", {}, ...header)), createElement("tbody", {}, ...body)));
  }

  // ---- polling

  // Polls a JSON value of the server, which sends it only if its version is a new one. `render` shows it, `more` requests what else the page
  // shows, and `renderFreshness` is called after each answer and each missing answer.
  function createPoller(path, { render, more = async () => {}, renderFreshness }) {
    const poller = { answeredAt: 0, unreachableSince: 0, silence: 0, error: "", start: poll };
    let version = "", clockOffset = 0;
    poller.getServerTime = () => Date.now() / 1000 - clockOffset;
    async function poll() {
      try {
        const answer = await fetch(`${path}${path.includes("?") ? "&" : "?"}version=${version}`, { signal: AbortSignal.timeout(5 * POLL_MS) });
        poller.silence = Number(answer.headers.get("swarmtrain-age")) || 0;
        if (answer.status === 200) {
          const payload = await answer.json();
          version = payload.version;
          const sent = Date.parse(answer.headers.get("date"));
          if (sent) clockOffset = Math.round((Date.now() - sent) / 1000);
          render(payload.page);
        } else if (answer.status !== 204) {
          poller.error = await readError(answer);
          throw new Error(poller.error);
        }
        await more();
        poller.error = "";
        poller.unreachableSince = 0;
        poller.answeredAt = Date.now();
      } catch {
        poller.unreachableSince ||= Date.now();
      }
      renderFreshness();
      setTimeout(poll, POLL_MS);
    }
    return poller;
  }

  async function readError(answer) {
    const text = (await answer.text()).slice(0, 1000);
    try {
      const { error, hint } = JSON.parse(text);
      return hint ? `${error} (${hint})` : error;
    } catch {
      return text;
    }
  }

  // Why the shown page is outdated; empty if it is not. `subject`: where the server reads it.
  function describeOutage(poller, page, subject) {
    if (poller.unreachableSince) return `the dashboard has not answered for ${formatDuration((Date.now() - poller.unreachableSince) / 1000)}; retried every 2 s`;
    if (page?.connection_error) return `${subject} does not answer: ${page.connection_error}`;
    return poller.silence > 15 ? `${subject} has not answered for ${formatDuration(poller.silence)}` : "";
  }

  function showFreshness(lost, text) {
    $("freshness").className = `freshness${lost ? " lost" : ""}`;
    $("freshness").textContent = lost || text;
  }

  function onReady(start) {
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
  }

  return {
    $, POLL_MS, COLORS, GIB, createElement, isFiniteNumber, formatInteger, formatCompact, formatSignificant, formatDuration,
    formatShortDuration, formatBandwidth, formatGibibytes, formatTime, formatDateTime, createTimeElement, formatCount,
    getSeriesColor, createColored, createSwatch, renderSection, createTable, createPoller, describeOutage, showFreshness, onReady,
  };
})();
