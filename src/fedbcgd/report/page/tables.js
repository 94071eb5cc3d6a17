/* The tables of outcomes and of costs to the target, also as CSV and LaTeX; the table of runs; the configurations. */

/* A column about groups: key in a CSV, heading, and the values of a group's seeds; or `count`, one number of the group. */
const seedColumns = () => [
  { key: "seeds", head: "seeds", count: seedsOf },
  ...(shownGroups().some((g) => diverged(g).length) ? [{ key: "diverged", head: "diverged", count: (g) => diverged(g).length }] : []),
];
const each = (f) => (group) => settled(group).map(f);

/* A column of times, in one unit that its heading names. */
function timed(head, seconds) {
  const known = shownGroups().flatMap(seconds).filter(Number.isFinite);
  const unit = unitFor(known.length ? mean(known) : 1);
  return { key: `${head}_${unit.sign}`.replace(/ /g, "_"), head: `${head}, ${unit.sign}`, of: (group) => seconds(group).map((s) => s / unit.seconds) };
}

function outcomeColumns() {
  const names = [metric(), ...metricsOfTask().filter((name) => name !== metric())].filter(Boolean);
  return [
    ...names.map((name) => ({ key: name, head: metricText(name), of: each((run) => lastTenth(run, name)) })),
    ...(networks().length ? [timed(`on ${network()} network`, each((run) => lastOf(networkSeconds(run))))] : []),
    { key: "upload_d", head: "upload, d", of: each((run) => lastOf(run.columns.upload_d)) },
    { key: "upload_mb", head: "upload, MB", of: each((run) => lastOf(run.columns.upload_bytes) / 1e6) },
    { key: "rounds", head: "rounds", of: each((run) => lastOf(run.columns.round)) },
    { key: "largest_upload_mb", head: "largest upload, MB", of: each((run) => lastOf(run.columns.upload_max_bytes) / 1e6) },
    { key: "gradient_evaluations", head: "gradient evaluations", of: each((run) => lastOf(run.columns.gradient_evaluations)) },
    ...seedColumns(),
  ];
}

function targetColumns() {
  const of = (key, unit = 1) => (group) => reached(group).map((r) => (r === null ? Infinity : r[key] / unit));
  return [
    { key: "reached", head: "reached", count: (g) => reached(g).filter((r) => r !== null).length },
    { key: "upload_d", head: "upload, d", of: of("upload_d") },
    { key: "upload_mb", head: "upload, MB", of: of("upload_bytes", 1e6) },
    { key: "rounds", head: "rounds", of: of("round") },
    { key: "gradient_evaluations", head: "gradient evaluations", of: of("gradient_evaluations") },
    timed("time", of("seconds")),
    ...profiles().map((name) => timed("on " + name, of("on " + name))),
    ...seedColumns(),
  ];
}

/* Mean and deviation of a group in a column, over the seeds that have a value. */
function measured(column, group) {
  if (column.count) return { mean: column.count(group), sd: NaN };
  const values = column.of(group);
  const known = values.filter(Number.isFinite);
  if (!known.length) return { mean: values.includes(Infinity) ? Infinity : NaN, sd: NaN };
  return { mean: mean(known), sd: deviation(known) };
}

const cellText = ({ mean, sd }) => plusMinus(mean, sd);

/* A sortable table of groups, and buttons that copy it: the same rows, columns and numbers in each form. */
function groupTable(id, caption, columns) {
  const column = (head) => columns.find((c) => c.head === head);
  const groups = inOrder(id, shownGroups(), (group, head) => (head === "run" ? group.name : column(head) && measured(column(head), group).mean));
  const rows = groups.map((group) => [el("span", { class: "bar-name" }, swatch(group), group.name), ...columns.map((c) => cellText(measured(c, group)))]);
  return [
    table(caption, ["run", ...columns.map((c) => c.head)], rows, { id }),
    el("div", { class: "buttons" }, copyButton(id + "-csv", "Copy as CSV", "CSV", () => asCsv(groups, columns)), copyButton(id + "-latex", "Copy as LaTeX", "LaTeX", () => asLatex(groups, columns))),
  ];
}

function outcomes() {
  return card("outcomes", "Outcomes", "Mean ± standard deviation over finished seeds; metrics over the last 10 % of the rounds. A seed that diverged is in no mean.", groupTable("outcomes-table", "Outcomes", outcomeColumns()));
}

/* The cells of the table of runs for each run, by heading. */
function runColumns() {
  const name = metric();
  const last = (column) => (run) => lastOf(run.columns[column]);
  return {
    run: (run, group) => group.name,
    seed: (run) => run.seed,
    status: (run) => run.status,
    [metricText(name) || "metric"]: (run) => lastTenth(run, name),
    ...(networks().length ? { [`hours, ${network()}`]: (run) => lastOf(hoursOn(run, network()) || []) } : {}),
    "upload, d": last("upload_d"),
    rounds: last("round"),
    "took, s": (run) => run.facts.seconds,
    finished: (run) => (run.facts.finished || "").replace(/^(.{10})T(.{5}).*$/, "$1 $2"),
    notes: (run) => (run.facts.notes || []).join("; "),
    folder: (run) => run.folder,
  };
}

