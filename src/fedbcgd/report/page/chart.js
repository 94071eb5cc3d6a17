/* Line charts: drawn as SVG, read with the pointer or the arrow keys, zoomed by a drag, a wheel or keys. */

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

/* lines: [{group, points, thin, alone}]; thin ones can be read only if their group has no other. Returns a figure: a chart that
   announces its values and responds to keys, and buttons that save it. */
function lineChart(id, lines, { xLabel, yLabel, logX, logY, goal, width, small }) {
  const drawable = (p) => (!logX || p.x > 0) && (!logY || p.y > 0);
  const zoom = state.zoom[id] && state.zoom[id].label === xLabel ? state.zoom[id] : null;
  const inside = (p) => drawable(p) && (!zoom || (p.x >= zoom.from && p.x <= zoom.to));
  if (!lines.some((l) => l.points.some(drawable))) return el("p", { class: "empty" }, "Nothing to draw yet: no run that is shown has this metric.");
  const seen = lines.flatMap((l) => l.points).filter(inside);
  const all = seen.length ? seen : lines.flatMap((l) => l.points).filter(drawable);
  const height = small ? 210 : width < 500 ? 280 : Math.min(540, Math.max(340, Math.round(0.34 * width)));
  const edge = { left: width < 500 ? 40 : 54, right: 14, top: 14, bottom: 44 };
  const xs = all.map((p) => p.x);
  const whole = lines.flatMap((l) => l.points).filter(drawable).map((p) => p.x);
  const lows = all.map((p) => (p.sd > 0 && (!logY || p.y - p.sd > 0) ? p.y - p.sd : p.y));
  const highs = all.map((p) => (p.sd > 0 ? p.y + p.sd : p.y));
  if (Number.isFinite(goal) && !zoom) (lows.push(goal), highs.push(goal));
  let [x0, x1] = [logX ? least(xs) : Math.min(0, least(xs)), most(xs)];
  let [y0, y1] = [least(lows), most(highs)];
  if (x1 === x0) x1 = x0 + 1;
  const limits = [logX ? least(whole) : Math.min(0, least(whole)), most(whole)];
  if (zoom) [x0, x1] = [zoom.from, zoom.to];
  if (logY) [y0, y1] = [y0 / 1.15, y1 * 1.15];
  else {
    const range = y1 - y0 > 1e-9 * Math.abs(y1) ? y1 - y0 : Math.abs(y1) || 1; // not a rounding error
    const pad = range * 0.05;
    [y0, y1] = [y0 - pad, y1 + pad];
  }
  const X = scale(x0, x1, edge.left, width - edge.right, logX);
  const Y = scale(y0, y1, height - edge.bottom, edge.top, logY);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart", "aria-hidden": "true" });
  const grid = svg("g", { class: "grid" });
  const labels = svg("g", { class: "words" });
  for (const v of ticks(y0, y1, small ? 4 : 6, logY)) {
    grid.append(svg("line", { x1: edge.left, x2: width - edge.right, y1: Y(v), y2: Y(v) }));
    labels.append(svg("text", { x: edge.left - 8, y: Y(v) + 4, "text-anchor": "end" }, tickLabel(v)));
  }
  for (const v of ticks(x0, x1, width < 500 ? 4 : 8, logX).filter((v) => v >= x0)) {
    grid.append(svg("line", { x1: X(v), x2: X(v), y1: edge.top, y2: height - edge.bottom }));
    labels.append(svg("text", { x: X(v), y: height - edge.bottom + 18, "text-anchor": "middle" }, tickLabel(v)));
  }
  labels.append(svg("text", { x: (edge.left + width - edge.right) / 2, y: height - 6, "text-anchor": "middle", class: "axis" }, xLabel));
  root.append(grid, labels);
  root.append(svg("clipPath", { id: id + "-clip" }, svg("rect", { x: edge.left, y: 0, width: width - edge.left - edge.right + 5, height: height - edge.bottom })));
  const drawing = svg("g", { "clip-path": `url(#${id}-clip)` });
  if (Number.isFinite(goal) && goal >= y0 && goal <= y1) {
    root.append(svg("line", { class: "goal", x1: edge.left, x2: width - edge.right, y1: Y(goal), y2: Y(goal) }));
    root.append(svg("text", { class: "goal-word", x: edge.left + 6, y: Y(goal) - 5 }, "target " + short(goal)));
  }
  for (const { group, points, thin } of lines) {
    const visible = points.filter(drawable); // clipped, so that a line goes on to the edge
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
    const within = visible.filter(inside);
    if (within.length && (!thin || visible.length < 3)) for (const p of apart(within, X, Y, (width - edge.left) / 8)) g.append(mark(group, X(p.x), Y(p.y)));
    drawing.append(g);
  }
  root.append(drawing);
  const setZoom = (from, to) => {
    [from, to] = [Math.max(limits[0], from), Math.min(limits[1], to)];
    if (!(to - from > 1e-6 * (limits[1] - limits[0])) || (from === limits[0] && to === limits[1])) delete state.zoom[id];
    else state.zoom[id] = { label: xLabel, from, to };
    draw();
    announce(state.zoom[id] ? `${xLabel} from ${short(from)} to ${short(to)}` : "all of the chart");
  };
  const readable = lines.filter((l) => (!l.thin || l.alone) && l.points.some(inside));
  const box = withCursor(id, root, readable, { X, Y, edge, width, height, xLabel, yLabel, inside, limits, setZoom });
  const groups = [...new Set(lines.filter((l) => l.points.some(drawable)).map((l) => l.group))];
  const numbers = () => chartCsv(lines.filter((l) => !l.thin || l.alone), xLabel, yLabel);
  const reset = zoom ? el("button", { type: "button", id: id + "-reset", class: "quiet", onclick: () => setZoom(-Infinity, Infinity) }, "Reset zoom") : null;
  return el("figure", {}, box, downloads(id, `${yLabel} over ${xLabel}`, () => withLegend(root, groups, `${yLabel} over ${xLabel}`), numbers, reset));
}

