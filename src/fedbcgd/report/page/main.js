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

function problems() {
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

function draw() {
  if (state.task >= DATA.tasks.length) state.task = 0;
  const focus = document.activeElement && document.activeElement.id;
  const scrolled = [...document.querySelectorAll(".scroll")].map((s) => [s.getAttribute("aria-label"), s.scrollLeft, s.scrollTop]);
  byId("title").textContent = DATA.tasks.length ? DATA.tasks[state.task] : "No runs yet";
  byId("lead").textContent = lead();
  byId("foot").textContent = `fedbcgd ${DATA.version}. d is the size of the model: FedAvg uploads 1 d a round.`;
  byId("problems").replaceChildren(...[problems()].filter(Boolean));
  byId("task-choice").replaceChildren(
    ...(DATA.tasks.length > 1 ? [el("div", { class: "controls" }, choose("task", "Task", DATA.tasks.map((t, k) => [k, t]), state.task, (k) => ((state.task = Number(k)), (state.target = null), draw())))] : []),
  );
  const width = Math.max(280, Math.floor(byId("sections").clientWidth - (innerWidth < 560 ? 26 : 42)));
  const parts = DATA.runs.length ? [legend(), curves(width), timeToTarget(), outcomes(), traffic(), holdingsCard(width), configuration()] : [];
  byId("sections").replaceChildren(...parts.filter(Boolean));
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
async function refresh() {
  const live = byId("live");
  try {
    const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    live.classList.remove("lost");
    byId("live-text").textContent = "live";
    if (answer.status === 200) {
      const before = DATA.runs.length;
      tag = answer.headers.get("ETag") || "";
      const fresh = await answer.json();
      const typing = document.activeElement && ["INPUT", "SELECT"].includes(document.activeElement.tagName) && ["number", "range", "select-one"].includes(document.activeElement.type);
      DATA = { ...fresh, watch: true };
      if (!typing) draw();
      else document.activeElement.addEventListener("blur", draw, { once: true });
      if (DATA.runs.length !== before) say(`${DATA.runs.length} runs now`);
      document.documentElement.dataset.refreshed = String(Number(document.documentElement.dataset.refreshed || 0) + 1);
    }
  } catch {
    live.classList.add("lost");
    byId("live-text").textContent = "not connected";
  }
  setTimeout(refresh, 2000);
}

applyTheme();
draw();
if (DATA.watch) {
  byId("live").hidden = false;
  refresh();
}
