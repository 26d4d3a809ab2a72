// Renders the comparison of two runs from one value, see run_comparison.py: the one in the file of a report, else what api/compare returns, polled.
"use strict";

(() => {
  const {
    $, createElement, createSwatch, isFiniteNumber, formatCompact, formatInteger, formatDateTime, formatCount, renderSection, createTable,
    createPoller, describeOutage, showFreshness, onReady,
  } = swarmtrain;
  const { createPlotBoard } = swarmtrainCharts;
  const PLOTS = [["Training loss", "loss"], ["Validation loss", "validation"]];
  let page = null, board = null;

  const getAxis = () => $("axis").value;
  const formatLoss = (loss) => isFiniteNumber(loss) ? loss.toFixed(4) : "–";

  function renderRuns() {
    const names = page.runs.map((run) => run.name);
    document.title = names.join(" and ");
    $("title").textContent = names.join(" and ");
    const rows = page.runs.map((run, i) => [createElement("span", { class: "key" }, createSwatch(i), report ? run.name : createElement("a", { href: `runs/${encodeURIComponent(run.name)}/` }, run.name)),
      createElement("span", { class: `badge ${run.state}` }, run.state), isFiniteNumber(run.progress.step) ? `${formatInteger(run.progress.step)}${run.progress.steps ? ` of ${formatInteger(run.progress.steps)}` : ""}` : "–",
      formatLoss(run.progress.loss), formatLoss(run.validation.loss), formatLoss(run.lowest_validation_loss),
      isFiniteNumber(run.progress.tokens_per_second) ? formatCompact(run.progress.tokens_per_second) : "–", isFiniteNumber(run.world.world_size) ? formatCount(run.world.world_size, "rank") : "–",
      isFiniteNumber(run.started) ? formatDateTime(run.started) : "–", run.outcome]);
    const columns = { Run: "", State: "", Step: "number", Loss: "number", "Validation loss": "number", Lowest: "number", "Tokens/s": "number", World: "number", Began: "", Outcome: "remark" };
    renderSection("runs", true, createTable("runs", Object.entries(columns), rows));
  }

  function renderPlots() {
    const hasTokens = "tokens" in page.axes;
    $("axis").querySelector("[value=tokens]").disabled = !hasTokens;
    if (!hasTokens) $("axis").value = "steps";
    $("without-tokens").hidden = hasTokens;
    $("without-tokens").textContent = `Tokens are missing for ${page.without_tokens.join(" and ")}: only the trainer of swarmtrain reports its tokens per step.`;
    const curves = page.axes[getAxis()];
    const plots = PLOTS.map(([title, name]) => {
      const numbers = page.runs.map((_, i) => i).filter((i) => curves[`${i}.${name}`]);
      return { title, unit: "", curveNames: numbers.map((i) => `${i}.${name}`), labels: numbers.map((i) => page.runs[i].name), colors: numbers, log: true };
    });
    board.render(plots.filter((plot) => plot.curveNames.length), curves, []);
  }

  function renderDifferences(id, differences, nothing) {
    const names = page.runs.map((run) => run.name);
    const columns = [["Key", ""], ...names.map((name) => [name, "value"])];  // not an object: it would sort names that are integers
    renderSection(id, true, differences.length ? createTable(id, columns, differences.map(({ key, values }) => [key, ...values])) : createElement("p", { class: "quiet" }, nothing));
  }

  function render(data) {
    page = data;
    renderRuns(); renderPlots();
    renderDifferences("config", page.config ?? [], page.config ? "none. Not compared: values of runner.env, hosts, notify, and settings of the queue" : `unknown: ${page.config_note}`);
    renderDifferences("facts", page.facts, "nothing differs");
  }

  function renderFreshness() {
    renderSection("problem", Boolean(poller.error), createElement("p", { class: "problem" }, poller.error));
    if (!page) return showFreshness(poller.error && "cannot be compared", "no answer yet");
    const outage = page.runs.find((run) => run.connection_error);
    showFreshness(describeOutage(poller, outage, `run ${outage?.name}`), `live, ${formatCount(Math.round((Date.now() - poller.answeredAt) / 1000), "second")} ago`);
  }

  const report = $("data").textContent.trim();
  const names = new URLSearchParams(location.search).getAll("run");
  const poller = createPoller(`api/compare?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`, { render, renderFreshness });
  onReady(() => {
    board = createPlotBoard({ describeX: (x) => getAxis() === "tokens" ? `${formatCompact(x)} tokens` : `step ${formatInteger(x)}`, getXName: getAxis });
    $("axis").addEventListener("change", () => { board.resetZoom(); renderPlots(); });
    $("all-runs").hidden = Boolean(report);
    if (!report) return void poller.start();
    render(JSON.parse(report).page);
    showFreshness("", `written ${formatDateTime(page.written)}`);
    $("foot").textContent = "Written by swarmtrain report: one file, which asks for nothing else.";
  });
})();