/* Every point: the mean, its deviation, and if lines are smoothed the smoothed mean as well. */
function chartCsv(lines, xLabel, yLabel) {
  const isSmooth = lines.some((l) => l.points.some((p) => p.raw !== undefined));
  const head = ["run", "round", xLabel, yLabel, "standard deviation", "seeds", ...(isSmooth ? ["smoothed"] : [])];
  const number = (v) => (Number.isFinite(v) ? v : "");
  return csvText([head, ...lines.flatMap(({ group, points }) => points.map((p) => [notFormula(group.name), p.round, p.x, p.raw === undefined ? p.y : p.raw, number(p.sdRaw === undefined ? p.sd : p.sdRaw), p.n, ...(isSmooth ? [p.y] : [])]))]);
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
  const label = `${at.yLabel} over ${at.xLabel}: ${lines.map((l) => l.group.name).join(", ")}. Arrow keys read the values; plus and minus zoom, 0 shows all.`;
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
    tip.style.top = tip.offsetHeight > box.clientHeight ? box.clientHeight - tip.offsetHeight + "px" : "8px";
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

  const place = (event) => {
    const rect = root.getBoundingClientRect();
    return Math.min(width - edge.right, Math.max(edge.left, ((event.clientX - rect.left) * width) / rect.width));
  };
  const magnify = (factor, centre) => {
    const [p0, p1] = [edge.left, width - edge.right].map((p) => centre + (p - centre) * factor);
    at.setZoom(X.back(p0), X.back(p1));
  };
  const chosen = svg("rect", { class: "chosen", y: edge.top, height: height - edge.bottom - edge.top, visibility: "hidden" });
  root.append(chosen);
  let from = null; // where a drag began
  box.addEventListener("pointerdown", (event) => {
    if (event.button === 0) from = place(event);
    if (event.button === 0) box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => {
    const here = place(event);
    now = nearest(positions, X.back(here));
    show(positions[now], false);
    if (from === null) return;
    chosen.setAttribute("x", Math.min(from, here));
    chosen.setAttribute("width", Math.abs(here - from));
    chosen.setAttribute("visibility", "visible");
  });
  box.addEventListener("pointercancel", () => (from = null));
  box.addEventListener("pointerup", (event) => {
    const [start, end] = [from, place(event)].sort((a, b) => a - b);
    const dragged = from !== null && end - start > 8;
    from = null;
    chosen.setAttribute("visibility", "hidden");
    if (dragged) at.setZoom(X.back(start), X.back(end));
  });
  box.addEventListener("dblclick", () => at.setZoom(-Infinity, Infinity));
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== box) return; // the page scrolls
    event.preventDefault();
    magnify(event.deltaY < 0 ? 0.8 : 1.25, place(event));
  }, { passive: false });
  box.addEventListener("pointerleave", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (event.key === "Escape") return hide();
    if ("+-0".includes(event.key)) {
      event.preventDefault();
      return event.key === "0" ? at.setZoom(-Infinity, Infinity) : magnify(event.key === "+" ? 0.5 : 2, now < 0 ? width / 2 : X(positions[now]));
    }
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
