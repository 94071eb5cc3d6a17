/* Numbers of runs and of groups of seeds, and their formats. */

const COSTS = new Set([
  "round", "upload_d", "upload_bytes", "upload_max_bytes", "upload_wait_bytes", "download_bytes", "gradient_evaluations", "seconds", "hours",
]);

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;

function deviation(values) {
  if (values.length < 2) return NaN;
  const m = mean(values);
  const sd = Math.sqrt(values.reduce((sum, v) => sum + (v - m) ** 2, 0) / (values.length - 1));
  return sd > 1e-12 * Math.abs(m) ? sd : 0; // smaller ones are rounding errors
}

const groupsOfTask = () => DATA.groups.filter((g) => g.task === state.task);
const runsOf = (group) => group.runs.map((k) => DATA.runs[k]).filter((run) => !state.hidden.has(run.folder));
const shownGroups = () => groupsOfTask().filter((g) => runsOf(g).length);
/* Runs that diverged: they count as seeds, but are in no mean and never reach the target. */
const diverged = (group) => runsOf(group).filter((run) => run.status === "diverged");
/* The runs over which means are taken: the finished ones or, if none is finished, those that are running. */
function settled(group) {
  const done = runsOf(group).filter((run) => run.status === "finished");
  return done.length ? done : runsOf(group).filter((run) => run.status !== "diverged");
}
const unsettled = (group) => runsOf(group).filter((run) => !settled(group).includes(run));
const seedsOf = (group) => settled(group).length + diverged(group).length;
const divergedText = (group) => (diverged(group).length ? `${diverged(group).length} of ${seedsOf(group)} diverged` : "");
const CLIENTS = "clients_"; // begins the columns of measurements on each client's own part
const CLIENTS_END = /_(mean|worst_tenth|lowest_quarter)$/;

/* True for a metric that should fall, according to the runs if they say so, else according to its name. */
function falls(name) {
  const said = DATA.runs.find((run) => run.facts.goal && isOf(run.facts.metric, name));
  return said ? said.facts.goal === "min" : /loss|gap|error|mae|mse|mape|perplexity|nll|deviation|_std$/.test(name);
}
const isOf = (metric, name) => metric !== undefined && (name === metric || name.replace(CLIENTS_END, "").endsWith("_" + metric));
const rowsOf = (run) => (run.columns.round || []).length;

function metricsOfTask() {
  const names = new Set();
  const runs = groupsOfTask().flatMap((g) => g.runs.map((k) => DATA.runs[k]));
  for (const run of runs) for (const name of Object.keys(run.columns)) if (!COSTS.has(name) && !name.startsWith(CLIENTS)) names.add(name);
  const kinds = ["test_", "validation_", ""];
  const rank = (name) => {
    const main = runs.some((run) => isOf(run.facts.metric, name)) ? 0 : name.endsWith("accuracy") ? 1 : name.endsWith("loss") ? 3 : 2;
    return 3 * main + kinds.findIndex((kind) => name.startsWith(kind));
  };
  return [...names].sort((a, b) => rank(a) - rank(b));
}

/* The columns about clients, by metric: {accuracy: [clients_accuracy_mean, …]}. */
function clientMetrics() {
  const out = {};
  const runs = shownGroups().flatMap(runsOf);
  const names = new Set(runs.flatMap((run) => Object.keys(run.columns)).filter((name) => name.startsWith(CLIENTS)));
  for (const name of names) (out[name.slice(CLIENTS.length).replace(/_(mean|std|worst_tenth|lowest_quarter)$/, "")] ||= []).push(name);
  return out;
}

function metric() {
  const names = metricsOfTask();
  return names.includes(state.metric) ? state.metric : names[0] || "";
}

/* A value of a column; null if a damaged folder does not have it. */
const cell = (run, name, i) => (run.columns[name] ? run.columns[name][i] : null);
const orNaN = (v) => (v === null || v === undefined ? NaN : v);

/* Seconds until each row, on the uplink that the user chose. */
function secondsOf(run) {
  const cohort = Number(run.options["run.cohort"]) || 10;
  return (run.columns.round || []).map((round, i) => {
    const waited = cell(run, "upload_wait_bytes", i);
    const bytes = waited !== null ? waited : round * orNaN(cell(run, "upload_max_bytes", i));
    const computing = (cell(run, "gradient_evaluations", i) / cohort) * (state.minibatch / 1000);
    return (bytes * 8) / (state.uplink * 1e6) + round * state.latency + computing;
  });
}

