/* The table of outcomes, also as CSV and LaTeX; the configurations and their differences. */

/* The columns: key in the CSV, heading, values of a group, and format. */
function outcomeColumns() {
  const name = metric();
  const text = metricText(name);
  const toTarget = (key) => (group) => reached(group).map((r) => (r === null ? Infinity : r[key]));
  const each = (f) => (group) => settled(group).map(f);
  return [
    { key: name + "_last_tenth", showsDiverged: true, head: `${text}, last 10 %`, of: each((run) => lastTenth(run, name)) },
    { key: name + "_last", csvOnly: true, head: `${text}, last`, of: each((run) => lastOf(run.columns[name])) },
    { key: "upload_d_to_target", head: `upload to ${short(target())}, d`, of: toTarget("upload_d") },
    { key: "rounds_to_target", head: `rounds to ${short(target())}`, of: toTarget("round") },
    { key: "seconds_to_target", head: `time to ${short(target())}`, of: toTarget("seconds"), write: duration },
    ...profiles().map((name) => ({ key: `seconds_to_target_on_${name}`, head: `on ${name}`, of: toTarget("on " + name), write: duration })),
    { key: "upload_d", head: "upload, d", of: each((run) => lastOf(run.columns.upload_d)) },
    { key: "rounds", head: "rounds", of: each((run) => lastOf(run.columns.round)) },
    { key: "largest_upload_mb", head: "largest upload, MB", of: each((run) => lastOf(run.columns.upload_max_bytes) / 1e6) },
    { key: "gradient_evaluations", head: "gradient evaluations", of: each((run) => lastOf(run.columns.gradient_evaluations)) },
  ];
}

/* The first column also shows how many seeds diverged; in columns about the target, they are seeds that did not reach it. */
function outcomeCell(column, group) {
  const values = column.of(group);
  const known = values.filter((v) => Number.isFinite(v));
  const failed = column.showsDiverged ? divergedText(group) : "";
  if (!known.length) return failed || (values.some((v) => v === Infinity) ? "∞" : "–");
  const text = (column.write || spread)(known);
  const part = known.length < values.length ? `${text} (${known.length} of ${values.length})` : text;
  return failed ? `${part} (${failed})` : part;
}

function outcomes() {
  const groups = shownGroups();
  const columns = outcomeColumns();
  const shown = columns.filter((c) => !c.csvOnly);
  const rows = groups.map((group) => [el("span", { class: "bar-name" }, swatch(group), group.name), ...shown.map((c) => outcomeCell(c, group)), seedsOf(group)]);
  return card(
    "outcomes",
    "Outcomes",
    "Mean ± standard deviation over the seeds that are shown and finished, or over those that go on if none is finished. A seed that diverged counts as a seed, but is in no mean and never reaches the target. “Last 10 %” is the mean over the last tenth of the rounds, as in the paper’s tables; ∞: the target was not reached; “(2 of 3)”: two of three seeds reached it. “Time” is on the uplink chosen above; “on 4g” and the like are the times if the run’s clients were on those networks (docs/network.md).",
    table("Outcomes", ["run", ...shown.map((c) => c.head), "seeds"], rows),
    el("div", { class: "buttons" }, copyButton("copy-csv", "Copy as CSV", "CSV", () => asCsv(groups, columns)), copyButton("copy-latex", "Copy as LaTeX", "LaTeX", () => asLatex(groups, shown))),
  );
}

