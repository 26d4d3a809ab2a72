// The plots of a page: curves that share one cursor and one zoom, in the section #plots.
"use strict";

const swarmtrainCharts = (() => {
  const { $, COLORS, createElement, createSwatch, createTimeElement, formatCompact, formatInteger, getSeriesColor, isFiniteNumber } = swarmtrain;
  const HEIGHT = 190;
  // A run of a comparison has the same color in all plots, also where the other run has no curve.
  const getColorNumber = (plot, i) => plot.colors?.[i] ?? i;
  const readSeriesColor = (i) => i < COLORS ? readCssColor(`--c${i + 1}`) : getSeriesColor(i);
  const readCssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // `describeX` describes a value of the horizontal axis, `getXName` names the axis.
  function createPlotBoard({ describeX, getXName }) {
    let charts = [], layout = "", zoomRange = null, plots = [], curves = {}, markers = [];

    function joinCurves(plot) {
      const scale = plot.scale ?? 1, log = plot.log && $("log-loss").checked;
      const tables = plot.curveNames.map((name) => [curves[name].steps, curves[name].values.map((value) => value === null || (log && value <= 0) ? null : value * scale)]);
      return tables.length === 1 ? tables[0] : uPlot.join(tables);
    }

    function createChart(plot, holder) {
      const keys = plot.labels.map((label, i) => createElement("span", { class: "key" }, createSwatch(getColorNumber(plot, i)), plot.labels.length > 1 ? label : "", createElement("b")));
      const heading = createElement("h3", {}, plot.title, plot.unit ? createElement("small", {}, plot.unit) : "", ...keys);
      const container = createElement("div", { role: "img" });
      holder.append(createElement("div", { class: "plot" }, heading, container));
      const axis = { stroke: readCssColor("--muted"), font: `11px ${readCssColor("--sans")}`, grid: { stroke: readCssColor("--grid"), width: 1 }, ticks: { show: false } };
      const log = plot.log && $("log-loss").checked;
      const data = joinCurves(plot);
      const sparse = (name) => curves[name].steps.length < 60;
      const chart = new uPlot({
        width: Math.max(260, container.clientWidth), height: HEIGHT, padding: [8, 18, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: "run", setSeries: false }, drag: { x: true, y: false }, points: { size: 7 } },
        scales: {
          x: { time: false },
          y: log ? { distr: 3 } : plot.zero ? { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.15 : 1] } : {},
        },
        axes: [
          { ...axis, size: 28, values: (_, ticks) => ticks.map((v) => Number.isInteger(v) ? formatCompact(v) : "") },
          { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => v === null ? "" : formatCompact(v)) },
        ],
        series: [{}, ...plot.curveNames.map((name, i) => ({
          stroke: readSeriesColor(getColorNumber(plot, i)), width: 1.5, spanGaps: true,
          points: { show: sparse(name) && name.endsWith("validation"), size: 5 },
        }))],
        hooks: {
          setCursor: [(u) => updateLegend(u)],
          draw: [(u) => drawMarkers(u)],
          setScale: [(u, key) => { if (key === "x") syncZoom(u); }],
        },
      }, data, container);
      const chartEntry = { plot, chart, container, keys, markerElements: [] };
      chart.entry = chartEntry;
      charts.push(chartEntry);
      drawMarkers(chart);
      updateLegend(chart);
    }

    // The values at the cursor, else the newest ones, are shown next to the title.
    function updateLegend(chart) {
      const chartEntry = chart.entry;
      if (!chartEntry) return;
      const { plot, keys } = chartEntry;
      const cursorIndex = chart.cursor.idx;
      $("plots-title").textContent = isFiniteNumber(cursorIndex) ? `Curves, at ${describeX(chart.data[0][cursorIndex])}` : "Curves";
      plot.curveNames.forEach((_, i) => {
        const values = chart.data[i + 1];
        let index = cursorIndex ?? values.length - 1;
        while (index > 0 && (values[index] === null || values[index] === undefined)) index--;
        const value = values[index];
        keys[i].lastChild.textContent = isFiniteNumber(value) ? (plot.write ?? formatCompact)(value) : "–";
      });
      chartEntry.container.setAttribute("aria-label", `${plot.title} over ${getXName()}: ${plot.labels.map((label, i) => `${label} ${keys[i].lastChild.textContent}`).join(", ")}`);
    }

    function drawMarkers(chart) {
      const chartEntry = chart.entry;
      if (!chartEntry) return;
      for (const line of chartEntry.markerElements) line.remove();
      chartEntry.markerElements = [];
      const { min, max } = chart.scales.x, width = chart.over.clientWidth;
      // Labels have two rows: a label that would overlap the previous one goes into the lower row.
      const rowEnds = [-1, -1];
      for (const marker of markers) {
        if (min === undefined || min === null || marker.step < min || marker.step > max) continue;
        const x = chart.valToPos(marker.step, "x");
        const line = createElement("div", { class: `mark ${marker.kind}`, title: marker.text });
        const labelWidth = 6 * marker.label.length + 8, left = x + labelWidth > width;
        const row = rowEnds.findIndex((end) => x >= end && (!left || x - labelWidth >= end));
        if (row >= 0) {
          line.append(createElement("span", { class: `row${row}` }, marker.label));
          if (left) line.classList.add("left");
          rowEnds[row] = x + (left ? 4 : labelWidth);
        }
        line.style.left = `${x}px`;
        chart.over.append(line);
        chartEntry.markerElements.push(line);
      }
    }

    // Zooming into one plot zooms all. uPlot reports a new scale later, including those that are set here.
    function syncZoom(chart) {
      if (!chart.entry) return;
      const { min, max } = chart.scales.x, { min: first, max: last } = getStepRange(chart);
      if (zoomRange && min === zoomRange.min && max === zoomRange.max) return;
      const all = min <= first && max >= last;
      if (all && !zoomRange) return;
      zoomRange = all ? null : { min, max };
      $("show-all-steps").hidden = all;
      for (const other of charts) if (other.chart !== chart) other.chart.setScale("x", zoomRange ?? getStepRange(other.chart));
    }
    // A scale needs a width, even if a curve has a single point.
    function getStepRange(chart) {
      const steps = chart.data[0], first = steps[0], last = steps[steps.length - 1];
      return first < last ? { min: first, max: last } : { min: first, max: first + 1 };
    }

    // Shows `newPlots`: title, unit, and the names of their curves in `newCurves`, each with its label. `markers` are drawn at their steps.
    function render(newPlots, newCurves, newMarkers) {
      [plots, curves, markers] = [newPlots, newCurves, newMarkers];
      const newLayout = JSON.stringify(plots.map((plot) => [plot.curveNames, plot.labels]));
      $("plots").hidden = !plots.length;
      if (newLayout !== layout) {
        recreate();
        layout = newLayout;
      } else {
        charts.forEach((chartEntry, i) => {
          chartEntry.plot = plots[i];
          chartEntry.chart.setData(joinCurves(plots[i]), !zoomRange);
          if (zoomRange) chartEntry.chart.setScale("x", zoomRange);
          updateLegend(chartEntry.chart);
        });
      }
      $("markers").replaceChildren(...markers.map((marker) => createElement("li", { class: marker.kind },
        createElement("span", { class: "quiet" }, `step ${formatInteger(marker.step)}`), createElement("span", { class: "label" }, marker.label), createElement("span", { class: "text" }, createTimeElement(marker.time), ` ${marker.text}`))));
    }

    function recreate() {
      for (const { chart } of charts) chart.destroy();
      charts = [];
      const holder = $("plots").querySelector(".body");
      holder.replaceChildren();
      for (const plot of plots) createChart(plot, holder);
    }

    // Shows the same plots over another axis.
    function resetZoom() {
      zoomRange = null;
      $("show-all-steps").hidden = true;
      layout = "";
    }

    $("log-loss").addEventListener("change", recreate);
    $("show-all-steps").addEventListener("click", () => { for (const { chart } of charts.slice(0, 1)) chart.setScale("x", getStepRange(chart)); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recreate);
    new ResizeObserver(() => {
      for (const { chart, container } of charts) if (container.clientWidth && container.clientWidth !== chart.width) chart.setSize({ width: container.clientWidth, height: HEIGHT });
    }).observe($("plots"));
    return { render, resetZoom };
  }

  return { createPlotBoard };
})();