function runsTable() {
  const columns = runColumns();
  const entries = groupsOfTask().flatMap((group) => group.runs.map((k) => ({ group, run: DATA.runs[k] })));
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const text = ({ run, group }) => [group.name, run.status, run.folder, "seed " + run.seed, ...(run.facts.notes || []), ...Object.entries(run.options).map(([k, v]) => `${k}=${optionText(v)}`)].join(" ").toLowerCase();
  const matching = entries.filter((entry) => words.every((word) => text(entry).includes(word)));
  const shown = inOrder("runs-table", matching, ({ run, group }, head) => columns[head] && columns[head](run, group));
  const rows = shown.map(({ run, group }) =>
    Object.entries(columns).map(([head, of]) => {
      const value = of(run, group);
      if (head === "run") return tick("show-" + DATA.runs.indexOf(run), [swatch(group), " ", value], !state.hidden.has(run.folder), (on) => (toggle([run], on), draw()));
      if (head === "notes" && value) return el("span", { class: "long", title: value }, value);
      if (head === "folder") return el("span", { class: "long" }, value);
      return typeof value === "number" ? short(value) : value || "–";
    }),
  );
  const filter = el("input", { type: "search", value: state.filter, placeholder: "fedbcgd lr=0.1 diverged", oninput: (event) => ((state.filter = event.target.value), draw()) });
  const runs = entries.map((entry) => entry.run);
  const only = () => (toggle(runs, false), toggle(matching.map((entry) => entry.run), true), draw(), announce(`${matching.length} runs shown`));
  const numbers = () => csvText([Object.keys(columns), ...shown.map(({ run, group }) => Object.values(columns).map((of) => of(run, group)).map((v) => (typeof v === "string" ? notFormula(v) : Number.isFinite(v) ? v : "")))]);
  return card(
    "each-run",
    "Runs",
    `${matching.length} of ${entries.length} runs. A heading sorts them; a word in the filter must be in a run's name, options, notes or folder.`,
    el("div", { class: "controls" }, field("filter", "Filter", filter), el("button", { type: "button", id: "only", onclick: only }, "Show only these")),
    table("Runs", Object.keys(columns), rows, { id: "runs-table", left: ["notes", "folder"] }),
    el("div", { class: "buttons" }, copyButton("runs-csv", "Copy as CSV", "CSV", numbers)),
  );
}

const quoted = (v) => (/[",\n\r]/.test(v) ? '"' + v.replace(/"/g, '""') + '"' : v);
/* Spreadsheets read text that begins with these characters as a formula. */
const notFormula = (v) => (/^[=+\-@\t\r]/.test(v) ? "'" + v : v);

const csvText = (rows) => rows.map((row) => row.map((v) => quoted(v === null || v === undefined ? "" : String(v))).join(",")).join("\n") + "\n";

/* Each column that is a mean has its deviation beside it, both unrounded. */
function asCsv(groups, columns) {
  const number = (v) => (v === Infinity ? "inf" : Number.isFinite(v) ? v : "");
  const head = ["run", ...columns.flatMap((c) => (c.count ? [c.key] : [c.key, c.key + "_sd"]))];
  const lines = groups.map((group) => [notFormula(group.name), ...columns.flatMap((c) => {
    const { mean, sd } = measured(c, group);
    return c.count ? [number(mean)] : [number(mean), number(sd)];
  })]);
  return csvText([head, ...lines]);
}

const LATEX = { "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", $: "\\$", "&": "\\&", "#": "\\#", _: "\\_", "%": "\\%", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}", ">": "\\textgreater{}", "±": "$\\pm$", "∞": "$\\infty$", "–": "--", "−": "$-$" };
const latex = (text) => String(text).replace(/[\\{}$&#_%~^<>±∞–−]/g, (c) => LATEX[c]);

function asLatex(groups, columns) {
  const head = ["run", ...columns.map((c) => c.head)].map(latex).join(" & ");
  const lines = groups.map((group) => [group.name, ...columns.map((c) => cellText(measured(c, group)))].map(latex).join(" & ") + " \\\\");
  return ["\\begin{tabular}{l" + "r".repeat(columns.length) + "}", "\\toprule", head + " \\\\", "\\midrule", ...lines, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

function optionText(v) {
  if (v === undefined || v === null) return "unset";
  return typeof v === "object" ? JSON.stringify(v) : String(v);
}

/* The name of an option, which may be broken after a dot. */
const breakable = (key) => el("span", {}, key.split(/(?<=\.)/).map((part, k) => [k ? el("wbr") : null, part]));

function configuration() {
  const groups = shownGroups();
  if (!groups.length) return null;
  const options = groups.map((g) => runsOf(g)[0].options);
  const keys = [...new Set(options.flatMap((o) => Object.keys(o)))].filter((k) => !DATA.ignored_options.includes(k));
  const differ = keys.filter((k) => new Set(options.map((o) => optionText(o[k]))).size > 1);
  const same = keys.filter((k) => !differ.includes(k));
  const faint = (row, k) => (row[k] === "unset" ? "faint" : null);
  const byOption = () => table("Where the configurations differ", ["option", ...groups.map((g) => g.name)], differ.map((k) => [breakable(k), ...options.map((o) => optionText(o[k]))]), { mark: faint });
  const byRun = () => table("Where the configurations differ", ["run", ...differ], groups.map((g, i) => [g.name, ...differ.map((k) => optionText(options[i][k]))]), { mark: faint });
  const lists = groups.map((group, g) => {
    const items = group.runs.map((r) => DATA.runs[r]).map((run, k) => runDetails(run, `run-${g}-${k}`));
    return el("li", {}, el("p", { class: "bar-name" }, swatch(group), group.name), el("ul", { class: "places" }, items));
  });
  return card(
    "configuration",
    "Configuration",
    groups.length > 1 ? (differ.length ? "Where the runs that are shown differ:" : "The runs that are shown differ in nothing but their seed.") : "All options of the run, and where it was run.",
    differ.length ? (groups.length > differ.length ? byRun() : byOption()) : null,
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