const quoted = (v) => (/[",\n\r]/.test(v) ? '"' + v.replace(/"/g, '""') + '"' : v);
/* Spreadsheets read text that begins with these characters as a formula. */
const notFormula = (v) => (/^[=+\-@\t\r]/.test(v) ? "'" + v : v);

function asCsv(groups, columns) {
  const head = ["run", "seeds", "diverged", ...columns.flatMap((c) => [c.key, c.key + "_sd"])];
  const lines = groups.map((group) => {
    const numbers = columns.flatMap((c) => {
      const values = c.of(group);
      const complete = values.length > 0 && values.every((v) => Number.isFinite(v));
      const sd = deviation(values);
      return [complete ? mean(values) : values.some((v) => v === Infinity) ? "inf" : "", complete && Number.isFinite(sd) ? sd : ""];
    });
    return [notFormula(group.name), seedsOf(group), diverged(group).length, ...numbers];
  });
  return [head, ...lines].map((line) => line.map((v) => quoted(String(v))).join(",")).join("\n") + "\n";
}

const LATEX = { "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", $: "\\$", "&": "\\&", "#": "\\#", _: "\\_", "%": "\\%", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}", ">": "\\textgreater{}", "±": "$\\pm$", "∞": "$\\infty$", "–": "--", "−": "$-$" };
const latex = (text) => String(text).replace(/[\\{}$&#_%~^<>±∞–−]/g, (c) => LATEX[c]);

function asLatex(groups, columns) {
  const head = ["run", ...columns.map((c) => c.head), "seeds"].map(latex).join(" & ");
  const lines = groups.map((group) => [group.name, ...columns.map((c) => outcomeCell(c, group)), seedsOf(group)].map(latex).join(" & ") + " \\\\");
  return ["\\begin{tabular}{l" + "r".repeat(columns.length + 1) + "}", "\\toprule", head + " \\\\", "\\midrule", ...lines, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

function optionText(v) {
  if (v === undefined || v === null) return "unset";
  return typeof v === "object" ? JSON.stringify(v) : String(v);
}

function configuration() {
  const groups = shownGroups();
  if (!groups.length) return null;
  const options = groups.map((g) => runsOf(g)[0].options);
  const keys = [...new Set(options.flatMap((o) => Object.keys(o)))].filter((k) => !DATA.ignored_options.includes(k));
  const differ = keys.filter((k) => new Set(options.map((o) => optionText(o[k]))).size > 1);
  const same = keys.filter((k) => !differ.includes(k));
  const rows = differ.map((k) => [k, ...options.map((o) => optionText(o[k]))]);
  const lists = groups.map((group, g) => {
    const items = group.runs.map((r) => DATA.runs[r]).map((run, k) => runDetails(run, `run-${g}-${k}`));
    return el("li", {}, el("p", { class: "bar-name" }, swatch(group), group.name), el("ul", { class: "places" }, items));
  });
  return card(
    "configuration",
    "Configuration",
    groups.length > 1 ? (differ.length ? "Where the runs that are shown differ:" : "The runs that are shown differ in nothing but their seed.") : null,
    differ.length ? table("Where the configurations differ", ["option", ...groups.map((g) => g.name)], rows, (row, k) => (row[k] === "unset" ? "faint" : null)) : null,
    same.length ? unfold("same", groups.length > 1 ? "The same in all" : "All options", null, el("dl", { class: "options" }, same.map((k) => el("div", {}, el("dt", {}, k), el("dd", {}, optionText(options[0][k])))))) : null,
    unfold("folders", "Each run: folder, command, machine and versions", null, el("ul", { class: "lists" }, lists)),
  );
}

function runDetails(run, id) {
  const facts = run.facts;
  const entries = [
    ["folder", run.folder],
    ["status", run.status + (facts.stopped ? `, stopped by ${facts.stopped}` : "")],
    ["command", facts.command],
    ["finished", facts.finished],
    ["took", facts.seconds === undefined ? null : duration([facts.seconds])],
    ["machine", facts.machine ? [facts.machine.system, facts.machine.cores && facts.machine.cores + " cores", facts.machine.device].filter(Boolean).join(", ") : null],
    ["versions", facts.versions ? Object.entries(facts.versions).map(([k, v]) => `${k} ${v}`).join(", ") : null],
    ["notes", (facts.notes || []).join("; ")],
    ["refused or lost", run.ledger.refused || run.ledger.lost ? `${run.ledger.refused || 0} refused, ${run.ledger.lost || 0} lost` : null],
  ];
  return el(
    "li",
    {},
    tick(id, run.seed === null ? "the run" : "seed " + run.seed, !state.hidden.has(run.folder), (on) => (toggle([run], on), draw())),
    el("dl", { class: "options" }, entries.filter(([, v]) => v).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v)))),
  );
}
