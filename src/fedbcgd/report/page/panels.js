/* The panels above the tables: which runs, the curves, the time to a target, traffic, labels. */

function card(id, heading, lead, ...children) {
  return el("section", { class: "card", "aria-labelledby": id + "-heading" }, el("h2", { id: id + "-heading" }, heading), lead ? el("p", { class: "lead" }, lead) : null, ...children);
}

function toggle(runs, show) {
  for (const run of runs) show ? state.hidden.delete(run.place) : state.hidden.add(run.place);
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
            say(`${group.name} ${on ? "hidden" : "shown"}`);
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
    el("button", { type: "button", id, class: "quiet", onclick: () => (toggle(all, show), draw(), say(show ? "all shown" : "all hidden")) }, text);
  return el(
    "section",
    { class: "runs", "aria-labelledby": "runs-heading" },
    el("h2", { id: "runs-heading", class: "unseen" }, "Runs: show and hide"),
    el("ul", { class: "chips" }, chips, el("li", { class: "all" }, everything("show-all", "Show all", true), everything("hide-all", "Hide all", false))),
  );
}

const metricWord = (name) => name.replace(/_/g, " ");

function curves(width) {
  const name = metric();
  const axis = axesOfTask().includes(state.axis) ? state.axis : "upload_d";
  const groups = shownGroups();
  const lines = groups.map((group) => ({ group, points: series(group, axis, name) }));
  const thin = groups.flatMap((group) => (state.seeds ? runsOf(group) : unsettled(group)).map((run) => ({ group, thin: true, alone: !settled(group).length, points: series(group, axis, name, [run]) })));
  const controls = el(
    "div",
    { class: "controls" },
    segments("axis", "Against", axesOfTask().map((a) => [a, AXES[a].name]), axis, (a) => {
      state.axis = a;
      draw();
      say("against " + AXES[a].label);
    }),
    choose("metric", "Metric", metricsOfTask().map((m) => [m, metricWord(m)]), name, (m) => {
      state.metric = m;
      state.target = null;
      draw();
    }),
    el(
      "div",
      { class: "ticks" },
      tick("log-x", "log x", state.logX, (on) => ((state.logX = on), draw())),
      tick("log-y", "log y", state.logY, (on) => ((state.logY = on), draw())),
      groups.some((g) => runsOf(g).length > 1) ? tick("seeds", "each seed", state.seeds, (on) => ((state.seeds = on), draw())) : null,
    ),
  );
  const chart = lineChart("curves-chart", [...thin, ...lines], {
    xLabel: AXES[axis].label, yLabel: metricWord(name), logX: state.logX, logY: state.logY, goal: groups.length > 1 || state.target !== null ? target() : NaN, width,
  });
  const banded = lines.some((l) => l.points.some((p) => p.n > 1));
  return card(
    "curves",
    name ? capital(metricWord(name)) : "Curves",
    null,
    controls,
    el("figure", {}, chart, el("figcaption", {}, "Against " + AXES[axis].label + ((banded ? "; mean over seeds, band ± one standard deviation" : "") + (groups.some((g) => unsettled(g).length) ? "; thin lines are runs that diverged or are not finished, which no mean holds." : ".")), axis === "time" ? " " + assumptions() : "")),
    unfold("curves-numbers", "The numbers as a table", pointsTable(lines, AXES[axis].label, metricWord(name))),
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

function table(caption, head, rows, mark) {
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", { class: "unseen" }, caption),
      el("thead", {}, el("tr", {}, head.map((h) => el("th", { scope: "col" }, h)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, k) => (k ? el("td", { class: mark && mark(row, k) }, cell) : el("th", { scope: "row" }, cell)))))),
    ),
  );
}

function assumptions() {
  const parts = [`every client uploads at ${short(state.uplink)} Mbit/s and a round lasts as long as its largest upload`];
  parts.push(state.latency ? `plus ${short(state.latency)} s a round` : "no latency");
  parts.push(state.minibatch ? `plus ${short(state.minibatch)} ms for each minibatch of a client` : "no time for computing");
  const rough = shownGroups().some((g) => runsOf(g).some((run) => rowsOf(run) && estimated(run)));
  return `Assumed: ${parts.join(", ")}, none for downloads.` + (rough ? " Of some older runs only the largest upload of all rounds is known: for them every round is taken to have it, which is at most too slow." : "");
}

/* What the target's slider spans. */
function targetRange() {
  const ys = shownGroups().flatMap((g) => series(g, "round", metric()).map((p) => p.y));
  return ys.length ? [least(ys), most(ys)] : [0, 1];
}

