/* Line charts: drawn as SVG, read with the pointer or the arrow keys. */

const MARKS = {
  o: (s) => `M${-s},0a${s},${s} 0 1,0 ${2 * s},0a${s},${s} 0 1,0 ${-2 * s},0Z`,
  s: (s) => shape([[-1, -1], [1, -1], [1, 1], [-1, 1]], 0.9 * s),
  D: (s) => shape([[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]], s),
  d: (s) => shape([[0, -1.4], [0.8, 0], [0, 1.4], [-0.8, 0]], s),
  "^": (s) => shape([[0, -1.2], [1.1, 0.9], [-1.1, 0.9]], s),
  v: (s) => shape([[0, 1.2], [1.1, -0.9], [-1.1, -0.9]], s),
  "<": (s) => shape([[-1.2, 0], [0.9, -1.1], [0.9, 1.1]], s),
  ">": (s) => shape([[1.2, 0], [-0.9, -1.1], [-0.9, 1.1]], s),
  P: (s) => shape([[-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4], [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4], [-1.1, 0.4], [-1.1, -0.4], [-0.4, -0.4]], s),
  X: (s) => shape([[-1, -1.1], [0, -0.4], [1, -1.1], [1.1, -0.9], [0.5, 0], [1.1, 0.9], [1, 1.1], [0, 0.4], [-1, 1.1], [-1.1, 0.9], [-0.5, 0], [-1.1, -0.9]], s),
  "*": (s) => polygon(5, s * 1.4, 0.45),
  p: (s) => polygon(5, s * 1.15),
  h: (s) => polygon(6, s * 1.1),
  H: (s) => polygon(6, s * 1.1, 0, Math.PI / 6),
  8: (s) => polygon(8, s * 1.1),
};

const shape = (points, s) => "M" + points.map(([x, y]) => `${x * s},${y * s}`).join("L") + "Z";

function polygon(n, s, inner = 0, turn = 0) {
  const points = [];
  for (let k = 0; k < n * (inner ? 2 : 1); k += 1) {
    const radius = inner && k % 2 ? s * inner : s;
    const angle = turn - Math.PI / 2 + (2 * Math.PI * k) / (n * (inner ? 2 : 1));
    points.push([radius * Math.cos(angle), radius * Math.sin(angle)]);
  }
  return shape(points, 1);
}

