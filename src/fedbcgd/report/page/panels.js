/* The sections above the tables: runs to show, curves, clients, time to target, traffic, labels. */

/* A section with one short explanation. */
function card(id, heading, explanation, ...children) {
  return el("section", { class: "card", "aria-labelledby": id + "-heading" }, el("h2", { id: id + "-heading" }, heading), explanation ? el("p", { class: "explanation" }, explanation) : null, ...children);
}

function toggle(runs, show) {
  for (const run of runs) show ? state.hidden.delete(run.folder) : state.hidden.add(run.folder);
}

function legend() {
  const chips = groupsOfTask().map((group, k) => {
    const runs = group.runs.map((r) => DATA.runs[r]);
    const on = runsOf(group).length > 0;
    const states = [...new Set(runs.map((run) => run.status))].filter((s) => s !== "finished");
    return el(
      "li",
      {},
      el(
        "button",
        {
          type: "button",
          id: "chip-" + k,
          class: "chip",
          "aria-pressed": String(on),
          title: on ? "hide" : "show",
          onclick: () => {
            toggle(runs, !on);
            draw();
            announce(`${group.name} ${on ? "hidden" : "shown"}`);
          },
        },
        swatch(group),
        el("span", { class: "chip-name" }, group.name),
        runs.length > 1 ? el("span", { class: "count" }, `${runsOf(group).length} seeds`) : null,
        states.map((s) => el("span", { class: "badge " + s }, runs.length > 1 ? `${runs.filter((run) => run.status === s).length} ${s}` : s)),
      ),
    );
  });
  const all = groupsOfTask().flatMap((g) => g.runs.map((r) => DATA.runs[r]));
  const everything = (id, text, show) =>
    el("button", { type: "button", id, class: "quiet", onclick: () => (toggle(all, show), draw(), announce(show ? "all shown" : "all hidden")) }, text);
  return el(
    "section",
    { class: "runs", "aria-labelledby": "runs-heading" },
    el("h2", { id: "runs-heading", class: "unseen" }, "Runs: show and hide"),
    el("ul", { class: "chips" }, chips, el("li", { class: "all" }, everything("show-all", "Show all", true), everything("hide-all", "Hide all", false))),
  );
}

const SMOOTHINGS = [1, 3, 5, 9, 15, 31, 61];
const metricText = (name) => name.replace(/_/g, " ");

const chosenAxis = () => (axesOfTask().includes(state.axis) ? state.axis : "upload_d");

/* The lines of a metric: each group's mean; thin lines for its seeds and, behind smoothed lines, for the values before smoothing. */
function linesOf(name) {
  const axis = chosenAxis();
  const groups = shownGroups();
  const own = groups.map((group) => ({ group, points: series(group, axis, name) }));
  const seeds = groups.flatMap((group) => (state.seeds ? runsOf(group) : unsettled(group)).map((run) => ({ group, thin: true, alone: !settled(group).length, points: series(group, axis, name, [run]) })));
  const unsmoothed = state.smooth > 1 && !state.seeds ? own.map((line) => ({ ...line, thin: true, points: line.points.map((p) => ({ ...p, sd: NaN })) })) : [];
  return { thin: [...unsmoothed, ...seeds], own: own.map((line) => ({ ...line, points: smoothed(line.points, state.smooth) })) };
}

/* Small charts of several metrics, side by side. */
function smallCharts(id, names, width, heading = metricText) {
  const columns = width < 620 ? 1 : width < 1000 || names.length === 2 ? 2 : names.length === 4 && width < 1300 ? 2 : Math.min(4, Math.max(1, Math.floor(width / 380)));
  const each = Math.floor((width - 24 * (columns - 1)) / columns);
  const panels = names.map((name) => {
    const { thin, own } = linesOf(name);
    const chart = lineChart(`${id}-${name}`.replace(/[^A-Za-z0-9_-]/g, "_"), [...thin, ...own], { xLabel: AXES[chosenAxis()].label, yLabel: metricText(name), logX: state.logX, logY: state.logY && !falls(CLIENTS + name), goal: NaN, width: each, small: true });
    return el("li", {}, el("h3", {}, capital(heading(name))), chart);
  });
  return el("ul", { class: "panels", css: { "--columns": columns } }, panels);
}

const MOST_PANELS = 24;

function otherMetrics(width) {
  const names = metricsOfTask().filter((name) => name !== metric());
  if (!names.length || !shownGroups().length) return null;
  const more = names.length > MOST_PANELS ? ` The first ${MOST_PANELS} of ${names.length}.` : "";
  return card("metrics", "Other metrics", "Every other metric of these runs, on the axis chosen above." + more, smallCharts("metrics", names.slice(0, MOST_PANELS), width));
}