/* A field for a number. What is empty, no number or not allowed brings back what the page began with, and that is said. */
function numberField(id, label, key, allowed, value) {
  const onchange = (event) => {
    const text = event.target.value.trim();
    const right = text !== "" && allowed(Number(text));
    state[key] = right ? Number(text) : DEFAULTS[key];
    draw();
    if (!right) say(`${label}: that is no number for it; back to ${byId(id).value || "none"}`);
  };
  return field(id, label, el("input", { type: "number", step: "any", value, inputmode: "decimal", onchange }));
}

function timeToTarget() {
  const name = metric();
  const [low, high] = targetRange();
  const goal = target();
  const slider = el("input", {
    type: "range", id: "target-slider", min: 0, max: 1000, step: 1, "aria-label": `target ${metricWord(name)}, as a slider`, "aria-valuetext": short(goal),
    oninput: (event) => {
      const [from, to] = targetRange(); // of now: this slider may outlive what it was drawn for
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
  const found = shownGroups().filter((group) => !uploadsNothing(group)).map((group) => {
    const got = reached(group);
    const there = got.filter((r) => r !== null);
    return { group, got, there, seconds: there.length && there.length === got.length ? mean(there.map((r) => r.seconds)) : Infinity };
  }).sort((a, b) => (Number.isFinite(a.seconds) ? a.seconds : Infinity) - (Number.isFinite(b.seconds) ? b.seconds : Infinity) || 0);
  const longest = most(found.map((f) => (Number.isFinite(f.seconds) ? f.seconds : 0))) || 1;
  const bars = found.map(({ group, got, there, seconds }) => {
    const ok = Number.isFinite(seconds);
    const whole = got.length > 0 && there.length === got.length;
    const far = there.length ? `reached by ${there.length} of ${got.length} seeds` : diverged(group).length === got.length && got.length ? "" : "not reached";
    const words = ok ? duration(there.map((r) => r.seconds)) : whole ? "–" : [far, divergedWords(group)].filter(Boolean).join(", ");
    return el(
      "li",
      {},
      el("div", { class: "bar-words" }, el("span", { class: "bar-name" }, swatch(group), group.name), el("strong", {}, words), whole ? el("span", { class: "note" }, spent(there)) : null),
      el("div", { class: "bar", "aria-hidden": "true" }, ok ? el("span", { class: "look", css: { ...look(group), width: Math.max(0.6, (100 * seconds) / longest) + "%" } }) : null),
    );
  });
  const positive = (v) => Number.isFinite(v) && v > 0;
  const notNegative = (v) => Number.isFinite(v) && v >= 0;
  return card(
    "time",
    "Time to target",
    null,
    el(
      "div",
      { class: "controls wide" },
      el("div", { class: "pair" }, numberField("target", `Target ${metricWord(name)}`, "target", Number.isFinite, Number.isFinite(goal) ? Number(goal.toPrecision(4)) : ""), slider),
      el("div", { class: "pair" }, numberField("uplink", "Uplink, Mbit/s", "uplink", positive, state.uplink), speed),
      numberField("latency", "Latency a round, s", "latency", notNegative, state.latency),
      numberField("minibatch", "A minibatch, ms", "minibatch", notNegative, state.minibatch),
    ),
    found.length ? el("ol", { class: "bars", "aria-label": "Time to target, shortest first" }, bars) : el("p", { class: "empty" }, shownGroups().length ? "No run that is shown uploads anything." : "No run is shown."),
    shownGroups().filter(uploadsNothing).map((group) => {
      const there = reached(group).filter((r) => r !== null);
      const rounds = there.length ? `the target after ${spread(there.map((r) => r.round), 3)} rounds` : "the target not reached";
      return el("p", { class: "bar-words aside" }, el("span", { class: "bar-name" }, swatch(group), group.name), el("span", { class: "note" }, `uploads nothing, so no uplink ranks it; ${[rounds, divergedWords(group)].filter(Boolean).join(", ")}`));
    }),
    el("p", { class: "note" }, "The first evaluation that meets the target counts, also where a run falls back behind it later. " + (state.target === null ? "This target is what every finished run that is shown holds at its end, but for those that end less than half as well as the best. " : "") + assumptions()),
  );
}

const spent = (there) => `${spread(there.map((r) => r.upload_d), 3)} d, ${spread(there.map((r) => r.round), 3)} rounds`;

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
    const words = n === 1 ? "not divided: " + undivided : `${n} blocks, ` + fromTo(sent, bytes) + " each";
    return el("li", {}, el("p", { class: "bar-name" }, swatch(group), group.name), picture, el("p", { class: "note" }, total ? `${words}; ${bytes(total)} in all` + (n === 1 ? "" : ", shared block included") : "uploads nothing"));
  });
  const rows = groups.flatMap(({ group, run }) => run.ledger.block_bytes.map((b, k) => [group.name, k + 1, run.blocks[k] === undefined ? "–" : short(run.blocks[k]), bytes(b)]));
  return card(
    "traffic",
    "Traffic per block",
    "What all clients together uploaded for each block, so far where a run goes on, on one scale. Of several seeds the first.",
    el("ul", { class: "multiples" }, cards),
    unfold("traffic-numbers", "The numbers as a table", table("Traffic per block", ["run", "block", "parameters", "uploaded"], rows)),
  );
}

