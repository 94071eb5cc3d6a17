/* The table of outcomes, as text for a spreadsheet and for a paper; the configurations and where they differ. */

/* Each column: a heading, the value of one run, and how it is written. */
function outcomeColumns() {
  const name = metric();
  const words = metricWord(name);
  const got = (key) => (group) => reached(group).map((r) => (r === null ? Infinity : r[key]));
  const each = (f) => (group) => settled(group).map(f);
  return [
    { key: name + "_last_tenth", tells: true, head: `${words}, last 10 %`, of: each((run) => lastTenth(run, name)) },
    { key: name + "_last", aside: true, head: `${words}, last`, of: each((run) => lastOf(run.columns[name])) },
    { key: "upload_d_to_target", head: `upload to ${short(target())}, d`, of: got("upload_d") },
    { key: "rounds_to_target", head: `rounds to ${short(target())}`, of: got("round") },
    { key: "seconds_to_target", head: `time to ${short(target())}`, of: got("seconds"), write: duration },
    ...profiles().map((name) => ({ key: `seconds_to_target_on_${name}`, head: `on ${name}`, of: got("on " + name), write: duration })),
    { key: "upload_d", head: "upload, d", of: each((run) => lastOf(run.columns.upload_d)) },
    { key: "rounds", head: "rounds", of: each((run) => lastOf(run.columns.round)) },
    { key: "largest_upload_mb", head: "largest upload, MB", of: each((run) => lastOf(run.columns.upload_max_bytes) / 1e6) },
    { key: "gradient_evaluations", head: "gradient evaluations", of: each((run) => lastOf(run.columns.gradient_evaluations)) },
  ];
}

/* The first column also says how many seeds diverged; to a target, those are among the seeds that did not reach it. */
function outcomeCell(column, group) {
  const values = column.of(group);
  const known = values.filter((v) => Number.isFinite(v));
  const failed = column.tells ? divergedWords(group) : "";
  if (!known.length) return failed || (values.some((v) => v === Infinity) ? "∞" : "–");
  const text = (column.write || spread)(known);
  const part = known.length < values.length ? `${text} (${known.length} of ${values.length})` : text;
  return failed ? `${part} (${failed})` : part;
}

function outcomes() {
  const groups = shownGroups();
  const columns = outcomeColumns();
  const seen = columns.filter((c) => !c.aside);
  const rows = groups.map((group) => [el("span", { class: "bar-name" }, swatch(group), group.name), ...seen.map((c) => outcomeCell(c, group)), seedsOf(group)]);
  return card(
    "outcomes",
    "Outcomes",
    "Mean ± standard deviation over the seeds that are shown and finished, or, as long as none of a group is, over those that go on. A seed that diverged is counted and named, is in no mean and never reaches the target. “Last 10 %” is the mean over the last tenth of the rounds, as in the paper’s tables; ∞: the target was not reached; “(2 of 3)”: by so many. “Time” is on the uplink chosen above; “on 4g” and the like are the clocks of those networks (docs/network.md), had the run’s clients been on them.",
    table("Outcomes", ["run", ...seen.map((c) => c.head), "seeds"], rows),
    el("div", { class: "buttons" }, copyButton("copy-csv", "Copy as CSV", "CSV", () => asCsv(groups, columns)), copyButton("copy-latex", "Copy as LaTeX", "LaTeX", () => asLatex(groups, seen))),
  );
}

const quoted = (v) => (/[",\n\r]/.test(v) ? '"' + v.replace(/"/g, '""') + '"' : v);
/* A spreadsheet takes what begins with these for a formula. */
const harmless = (v) => (/^[=+\-@\t\r]/.test(v) ? "'" + v : v);

function asCsv(groups, columns) {
  const head = ["run", "seeds", "diverged", ...columns.flatMap((c) => [c.key, c.key + "_sd"])];
  const lines = groups.map((group) => {
    const numbers = columns.flatMap((c) => {
      const values = c.of(group);
      const whole = values.length > 0 && values.every((v) => Number.isFinite(v));
      const sd = deviation(values);
      return [whole ? mean(values) : values.some((v) => v === Infinity) ? "inf" : "", whole && Number.isFinite(sd) ? sd : ""];
    });
    return [harmless(group.name), seedsOf(group), diverged(group).length, ...numbers];
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
  const keys = [...new Set(options.flatMap((o) => Object.keys(o)))].filter((k) => !DATA.aside.includes(k));
  const differ = keys.filter((k) => new Set(options.map((o) => optionText(o[k]))).size > 1);
  const same = keys.filter((k) => !differ.includes(k));
  const rows = differ.map((k) => [k, ...options.map((o) => optionText(o[k]))]);
  const lists = groups.map((group, g) => {
    const items = group.runs.map((r) => DATA.runs[r]).map((run, k) => oneRun(run, `run-${g}-${k}`));
    return el("li", {}, el("p", { class: "bar-name" }, swatch(group), group.name), el("ul", { class: "places" }, items));
  });
  return card(
    "configuration",
    "Configuration",
    groups.length > 1 ? (differ.length ? "Where the runs that are shown differ:" : "The runs that are shown differ in nothing but their seed.") : null,
    differ.length ? table("Where the configurations differ", ["option", ...groups.map((g) => g.name)], rows, (row, k) => (row[k] === "unset" ? "faint" : null)) : null,
    same.length ? unfold("same", groups.length > 1 ? "The same in all" : "All options", null, el("dl", { class: "options" }, same.map((k) => el("div", {}, el("dt", {}, k), el("dd", {}, optionText(options[0][k])))))) : null,
    unfold("folders", "Runs one by one: folders, commands, circumstances", null, el("ul", { class: "lists" }, lists)),
  );
}

function oneRun(run, id) {
  const facts = run.facts;
  const told = [
    ["folder", run.place],
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
    tick(id, run.seed === null ? "the run" : "seed " + run.seed, !state.hidden.has(run.place), (on) => (toggle([run], on), draw())),
    el("dl", { class: "options" }, told.filter(([, v]) => v).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v)))),
  );
}
