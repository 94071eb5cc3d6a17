/* The whole page: themes, redrawing without losing the focus, and refreshing while runs go on. */

const THEMES = ["auto", "light", "dark"];
let theme = "auto";
try {
  theme = THEMES.includes(localStorage.getItem("fedbcgd-theme")) ? localStorage.getItem("fedbcgd-theme") : "auto";
} catch {
  /* some browsers have no storage for local files */
}
const darkness = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const dark = theme === "dark" || (theme === "auto" && darkness.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[theme];
}

byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("fedbcgd-theme", theme);
  } catch {
    /* the choice lasts until the page is closed */
  }
  applyTheme();
  draw();
  announce(byId("theme").textContent);
});
darkness.addEventListener("change", () => (applyTheme(), draw()));

let serverProblem = ""; // why the server cannot update the page

function problems() {
  const stale = serverProblem ? el("section", { class: "card problem", "aria-labelledby": "stale-heading" }, el("h2", { id: "stale-heading" }, "This page is not up to date"), el("p", {}, serverProblem)) : null;
  return [stale, readingProblems()].filter(Boolean);
}

function readingProblems() {
  if (!DATA.problems.length) return null;
  return el(
    "section",
    { class: "card problem", "aria-labelledby": "problems-heading" },
    el("h2", { id: "problems-heading" }, `${DATA.problems.length} ${DATA.problems.length > 1 ? "things" : "thing"} could not be read`),
    el("ul", {}, DATA.problems.slice(0, 20).map((p) => el("li", {}, el("code", {}, p.where), " ", p.what)), DATA.problems.length > 20 ? el("li", {}, `and ${DATA.problems.length - 20} more`) : null),
  );
}

function lead() {
  const runs = DATA.runs.length;
  if (!runs) return DATA.watch ? "No run has begun in these folders yet. This page fills itself when one does." : "There are no runs in these folders.";
  const counts = {};
  for (const run of DATA.runs) counts[run.status] = (counts[run.status] || 0) + 1;
  return `${runs} ${runs > 1 ? "runs" : "run"}: ` + Object.entries(counts).map(([s, n]) => `${n} ${s}`).join(", ") + ".";
}

/* An error in one section is shown in its place; the others are drawn. */
function guarded(name, make) {
  try {
    return make();
  } catch (error) {
    console.warn(error);
    return el("section", { class: "card problem", "aria-labelledby": name + "-heading" }, el("h2", { id: name + "-heading" }, capital(name)), el("p", {}, `This part cannot be drawn from these folders: ${error.message}`));
  }
}

/* The field that the user is changing: redrawing does not touch its value. */
let busy = null;
document.addEventListener("input", (event) => (busy = ["number", "range", "search"].includes(event.target.type) ? event.target : null), true);
document.addEventListener("change", () => (busy = null), true);
document.addEventListener("focusout", () => (busy = null), true);

/* Replaces the content of an element. If the focused field is in the new content too, it is never removed from the page, so
   that its caret, a drag and an open list survive. */
function replaceContent(container, parts) {
  const fresh = el("div", {}, ...parts);
  const focused = document.activeElement;
  const twin = focused && focused.id && container.contains(focused) && ["number", "range", "search", "select-one"].includes(focused.type) ? fresh.querySelector("#" + CSS.escape(focused.id)) : null;
  if (twin && focused.type === twin.type) graft(container, fresh, focused, twin);
  else container.replaceChildren(...fresh.childNodes);
}

/* Replaces everything in `container` by `fresh`, except the field `focused`, which takes the place of its `twin`. */
function graft(container, fresh, focused, twin) {
  if (container === focused || fresh === twin) return updateField(focused, twin);
  const [mine, theirs] = [[...container.childNodes].find((c) => c.contains(focused)), [...fresh.childNodes].find((c) => c.contains(twin))];
  for (const child of [...container.childNodes]) if (child !== mine) child.remove();
  const others = [...fresh.childNodes];
  const at = others.indexOf(theirs);
  mine.before(...others.slice(0, at));
  mine.after(...others.slice(at + 1));
  return graft(mine, theirs, focused, twin);
}