function holdingsCard(width) {
  const used = [...new Set(shownGroups().flatMap((g) => runsOf(g).map((run) => run.holdings)))].filter((k) => k !== null && DATA.holdings[k]);
  if (!used.length) return card("labels", "Labels of the clients", "Not known: the folders of these runs hold no holdings.json, or one too large to show.");
  const which = used.includes(state.holdings) ? state.holdings : used[0];
  const { classes, counts } = DATA.holdings[which];
  const sizes = counts.map((c) => c.reduce((a, b) => a + b, 0));
  const held = counts.map((c) => c.filter((n) => n > 0).length);
  const words = `${counts.length} clients, ${classes.length} labels; ${fromTo(sizes, short)} examples a client, who holds ${short(mean(held), 3)} labels on average.`;
  const height = Math.max(120, Math.min(420, classes.length * (classes.length > 20 ? 5 : 18)));
  const left = classes.length <= 30 ? Math.min(110, 14 + 6.4 * most(classes.map((c) => c.length))) : 40;
  const canvas = el("canvas", { width: counts.length, height: classes.length, class: "map", css: { height: height + "px" }, "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(counts.length, classes.length);
  const top = most(counts.flat()) || 1;
  const dark = document.documentElement.dataset.theme === "dark";
  const [from, to] = dark ? [[28, 33, 41], [120, 200, 255]] : [[240, 244, 248], [8, 64, 129]];
  counts.forEach((row, x) => row.forEach((n, y) => {
    const share = Math.sqrt(n / top); // small holdings are seen too
    const at = 4 * (y * counts.length + x);
    for (let k = 0; k < 3; k += 1) image.data[at + k] = from[k] + (to[k] - from[k]) * share;
    image.data[at + 3] = 255;
  }));
  pen.putImageData(image, 0, 0);
  const told = el("p", { class: "note told" }, "Point at a place to read it.");
  canvas.addEventListener("pointermove", (event) => {
    const rect = canvas.getBoundingClientRect();
    const x = Math.min(counts.length - 1, Math.max(0, Math.floor(((event.clientX - rect.left) / rect.width) * counts.length)));
    const y = Math.min(classes.length - 1, Math.max(0, Math.floor(((event.clientY - rect.top) / rect.height) * classes.length)));
    told.textContent = `client ${x}: ${counts[x][y]} of ${sizes[x]} examples are ${classes[y]}`;
  });
  const step = Math.max(1, Math.ceil((classes.length * 11) / height));
  const names = el("div", { class: "names", css: { width: left + "px", height: height + "px" }, "aria-hidden": "true" }, classes.map((c, k) => (k % step ? null : el("span", { css: { top: ((k + 0.5) / classes.length) * 100 + "%" } }, c))));
  const seedOf = (k) => [...new Set(DATA.runs.filter((run) => run.holdings === k).map((run) => run.seed))].join(", ");
  const rows = counts.slice(0, 300).map((c, k) => [k, short(sizes[k]), held[k], classes[c.indexOf(most(c))] + ` (${short((100 * most(c)) / (sizes[k] || 1), 3)} %)`]);
  return card(
    "labels",
    "Labels of the clients",
    words,
    used.length > 1 ? el("div", { class: "controls" }, choose("holdings", "Partition", used.map((k) => [k, "seed " + seedOf(k)]), which, (k) => ((state.holdings = Number(k)), draw()))) : null,
    el("div", { class: "heat" }, names, canvas),
    el("p", { class: "note centre" }, "clients, from left to right; the deeper the colour, the more examples"),
    told,
    unfold("labels-numbers", "The numbers as a table", table("Labels of the clients" + (counts.length > 300 ? ", the first 300" : ""), ["client", "examples", "labels", "most of"], rows)),
  );
}