/* True for centralised training, whose time does not depend on an uplink. */
function uploadsNothing(group) {
  const runs = runsOf(group).filter((run) => rowsOf(run) && run.columns.upload_d);
  return runs.length > 0 && runs.every((run) => lastOf(run.columns.upload_d) === 0);
}

/* Folders of earlier versions have only the largest upload of all rounds. */
const estimated = (run) => !run.columns.upload_wait_bytes || run.columns.upload_wait_bytes.some((v) => v === null);

const AXES = {
  upload_d: { name: "Upload, d", label: "upload of a client, in d", of: (run) => run.columns.upload_d },
  upload_mb: { name: "MB", label: "upload of all clients, in MB", of: (run) => run.columns.upload_bytes && run.columns.upload_bytes.map((b) => (b === null ? null : b / 1e6)) },
  round: { name: "Rounds", label: "rounds", of: (run) => run.columns.round },
  gradient_evaluations: { name: "Gradients", label: "gradient evaluations (minibatches)", of: (run) => run.columns.gradient_evaluations },
  time: { name: "Time", get label() { return timeUnit("time").name + " on the chosen uplink"; }, of: (run) => inUnit(secondsOf(run), "time") },
  hours: { name: "Hours", get label() { return `${timeUnit("hours").name} on ${network() === OWN ? "the run's own network" : network()}`; }, of: (run) => inUnit(networkSeconds(run), "hours") },
};

const UNITS = [
  { seconds: 0.001, sign: "ms", name: "milliseconds" },
  { seconds: 1, sign: "s", name: "seconds" },
  { seconds: 60, sign: "min", name: "minutes" },
  { seconds: 3600, sign: "h", name: "hours" },
  { seconds: 86400, sign: "days", name: "days" },
];

/* The unit in which to show a time: seconds up to two minutes, and so on. */
const unitFor = (seconds) => UNITS.filter((u) => u.seconds < 1 || seconds >= (u.seconds > 1 ? 2 : 1) * u.seconds).pop();
const OWN = "own"; // the network that a run itself was on
const hoursOn = (run, name) => (name === OWN ? run.columns.hours : (run.profiles || {})[name]);
function networkSeconds(run) {
  const hours = hoursOn(run, network());
  return hours && hours.map((h) => (h === null ? null : h * 3600));
}

/* The networks on which at least one run of the task has hours, and which of them is chosen. */
function networks() {
  const runs = groupsOfTask().flatMap((g) => g.runs.map((k) => DATA.runs[k]));
  return [OWN, ...new Set(runs.flatMap((run) => Object.keys(run.profiles || {})))].filter((name) => runs.some((run) => hoursOn(run, name)));
}
const network = () => (networks().includes(state.network) ? state.network : networks()[0]);

/* One unit for all lines of the chart. */
function timeUnit(axis) {
  const ends = shownGroups().flatMap(runsOf).flatMap((run) => (axis === "time" ? secondsOf(run) : networkSeconds(run) || []));
  return unitFor(most(ends.filter(Number.isFinite)));
}

function inUnit(seconds, axis) {
  const unit = timeUnit(axis).seconds;
  return seconds && seconds.map((s) => (s === null ? null : s / unit));
}

function axesOfTask() {
  return Object.keys(AXES).filter((axis) => axis !== "hours" || networks().length);
}

/* Mean and deviation over the seeds of a group, at the rounds that all of them have. */
function series(group, axis, name, among = settled(group)) {
  const runs = among.filter((run) => rowsOf(run) && run.columns[name] && AXES[axis].of(run));
  if (!runs.length) return [];
  const at = runs.map((run) => {
    const x = AXES[axis].of(run);
    return new Map(run.columns.round.map((r, i) => [r, [x[i], run.columns[name][i]]]));
  });
  const points = [];
  for (const r of at[0].keys()) {
    const pairs = at.map((m) => m.get(r));
    if (pairs.some((p) => !p || !Number.isFinite(p[0]) || !Number.isFinite(p[1]))) continue;
    const y = pairs.map((p) => p[1]);
    points.push({ round: r, x: mean(pairs.map((p) => p[0])), y: mean(y), sd: deviation(y), n: y.length });
  }
  return points;
}