function clientsCard(width) {
  const measured = Object.entries(clientMetrics());
  if (!measured.length) return null;
  const parts = measured.map(([, columns]) => smallCharts("clients", columns, width, (column) => metricText(column.slice(CLIENTS.length))));
  return card("clients", "Clients", "Each client is measured on its own part: the mean, the standard deviation, and the means of the worst tenth and of the worst quarter of the clients.", parts);
}

function curves(width) {
  const name = metric();
  const axis = chosenAxis();
  const groups = shownGroups();
  const { thin, own: lines } = linesOf(name);
  const controls = el(
    "div",
    { class: "controls" },
    segments("axis", "Against", axesOfTask().map((a) => [a, AXES[a].name]), axis, (a) => {
      state.axis = a;
      draw();
      announce("against " + AXES[a].label);
    }),
    axis === "hours" && networks().length > 1 ? choose("network", "On network", networks().map((n) => [n, n === OWN ? "the run's own" : n]), network(), (n) => ((state.network = n), draw())) : null,
    choose("metric", "Metric", metricsOfTask().map((m) => [m, metricText(m)]), name, (m) => {
      state.metric = m;
      state.target = null;
      draw();
    }),
    choose("smooth", "Smoothing", SMOOTHINGS.map((n) => [n, n > 1 ? `mean of ${n} evaluations` : "none"]), state.smooth, (n) => ((state.smooth = Number(n)), draw())),
    el(
      "div",
      { class: "ticks" },
      tick("log-x", "log x", state.logX, (on) => ((state.logX = on), draw())),
      tick("log-y", "log y", state.logY, (on) => ((state.logY = on), draw())),
      groups.some((g) => runsOf(g).length > 1) ? tick("seeds", "each seed", state.seeds, (on) => ((state.seeds = on), draw())) : null,
    ),
  );
  const chart = lineChart("curves-chart", [...thin, ...lines], {
    xLabel: AXES[axis].label, yLabel: metricText(name), logX: state.logX, logY: state.logY, goal: groups.length > 1 || state.target !== null ? target() : NaN, width,
  });
  const said = [lines.some((l) => l.points.some((p) => p.n > 1)) ? "mean over seeds, band ± one standard deviation" : "", groups.some((g) => unsettled(g).length) ? "thin lines diverged or go on, and are in no mean" : ""].filter(Boolean);
  return card(
    "curves",
    name ? capital(metricText(name)) : "Curves",
    capital([...said, "drag over a part to enlarge it"].join("; ") + "."),
    controls,
    chart,
    unfold("curves-numbers", "The numbers as a table", pointsTable(lines, AXES[axis].label, metricText(name))),
  );
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/* Up to a dozen points of each line. */
function pointsTable(lines, xLabel, yLabel) {
  const rows = lines.flatMap(({ group, points }) => {
    const every = Math.max(1, Math.ceil(points.length / 12));
    return points.filter((_, i) => i % every === 0 || i === points.length - 1).map((p) => [group.name, short(p.round), short(p.x), plusMinus(p.y, p.sd)]);
  });
  return table(`${yLabel} over ${xLabel}`, ["run", "round", xLabel, yLabel], rows);
}

/* A table. With an `id` its headings are buttons that sort it. */
function table(caption, head, rows, { mark, id, left = [] } = {}) {
  const order = (id && state.sort[id]) || {};
  const heading = (text, k) => {
    const side = left.includes(text) ? "left" : null;
    if (!id) return el("th", { scope: "col", class: side }, text);
    const down = order.column === text && !order.down;
    const onclick = () => ((state.sort[id] = { column: text, down }), draw(), announce(`sorted by ${text}, ${down ? "falling" : "rising"}`));
    const sign = order.column !== text ? "" : order.down ? " ↓" : " ↑";
    return el("th", { scope: "col", class: side, "aria-sort": sign && (order.down ? "descending" : "ascending") }, el("button", { type: "button", id: `${id}-sort-${k}`, class: "sort", onclick }, text + sign));
  };
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", { class: "unseen" }, caption),
      el("thead", {}, el("tr", {}, head.map(heading))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, k) => (k ? el("td", { class: left.includes(head[k]) ? "left" : mark && mark(row, k) }, cell) : el("th", { scope: "row" }, cell)))))),
    ),
  );
}

