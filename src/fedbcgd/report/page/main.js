/* Putting it together: themes, drawing again without losing the focus, and the refresh while runs go on. */

const THEMES = ["auto", "light", "dark"];
let theme = "auto";
try {
  theme = THEMES.includes(localStorage.getItem("fedbcgd-theme")) ? localStorage.getItem("fedbcgd-theme") : "auto";
} catch {
  /* not every browser lets a file keep anything */
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
    /* then it holds until the page is closed */
  }
  applyTheme();
  draw();
  say(byId("theme").textContent);
});
darkness.addEventListener("change", () => (applyTheme(), draw()));

let trouble = ""; // what the server says that it cannot do now

function problems() {
  const stale = trouble ? el("section", { class: "card problem", "aria-labelledby": "trouble-heading" }, el("h2", { id: "trouble-heading" }, "This page is not up to date"), el("p", {}, trouble)) : null;
  return [stale, unread()].filter(Boolean);
}

function unread() {
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

/* One part that cannot be drawn takes none of the others with it. */
function guarded(name, make) {
  try {
    return make();
  } catch (error) {
    console.warn(error);
    return el("section", { class: "card problem", "aria-labelledby": name + "-heading" }, el("h2", { id: name + "-heading" }, capital(name)), el("p", {}, `This part cannot be drawn from what the folders say: ${error.message}`));
  }
}

/* The field whose text or slider is being changed and has not been committed yet: nothing is put into it. */
let busy = null;
document.addEventListener("input", (event) => (busy = ["number", "range"].includes(event.target.type) ? event.target : null), true);
document.addEventListener("change", () => (busy = null), true);
document.addEventListener("focusout", () => (busy = null), true);

/* Puts new content into a place, around the field that has the focus if it is there again: that one is never taken out of the
   page, so a caret, a drag and an open list survive. */
function put(place, parts) {
  const fresh = el("div", {}, ...parts);
  const kept = document.activeElement;
  const twin = kept && kept.id && place.contains(kept) && ["number", "range", "select-one"].includes(kept.type) ? fresh.querySelector("#" + CSS.escape(kept.id)) : null;
  if (twin && kept.type === twin.type) graft(place, fresh, kept, twin);
  else place.replaceChildren(...fresh.childNodes);
}

function graft(place, fresh, kept, twin) {
  if (place === kept || fresh === twin) return renew(kept, twin);
  const [mine, theirs] = [[...place.childNodes].find((c) => c.contains(kept)), [...fresh.childNodes].find((c) => c.contains(twin))];
  for (const child of [...place.childNodes]) if (child !== mine) child.remove();
  const others = [...fresh.childNodes];
  const at = others.indexOf(theirs);
  mine.before(...others.slice(0, at));
  mine.after(...others.slice(at + 1));
  return graft(mine, theirs, kept, twin);
}

function renew(kept, twin) {
  for (const { name, value } of [...twin.attributes]) if (kept.getAttribute(name) !== value) kept.setAttribute(name, value);
  const list = (select) => [...select.options].map((o) => o.value + " " + o.text).join("\n");
  if (kept.type === "select-one" && list(kept) !== list(twin)) kept.replaceChildren(...[...twin.options].map((o) => o.cloneNode(true)));
  if (kept !== busy && (kept.value !== twin.value || kept.validity.badInput)) kept.value = twin.value;
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
  put(byId("task-choice"), DATA.tasks.length > 1 ? [el("div", { class: "controls" }, choice())] : []);
  const width = Math.max(280, Math.floor(byId("sections").clientWidth - (innerWidth < 560 ? 26 : 42)));
  const sections = { runs: legend, curves: () => curves(width), time: timeToTarget, outcomes, traffic, labels: () => holdingsCard(width), configuration };
  put(byId("sections"), DATA.runs.length ? Object.entries(sections).map(([name, make]) => guarded(name, make)) : []);
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

/* While runs go on: ask whether anything changed, and draw again only then. What the user typed meanwhile stays. */
let tag = "";
let pause = 2000; // milliseconds between two questions

function liveness(words, lost) {
  byId("live").classList.toggle("lost", lost);
  byId("live-text").textContent = words;
}

/* The task that is looked at has another number when runs of others come or go. */
function replaceData(fresh) {
  const place = (groupsOfTask().flatMap((g) => g.runs.map((k) => DATA.runs[k].place)))[0];
  DATA = { ...fresh, watch: true };
  const now = DATA.groups.find((g) => g.runs.some((k) => DATA.runs[k].place === place));
  if (now) state.task = now.task;
}

async function ask() {
  let answer;
  let told;
  try {
    answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    told = answer.status === 200 ? await answer.json() : answer.status === 304 ? null : (await answer.text()).trim();
  } catch {
    return liveness("not connected", true);
  }
  const before = trouble;
  const fine = answer.status === 200 || answer.status === 304;
  trouble = fine ? "" : told || `the server answered ${answer.status}`;
  liveness(fine ? "live" : "not live", !fine);
  if (trouble !== before) {
    byId("problems").replaceChildren(...problems());
    say(trouble ? "This page is not up to date: " + trouble : "live again");
  }
  if (answer.status !== 200) return undefined;
  const runs = DATA.runs.length;
  tag = answer.headers.get("ETag") || "";
  replaceData(told);
  draw();
  if (DATA.runs.length !== runs) say(`${DATA.runs.length} runs now`);
  document.documentElement.dataset.refreshed = String(Number(document.documentElement.dataset.refreshed || 0) + 1);
  return undefined;
}

async function refresh() {
  try {
    await ask();
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