/* Replaces each point by the mean of `count` evaluations around it, or of fewer at the ends; `raw` is the value itself. */
function smoothed(points, count) {
  if (count < 2) return points;
  return points.map((p, i) => {
    const reach = Math.min(Math.floor(count / 2), i, points.length - 1 - i);
    const near = points.slice(i - reach, i + reach + 1);
    return { ...p, raw: p.y, sdRaw: p.sd, y: mean(near.map((q) => q.y)), sd: mean(near.map((q) => q.sd)) };
  });
}

const lastOf = (values) => (values || []).reduce((last, v) => (v === null ? last : v), NaN);

/* The mean over the last tenth of the rounds, as in the paper's tables. */
function lastTenth(run, name) {
  const rounds = run.columns.round || [];
  const from = 0.9 * rounds[rounds.length - 1];
  const values = rounds.map((r, i) => [r, (run.columns[name] || [])[i]]).filter(([r, v]) => r > from && v !== null && v !== undefined);
  return values.length ? mean(values.map((p) => p[1])) : lastOf(run.columns[name]);
}

/* The user's target, or the value that every finished run that is shown ends with. Runs that end less than half as well as the
   best are not considered: every curve passes their end at once, by chance. */
function target() {
  if (state.target !== null) return state.target;
  const name = metric();
  const runs = shownGroups().flatMap(runsOf).filter((run) => run.status !== "diverged");
  const done = runs.filter((run) => run.status === "finished");
  const ends = (done.length ? done : runs).map((run) => lastTenth(run, name)).filter(Number.isFinite);
  if (!ends.length) return NaN;
  if (falls(name)) return most(ends.filter((v) => v <= 2 * least(ends) || least(ends) <= 0));
  return Math.floor(least(ends.filter((v) => v >= most(ends) / 2 || most(ends) <= 0)) * 1000) / 1000;
}

/* What each seed of a group had spent when it first reached the target; null for seeds that did not. */
function reached(group) {
  const name = metric();
  const goal = target();
  const silent = uploadsNothing(group);
  const costs = settled(group).map((run) => {
    const i = (run.columns[name] || []).findIndex((v) => v !== null && (falls(name) ? v <= goal : v >= goal));
    if (i < 0) return null;
    const onProfiles = Object.entries(run.profiles || {}).map(([profile, hours]) => ["on " + profile, silent ? NaN : hours[i] * 3600]);
    const spent = Object.fromEntries(["upload_d", "upload_bytes", "gradient_evaluations"].map((key) => [key, orNaN(cell(run, key, i))]));
    return { round: run.columns.round[i], ...spent, seconds: silent ? NaN : secondsOf(run)[i], ...Object.fromEntries(onProfiles) };
  });
  return [...costs, ...diverged(group).map(() => null)];
}

/* Network profiles under which every shown run has hours. */
function profiles() {
  const runs = shownGroups().flatMap(runsOf);
  const first = runs.length ? Object.keys(runs[0].profiles || {}) : [];
  return first.filter((name) => runs.every((run) => run.profiles && run.profiles[name]));
}

function short(v, digits = 4) {
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  if (!Number.isFinite(v)) return v > 0 ? "∞" : "−∞";
  if (v === 0) return "0";
  const size = Math.abs(v);
  if (size >= 1e6 || size < 1e-4) return v.toExponential(Math.max(0, digits - 2)).replace("e+", "e").replace("-", "−");
  if (Number.isInteger(v)) return v.toLocaleString("en-GB");
  return Number(v.toPrecision(digits)).toLocaleString("en-GB", { maximumSignificantDigits: digits });
}

/* Mean and deviation with the same number of decimals, so that the deviation has two digits. */
function plusMinus(m, sd, digits = 4) {
  if (!(sd > 0)) return short(m, digits);
  const decimals = Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(sd))));
  if (Math.abs(m) >= 1e6 || sd < 1e-6) return short(m, digits) + " ± " + short(sd, 2);
  const write = (v) => v.toLocaleString("en-GB", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return write(m) + " ± " + write(sd);
}

function spread(values, digits = 4) {
  const known = values.filter((v) => v !== null && Number.isFinite(v));
  return known.length ? plusMinus(mean(known), deviation(known), digits) : "–";
}

/* Times in seconds, as mean and deviation in one unit. */
function duration(values) {
  const known = values.filter(Number.isFinite);
  if (!known.length) return "–";
  const m = mean(known);
  const unit = unitFor(m);
  return spread(known.map((s) => s / unit.seconds), 3) + " " + unit.sign;
}

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let k = 0;
  while (n >= 1000 && k < units.length - 1) {
    n /= 1000;
    k += 1;
  }
  return short(n, 3) + " " + units[k];
}