/* Items in the order that the user chose for a table; `value` returns an item's value under a heading. Unknown values come last. */
function inOrder(id, items, value) {
  const { column, down } = state.sort[id] || {};
  if (column === undefined) return items;
  const known = (v) => v !== undefined && v !== null && v !== "" && !Number.isNaN(v);
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b || 0 : String(a).localeCompare(String(b), "en", { numeric: true }));
  const keyed = items.map((item) => [value(item, column), item]);
  return keyed.sort(([a], [b]) => known(b) - known(a) || (known(a) ? compare(a, b) * (down ? -1 : 1) : 0)).map(([, item]) => item);
}

/* The range of the target's slider. */
function targetRange() {
  const ys = shownGroups().flatMap((g) => series(g, "round", metric()).map((p) => p.y));
  return ys.length ? [least(ys), most(ys)] : [0, 1];
}

/* A field for a number. An empty or invalid value is replaced by the default, and a screen reader is told so. */
function numberField(id, label, key, allowed, value) {
  const onchange = (event) => {
    const text = event.target.value.trim();
    const valid = text !== "" && allowed(Number(text));
    state[key] = valid ? Number(text) : DEFAULTS[key];
    draw();
    if (!valid) announce(`${label}: not a valid number; back to ${byId(id).value || "none"}`);
  };
  return field(id, label, el("input", { type: "number", step: "any", value, inputmode: "decimal", onchange }));
}

function timeToTarget() {
  const name = metric();
  const [low, high] = targetRange();
  const goal = target();
  const slider = el("input", {
    type: "range", id: "target-slider", min: 0, max: 1000, step: 1, "aria-label": `target ${metricText(name)}, as a slider`, "aria-valuetext": short(goal),
    oninput: (event) => {
      const [from, to] = targetRange(); // read again: the slider may outlive the data it was drawn for
      state.target = Number((from + (event.target.value / 1000) * (to - from)).toPrecision(3));
      draw();
    },
  });
  slider.value = Number.isFinite(goal) ? Math.round(((goal - low) / (high - low || 1)) * 1000) : 0;
  const speeds = [0.1, 0.25, 0.5, 1, 2, 5, 10, 25, 50, 100, 1000];
  const speed = el("input", {
    type: "range", id: "uplink-slider", min: 0, max: speeds.length - 1, step: 1, "aria-label": "uplink, as a slider", "aria-valuetext": short(state.uplink) + " Mbit/s",
    oninput: (event) => ((state.uplink = speeds[event.target.value]), draw()),
  });
  speed.value = nearest(speeds.map(Math.log), Math.log(state.uplink));
  const times = shownGroups().filter((group) => !uploadsNothing(group)).map((group) => {
    const seeds = reached(group);
    const costs = seeds.filter((r) => r !== null);
    return { group, seeds, costs, seconds: costs.length && costs.length === seeds.length ? mean(costs.map((r) => r.seconds)) : Infinity };
  }).sort((a, b) => (Number.isFinite(a.seconds) ? a.seconds : Infinity) - (Number.isFinite(b.seconds) ? b.seconds : Infinity) || 0);
  const longest = most(times.map((t) => (Number.isFinite(t.seconds) ? t.seconds : 0))) || 1;
  const bars = times.map(({ group, seeds, costs, seconds }) => {
    const all = seeds.length > 0 && costs.length === seeds.length;
    const some = costs.length ? `reached by ${costs.length} of ${seeds.length} seeds` : diverged(group).length === seeds.length && seeds.length ? "" : "not reached";
    const ok = Number.isFinite(seconds);
    return { group, name: group.name, share: ok ? Math.max(0.006, seconds / longest) : 0, text: ok ? duration(costs.map((r) => r.seconds)) : all ? "–" : [some, divergedText(group)].filter(Boolean).join(", "), note: all ? spent(costs) : "" };
  });
  const bar = ({ group, name, share, text, note }) =>
    el(
      "li",
      {},
      el("div", { class: "bar-words" }, el("span", { class: "bar-name" }, swatch(group), name), el("strong", {}, text), note ? el("span", { class: "note" }, note) : null),
      el("div", { class: "bar", "aria-hidden": "true" }, share ? el("span", { class: "look", css: { ...look(group), width: 100 * share + "%" } }) : null),
    );
  const positive = (v) => Number.isFinite(v) && v > 0;
  const notNegative = (v) => Number.isFinite(v) && v >= 0;
  const rough = shownGroups().some((g) => runsOf(g).some((run) => rowsOf(run) && estimated(run)));
  const heading = `Time to ${metricText(name)} ${short(goal)}`;
  const barsCsv = () => csvText([["run", "seconds", "seeds", "reached"], ...times.map((t) => [notFormula(t.group.name), Number.isFinite(t.seconds) ? t.seconds : "inf", t.seeds.length, t.costs.length])]);
  return card(
    "time",
    "Time to target",
    "Until the first evaluation at the target; a round lasts as long as its largest upload, downloads cost nothing." + (rough ? " For some older runs only the largest upload of all rounds is known." : ""),
    el(
      "div",
      { class: "controls wide" },
      el("div", { class: "pair" }, numberField("target", `Target ${metricText(name)}`, "target", Number.isFinite, Number.isFinite(goal) ? Number(goal.toPrecision(4)) : ""), slider),
      el("div", { class: "pair" }, numberField("uplink", "Uplink, Mbit/s", "uplink", positive, state.uplink), speed),
      numberField("latency", "Latency a round, s", "latency", notNegative, state.latency),
      numberField("minibatch", "A minibatch, ms", "minibatch", notNegative, state.minibatch),
    ),
    times.length ? [el("ol", { class: "bars", "aria-label": "Time to target, shortest first" }, bars.map(bar)), downloads("time", heading, () => barPicture(heading, bars), barsCsv)] : el("p", { class: "empty" }, shownGroups().length ? "No run that is shown uploads anything." : "No run is shown."),
    shownGroups().filter(uploadsNothing).map((group) => {
      const costs = reached(group).filter((r) => r !== null);
      const rounds = costs.length ? `the target after ${spread(costs.map((r) => r.round), 3)} rounds` : "the target not reached";
      return el("p", { class: "bar-words aside" }, el("span", { class: "bar-name" }, swatch(group), group.name), el("span", { class: "note" }, `uploads nothing, so no uplink ranks it; ${[rounds, divergedText(group)].filter(Boolean).join(", ")}`));
    }),
    shownGroups().length ? groupTable("target-table", heading, targetColumns()) : null,
  );
}