const mark = (group, x, y, s = 3.6) => svg("path", { d: MARKS[group.look.marker](s), transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`, class: "mark" });
const dash = (group, width) => (group.look.dash.length ? group.look.dash.map((d) => d * width).join(" ") : null);

/* A short piece of a group's line, for legends. */
function swatch(group) {
  return svg(
    "svg",
    { viewBox: "0 0 30 12", class: "swatch look", "aria-hidden": "true", css: look(group) },
    svg("line", { x1: 1, x2: 29, y1: 6, y2: 6, "stroke-dasharray": dash(group, 1.3) }),
    mark(group, 15, 6),
  );
}

function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (v) => v;
  const [a, b] = [f(low), f(high)];
  const to_ = (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
  to_.back = (p) => {
    const v = a + ((p - from) / (to - from)) * (b - a);
    return log ? 10 ** v : v;
  };
  return to_;
}

function ticks(low, high, count, log) {
  const out = [];
  if (log) {
    const decades = Math.log10(high / low);
    const steps = decades < 1 ? [1, 2, 3, 5, 7] : decades < 3 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / (count + 1)));
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += every) {
      for (const m of steps) if (m * 10 ** e >= low * 0.9999 && m * 10 ** e <= high * 1.0001) out.push(m * 10 ** e);
    }
    return out;
  }
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.8);
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}

function tickLabel(v) {
  const size = Math.abs(v);
  if (size >= 1e6) return short(v / 1e6, 3) + " M";
  if (size >= 1e4) return short(v / 1e3, 3) + " k";
  return short(v, 3);
}

/* lines: [{group, points, thin, alone}]; thin ones can be read only if their group has no other. Returns an element that
   announces its values and responds to arrow keys. */
function lineChart(id, lines, { xLabel, yLabel, logX, logY, goal, width }) {
  const all = lines.flatMap((l) => l.points).filter((p) => (!logX || p.x > 0) && (!logY || p.y > 0));
  if (!all.length) return el("p", { class: "empty" }, "Nothing to draw yet: no run that is shown has this metric.");
  const height = width < 500 ? 280 : 380;
  const edge = { left: width < 500 ? 40 : 54, right: 14, top: 14, bottom: 44 };
  const xs = all.map((p) => p.x);
  const lows = all.map((p) => (p.sd > 0 && (!logY || p.y - p.sd > 0) ? p.y - p.sd : p.y));
  const highs = all.map((p) => (p.sd > 0 ? p.y + p.sd : p.y));
  if (Number.isFinite(goal)) (lows.push(goal), highs.push(goal));
  let [x0, x1] = [logX ? least(xs) : Math.min(0, least(xs)), most(xs)];
  let [y0, y1] = [least(lows), most(highs)];
  if (x1 === x0) x1 = x0 + 1;
  if (logY) [y0, y1] = [y0 / 1.15, y1 * 1.15];
  else {
    const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.05;
    [y0, y1] = [y0 - pad, y1 + pad];
  }
  const X = scale(x0, x1, edge.left, width - edge.right, logX);
  const Y = scale(y0, y1, height - edge.bottom, edge.top, logY);
  const inside = (p) => (!logX || p.x > 0) && (!logY || p.y > 0);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart", "aria-hidden": "true" });
  const grid = svg("g", { class: "grid" });
  const labels = svg("g", { class: "words" });
  for (const v of ticks(y0, y1, 6, logY)) {
    grid.append(svg("line", { x1: edge.left, x2: width - edge.right, y1: Y(v), y2: Y(v) }));
    labels.append(svg("text", { x: edge.left - 8, y: Y(v) + 4, "text-anchor": "end" }, tickLabel(v)));
  }
  for (const v of ticks(x0, x1, width < 500 ? 4 : 8, logX)) {
    grid.append(svg("line", { x1: X(v), x2: X(v), y1: edge.top, y2: height - edge.bottom }));
    labels.append(svg("text", { x: X(v), y: height - edge.bottom + 18, "text-anchor": "middle" }, tickLabel(v)));
  }
  labels.append(svg("text", { x: (edge.left + width - edge.right) / 2, y: height - 6, "text-anchor": "middle", class: "axis" }, xLabel));
  root.append(grid, labels);
  if (Number.isFinite(goal)) {
    root.append(svg("line", { class: "goal", x1: edge.left, x2: width - edge.right, y1: Y(goal), y2: Y(goal) }));
    root.append(svg("text", { class: "goal-word", x: edge.left + 6, y: Y(goal) - 5 }, "target " + short(goal)));
  }
  for (const { group, points, thin } of lines) {
    const visible = points.filter(inside);
    if (!visible.length) continue;
    const g = svg("g", { class: "look" + (thin ? " thin" : ""), css: look(group), "data-group": group.name });
    const banded = thin ? [] : visible.filter((p) => p.sd > 0);
    if (banded.length > 1) {
      const upper = banded.map((p) => `${X(p.x).toFixed(1)},${Y(p.y + p.sd).toFixed(1)}`);
      const lower = banded.map((p) => `${X(p.x).toFixed(1)},${Y(logY ? Math.max(p.y - p.sd, y0) : p.y - p.sd).toFixed(1)}`).reverse();
      g.append(svg("polygon", { class: "band", points: upper.concat(lower).join(" ") }));
    }
    const path = visible.map((p, i) => (i ? "L" : "M") + X(p.x).toFixed(1) + "," + Y(p.y).toFixed(1)).join("");
    g.append(svg("path", { class: "line", d: path, "stroke-dasharray": thin ? null : dash(group, 2) }));
    if (!thin || visible.length < 3) for (const p of apart(visible, X, Y, (width - edge.left) / 8)) g.append(mark(group, X(p.x), Y(p.y)));
    root.append(g);
  }
  return withCursor(id, root, lines.filter((l) => (!l.thin || l.alone) && l.points.some(inside)), { X, Y, edge, width, height, xLabel, yLabel, inside });
}

/* Points at least `distance` pixels apart along the line. */
function apart(points, X, Y, distance) {
  const out = [];
  let travelled = distance / 2;
  let last = points[0];
  for (const p of points) {
    travelled += Math.hypot(X(p.x) - X(last.x), Y(p.y) - Y(last.y));
    last = p;
    if (travelled >= distance) {
      out.push(p);
      travelled = 0;
    }
  }
  return out.length ? out : [points[points.length - 1]];
}

function withCursor(id, root, lines, at) {
  const { X, Y, edge, width, height } = at;
  const cursor = svg("line", { class: "cursor", y1: edge.top, y2: height - edge.bottom, visibility: "hidden" });
  const dots = svg("g", {});
  root.append(cursor, dots);
  const tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const label = `${at.yLabel} over ${at.xLabel}: ${lines.map((l) => l.group.name).join(", ")}. Arrow keys read the values; a table below has the numbers.`;
  const box = el("div", { class: "plot", id, tabindex: 0, role: "application", "aria-roledescription": "chart", "aria-label": label }, root, tip);
  const positions = [...new Set(lines.flatMap((l) => l.points.filter(at.inside).map((p) => p.x)))].sort((a, b) => a - b);
  let now = -1;

  function show(x, aloud) {
    if (x === undefined) return; // no line can be read
    const rows = lines
      .map(({ group, points }) => ({ group, point: lastBefore(points.filter(at.inside), x) }))
      .filter((r) => r.point) // a line that ends before x or begins after it has no value here
      .sort((a, b) => b.point.y - a.point.y);
    cursor.setAttribute("x1", X(x));
    cursor.setAttribute("x2", X(x));
    cursor.setAttribute("visibility", "visible");
    dots.replaceChildren(...rows.map(({ group, point }) => svg("circle", { class: "look dot", css: look(group), cx: X(point.x), cy: Y(point.y), r: 4.5 })));
    const value = (p) => plusMinus(p.y, p.sd);
    tip.replaceChildren(
      el("strong", {}, `${at.xLabel}: ${short(x)}`),
      ...rows.map(({ group, point }) => el("div", {}, swatch(group), el("span", { class: "tip-name" }, group.name), el("span", {}, value(point)))),
    );
    tip.hidden = false;
    const shift = box.clientWidth / width;
    const left = X(x) * shift;
    tip.style.left = (left > box.clientWidth / 2 ? Math.max(0, left - tip.offsetWidth - 14) : Math.min(box.clientWidth - tip.offsetWidth, left + 14)) + "px";
    if (aloud) announce(`${at.xLabel} ${short(x)}: ` + rows.map(({ group, point }) => `${group.name} ${value(point)}`).join(", "));
  }

  function hide() {
    cursor.setAttribute("visibility", "hidden");
    dots.replaceChildren();
    tip.hidden = true;
  }

  box.addEventListener("pointermove", (event) => {
    const rect = root.getBoundingClientRect();
    const x = X.back(((event.clientX - rect.left) * width) / rect.width);
    now = nearest(positions, x);
    show(positions[now], false);
  });
  box.addEventListener("pointerleave", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (event.key === "Escape") return hide();
    if (event.key === "Home") now = 0;
    else if (event.key === "End") now = positions.length - 1;
    else if (step) now = Math.min(positions.length - 1, Math.max(0, now < 0 ? (step > 0 ? 0 : positions.length - 1) : now + step));
    else return undefined;
    event.preventDefault();
    show(positions[now], true);
    return undefined;
  });
  return box;
}

function lastBefore(points, x) {
  if (!points.length || points[points.length - 1].x < x * (1 - 1e-9)) return null;
  return points.reduce((last, p) => (p.x <= x * (1 + 1e-9) ? p : last), null);
}

function nearest(sorted, x) {
  let best = 0;
  for (let k = 1; k < sorted.length; k += 1) if (Math.abs(sorted[k] - x) < Math.abs(sorted[best] - x)) best = k;
  return best;
}