function updateField(focused, twin) {
  for (const { name, value } of [...twin.attributes]) if (focused.getAttribute(name) !== value) focused.setAttribute(name, value);
  const list = (select) => [...select.options].map((o) => o.value + " " + o.text).join("\n");
  if (focused.type === "select-one" && list(focused) !== list(twin)) focused.replaceChildren(...[...twin.options].map((o) => o.cloneNode(true)));
  if (focused !== busy && (focused.value !== twin.value || focused.validity.badInput)) focused.value = twin.value;
}

function draw() {
  if (state.task >= DATA.tasks.length) state.task = 0;
  const focus = document.activeElement && document.activeElement.id;
  const scrolled = [...document.querySelectorAll(".scroll")].map((s) => [s.getAttribute("aria-label"), s.scrollLeft, s.scrollTop]);
  byId("title").textContent = DATA.tasks.length ? DATA.tasks[state.task] : "No runs yet";
  byId("lead").textContent = lead();
  byId("foot").textContent = `fedbcgd ${DATA.version}. d is the size of the model: FedAvg uploads 1 d a round.`;
  byId("problems").replaceChildren(...problems());
  const choice = () => choose("task", "Task", DATA.tasks.map((t, k) => [k, t]), state.task, (k) => ((state.task = Number(k)), (state.target = null), draw()));
  replaceContent(byId("task-choice"), DATA.tasks.length > 1 ? [el("div", { class: "controls" }, choice())] : []);
  const width = Math.max(280, Math.floor(byId("sections").clientWidth - (innerWidth < 560 ? 26 : 42)));
  const sections = { runs: legend, curves: () => curves(width), metrics: () => otherMetrics(width), clients: () => clientsCard(width), time: timeToTarget, outcomes, "each-run": runsTable, traffic, labels: () => labelsCard(width), configuration };
  replaceContent(byId("sections"), DATA.runs.length ? Object.entries(sections).map(([name, make]) => guarded(name, make)) : []);
  for (const [label, x, y] of scrolled) {
    const box = [...document.querySelectorAll(".scroll")].find((s) => s.getAttribute("aria-label") === label);
    if (box) [box.scrollLeft, box.scrollTop] = [x, y];
  }
  if (focus && byId(focus) && document.activeElement !== byId(focus)) byId(focus).focus({ preventScroll: true });
}

let drawn = 0;
addEventListener("resize", () => {
  clearTimeout(drawn);
  drawn = setTimeout(draw, 120);
});

/* While runs go on: ask the server for changes, and redraw only if there are some. */
let tag = "";
let pause = 2000; // milliseconds between two requests

function showConnection(text, lost) {
  byId("live").classList.toggle("lost", lost);
  byId("live-text").textContent = text;
}

/* Keeps the chosen task: its number changes when runs of other tasks come or go. */
function replaceData(fresh) {
  const folder = (groupsOfTask().flatMap((g) => g.runs.map((k) => DATA.runs[k].folder)))[0];
  DATA = { ...fresh, watch: true };
  const now = DATA.groups.find((g) => g.runs.some((k) => DATA.runs[k].folder === folder));
  if (now) state.task = now.task;
}

async function fetchData() {
  let response;
  let content;
  try {
    response = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    content = response.status === 200 ? await response.json() : response.status === 304 ? null : (await response.text()).trim();
  } catch {
    return showConnection("not connected", true);
  }
  const before = serverProblem;
  const fine = response.status === 200 || response.status === 304;
  serverProblem = fine ? "" : content || `the server answered ${response.status}`;
  showConnection(fine ? "live" : "not live", !fine);
  if (serverProblem !== before) {
    byId("problems").replaceChildren(...problems());
    announce(serverProblem ? "This page is not up to date: " + serverProblem : "live again");
  }
  if (response.status !== 200) return undefined;
  const runs = DATA.runs.length;
  tag = response.headers.get("ETag") || "";
  replaceData(content);
  draw();
  if (DATA.runs.length !== runs) announce(`${DATA.runs.length} runs now`);
  document.documentElement.dataset.refreshed = String(Number(document.documentElement.dataset.refreshed || 0) + 1);
  return undefined;
}

async function refresh() {
  try {
    await fetchData();
  } finally {
    setTimeout(refresh, pause);
  }
}

applyTheme();
draw();
if (DATA.watch) {
  byId("live").hidden = false;
  refresh();
}