const spent = (costs) => `${spread(costs.map((r) => r.upload_d), 3)} d, ${spread(costs.map((r) => r.round), 3)} rounds`;

function fromTo(values, write) {
  const [low, high] = [write(least(values)), write(most(values))];
  return low === high ? low : `${low} to ${high}`;
}

function traffic() {
  const groups = shownGroups().map((group) => ({ group, run: runsOf(group).find((r) => (r.ledger.block_bytes || []).length) })).filter((g) => g.run);
  if (!groups.length) return null;
  const highest = most(groups.flatMap(({ run }) => run.ledger.block_bytes)) || 1;
  const cards = groups.map(({ group, run }) => {
    const sent = run.ledger.block_bytes;
    const total = sent.reduce((a, b) => a + b, 0);
    const n = sent.length;
    const bar = Math.min(14, 100 / n);
    const picture = svg("svg", { viewBox: "0 0 100 44", preserveAspectRatio: "none", class: "blocks look", css: look(group), "aria-hidden": "true" });
    sent.forEach((b, k) => picture.append(svg("rect", { x: k * bar + Math.min(0.6, bar * 0.08), width: bar - 2 * Math.min(0.6, bar * 0.08), y: 44 - (42 * b) / highest, height: (42 * b) / highest })));
    const largest = lastOf(run.columns.upload_max_bytes) / (run.ledger.dim * run.ledger.itemsize);
    const undivided = Math.abs(largest - 1) < 0.005 || !Number.isFinite(largest) ? "every client uploads the whole model" : `a client uploads ${short(largest, 2)} d a round at most`;
    const text = n === 1 ? "not divided: " + undivided : `${n} blocks, ` + fromTo(sent, bytes) + " each";
    return el("li", {}, el("p", { class: "bar-name" }, swatch(group), group.name), picture, el("p", { class: "note" }, total ? `${text}; ${bytes(total)} in all` + (n === 1 ? "" : ", shared block included") : "uploads nothing"));
  });
  const rows = groups.flatMap(({ group, run }) => run.ledger.block_bytes.map((b, k) => [group.name, k + 1, run.blocks[k] === undefined ? "–" : short(run.blocks[k]), bytes(b)]));
  const blocks = groups.flatMap(({ group, run }) => run.ledger.block_bytes.map((sent, k) => ({ group, name: `${group.name}, block ${k + 1}`, share: sent / highest, text: bytes(sent), sent, block: k + 1 })));
  const blocksCsv = () => csvText([["run", "block", "bytes"], ...blocks.map((b) => [notFormula(b.group.name), b.block, b.sent])]);
  return card(
    "traffic",
    "Traffic per block",
    "Bytes that all clients together uploaded for each block, on one scale; of several seeds, the first.",
    el("ul", { class: "multiples" }, cards),
    downloads("traffic", "Traffic per block", () => barPicture("Traffic per block", blocks.slice(0, 600)), blocksCsv),
    unfold("traffic-numbers", "The numbers as a table", table("Traffic per block", ["run", "block", "parameters", "uploaded"], rows)),
  );
}

