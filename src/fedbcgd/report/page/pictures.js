/* Charts as files: the SVG on the page with its styles written into it and its legend below, as PNG and SVG; numbers as CSV. */

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-size", "paint-order", "image-rendering"];

function downloads(id, name, picture, csv, ...more) {
  const file = name.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  const button = (kind, act) =>
    el("button", { type: "button", id: `${id}-${kind}`, class: "quiet small", "aria-label": `Save ${name} as ${kind.toUpperCase()}`, onclick: () => (act(), announce(kind.toUpperCase() + " saved")) }, kind.toUpperCase());
  return el(
    "div",
    { class: "downloads" },
    more,
    button("png", () => savePng(file + ".png", standalone(picture()))),
    button("svg", () => save(file + ".svg", "image/svg+xml", asMarkup(standalone(picture())))),
    button("csv", () => save(file + ".csv", "text/csv", csv())),
  );
}

const asMarkup = (picture) => new XMLSerializer().serializeToString(picture);

/* The picture with colours and sizes as they are on the page, on its background. */
function standalone(picture) {
  const stage = el("div", { class: "stage", "aria-hidden": "true" }, picture);
  document.body.append(stage);
  for (const hidden of picture.querySelectorAll("[visibility=hidden]")) hidden.remove();
  for (const node of picture.querySelectorAll("*")) {
    const style = getComputedStyle(node);
    for (const name of STYLES) node.setAttribute(name, style.getPropertyValue(name));
  }
  for (const node of picture.querySelectorAll("*")) ["class", "style"].forEach((name) => node.removeAttribute(name));
  const ground = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim();
  picture.prepend(svg("rect", { width: "100%", height: "100%", fill: ground }));
  picture.setAttribute("font-family", "Helvetica, Arial, sans-serif");
  stage.remove();
  return picture;
}

function savePng(name, picture) {
  const [width, height] = ["width", "height"].map((side) => Number(picture.getAttribute(side)));
  const sharp = Math.min(2, 16000 / Math.max(width, height));
  const canvas = el("canvas", { width: Math.round(width * sharp), height: Math.round(height * sharp) });
  const image = new Image();
  image.onload = () => {
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(name, "image/png", blob));
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(asMarkup(picture));
}

/* A copy of a chart under its title, with a legend below. */
function withLegend(chart, groups, title) {
  const [width, height] = ["width", "height"].map((side) => Number(chart.getAttribute(side)));
  const entries = svg("g", { class: "words" });
  let [x, y] = [12, height + 44];
  for (const group of groups) {
    const space = 52 + 7.2 * group.name.length;
    if (x > 12 && x + space > width) [x, y] = [12, y + 20];
    const sample = swatch(group);
    for (const [name, value] of Object.entries({ x, y: y - 10, width: 30, height: 12 })) sample.setAttribute(name, value);
    entries.append(sample, svg("text", { x: x + 36, y }, group.name));
    x += space;
  }
  const copy = fill(chart.cloneNode(true), { y: 26 }, []);
  return framed(width, y + 14, title, copy, entries);
}

function framed(width, height, title, ...parts) {
  return svg("svg", { xmlns: SVG, viewBox: `0 0 ${width} ${height}`, width, height }, svg("g", { class: "words" }, svg("text", { class: "axis", x: 12, y: 19 }, title)), ...parts);
}

/* Bars with a name before and a text behind: [{group, name, share, text}]. */
function barPicture(title, bars) {
  const row = (bar, k) => [
    svg("text", { x: 12, y: 46 + 22 * k }, bar.name),
    svg("rect", { class: "look filled", css: look(bar.group), x: 260, y: 36 + 22 * k, width: Math.max(0, 360 * bar.share), height: 13 }),
    svg("text", { x: 630, y: 46 + 22 * k }, bar.text),
  ];
  return framed(900, 46 + 22 * bars.length, title, svg("g", { class: "words" }, bars.map(row)));
}

/* The map of labels as a picture, a row for each label. */
function mapPicture(title, canvas, classes) {
  const row = Math.max(3, Math.min(18, 600 / classes.length));
  const every = Math.ceil(12 / row);
  const names = classes.map((c, k) => (k % every ? null : svg("text", { x: 138, y: 36 + row * (k + 0.5) + 4, "text-anchor": "end" }, shortened(c, 18))));
  const image = svg("image", { href: canvas.toDataURL(), x: 146, y: 36, width: 740, height: row * classes.length, preserveAspectRatio: "none", class: "map-image" });
  const axis = svg("text", { class: "axis", x: 516, y: 60 + row * classes.length, "text-anchor": "middle" }, "clients");
  return framed(900, 72 + row * classes.length, title, image, svg("g", { class: "words" }, names, axis));
}

const shortened = (text, longest) => (text.length > longest ? text.slice(0, longest - 1) + "…" : text);