function labelsCard(width) {
  const used = [...new Set(shownGroups().flatMap((g) => runsOf(g).map((run) => run.label_counts)))].filter((k) => k !== null && DATA.label_counts[k]);
  if (!used.length) return card("labels", "Labels of the clients", "Not known: the folders of these runs have no label_counts.json, or one that is too large to show.");
  const which = used.includes(state.labelCounts) ? state.labelCounts : used[0];
  const { classes, counts } = DATA.label_counts[which];
  const sizes = counts.map((c) => c.reduce((a, b) => a + b, 0));
  const held = counts.map((c) => c.filter((n) => n > 0).length);
  const text = `${counts.length} clients from left to right, with ${fromTo(sizes, short)} examples and ${short(mean(held), 3)} of ${classes.length} labels on average; deeper: more examples.`;
  const height = Math.max(120, Math.min(420, classes.length * (classes.length > 20 ? 5 : 18)));
  const left = classes.length <= 30 ? Math.min(110, 14 + 6.4 * most(classes.map((c) => c.length))) : 40;
  const canvas = el("canvas", { width: counts.length, height: classes.length, class: "map", css: { height: height + "px" }, "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(counts.length, classes.length);
  const top = most(counts.flat()) || 1;
  const dark = document.documentElement.dataset.theme === "dark";
  const [from, to] = dark ? [[28, 33, 41], [120, 200, 255]] : [[240, 244, 248], [8, 64, 129]];
  counts.forEach((row, x) => row.forEach((n, y) => {
    const share = Math.sqrt(n / top); // so that small counts are visible
    const at = 4 * (y * counts.length + x);
    for (let k = 0; k < 3; k += 1) image.data[at + k] = from[k] + (to[k] - from[k]) * share;
    image.data[at + 3] = 255;
  }));
  pen.putImageData(image, 0, 0);
  const readout = el("p", { class: "note readout" }, "");
  canvas.addEventListener("pointermove", (event) => {
    const rect = canvas.getBoundingClientRect();
    const x = Math.min(counts.length - 1, Math.max(0, Math.floor(((event.clientX - rect.left) / rect.width) * counts.length)));
    const y = Math.min(classes.length - 1, Math.max(0, Math.floor(((event.clientY - rect.top) / rect.height) * classes.length)));
    readout.textContent = `client ${x}: ${counts[x][y]} of ${sizes[x]} examples are ${classes[y]}`;
  });
  const step = Math.max(1, Math.ceil((classes.length * 11) / height));
  const names = el("div", { class: "names", css: { width: left + "px", height: height + "px" }, "aria-hidden": "true" }, classes.map((c, k) => (k % step ? null : el("span", { css: { top: ((k + 0.5) / classes.length) * 100 + "%" } }, c))));
  const seedOf = (k) => [...new Set(DATA.runs.filter((run) => run.label_counts === k).map((run) => run.seed))].join(", ");
  const rows = counts.slice(0, 300).map((c, k) => [k, short(sizes[k]), held[k], classes[c.indexOf(most(c))] + ` (${short((100 * most(c)) / (sizes[k] || 1), 3)} %)`]);
  return card(
    "labels",
    "Labels of the clients",
    text,
    used.length > 1 ? el("div", { class: "controls" }, choose("label-counts", "Partition", used.map((k) => [k, "seed " + seedOf(k)]), which, (k) => ((state.labelCounts = Number(k)), draw()))) : null,
    el("div", { class: "heat" }, names, canvas),
    readout,
    downloads("labels", "Labels of the clients", () => mapPicture("Labels of the clients", canvas, classes), () => csvText([["client", ...classes.map(notFormula)], ...counts.map((c, k) => [k, ...c])])),
    unfold("labels-numbers", "The numbers as a table", table("Labels of the clients" + (counts.length > 300 ? ", the first 300" : ""), ["client", "examples", "labels", "most of"], rows)),
  );
}
