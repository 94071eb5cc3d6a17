"use strict";
/* The basis of the page: its data, the user's choices, and functions that make elements without parsing markup. */

let DATA = JSON.parse(document.getElementById("data").textContent);

/* The user's choices. A refresh replaces DATA and never this. */
const state = {
  task: 0,
  axis: "upload_d",
  network: "own", // of the axis of hours
  metric: "",
  smooth: 1, // evaluations in a mean
  zoom: {}, // by chart: {label, from, to}
  sort: {}, // by table: {column, down}
  filter: "", // of the table of runs
  logX: false,
  logY: false,
  seeds: false,
  hidden: new Set(), // folders of runs
  target: null, // null: the value that every finished run ends with
  uplink: 1, // Mbit/s
  latency: 0, // seconds a round
  minibatch: 0, // milliseconds
  labelCounts: 0,
  open: new Set(), // keys of unfolded details
};

/* Values that replace an invalid or empty field. */
const DEFAULTS = { target: state.target, uplink: state.uplink, latency: state.latency, minibatch: state.minibatch };

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/* Children are nodes or become text nodes, so nothing from a run folder is read as markup. */
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
  return node;
}

const byId = (id) => document.getElementById(id);

let announcing = 0;

/* Have a screen reader read a text. */
function announce(text) {
  const region = byId("announcement");
  region.textContent = "";
  clearTimeout(announcing); // the text before is out of date
  announcing = setTimeout(() => (region.textContent = text), 60); // after a change, so that the same text is read again
}

function look(group) {
  return { "--light": group.look.colour, "--dark": group.look.dark };
}

function unfold(key, summary, ...children) {
  const details = el("details", { open: state.open.has(key) }, el("summary", {}, summary), ...children);
  details.addEventListener("toggle", () => (details.open ? state.open.add(key) : state.open.delete(key)));
  return details;
}

/* A labelled field; its `id` keeps the focus when the page is redrawn. */
function field(id, label, control, note) {
  control.id = id;
  return el("div", { class: "field" }, el("label", { for: id }, label), control, note ? el("span", { class: "note" }, note) : null);
}

function choose(id, label, options, value, onchange) {
  const control = el("select", { onchange: (event) => onchange(event.target.value) });
  for (const [key, text] of options) control.append(el("option", { value: key, selected: String(key) === String(value) }, text));
  return field(id, label, control);
}

function tick(id, label, checked, onchange) {
  const box = el("input", { type: "checkbox", id, onchange: (event) => onchange(event.target.checked) });
  box.checked = checked;
  return el("label", { class: "tick", for: id }, box, el("span", {}, label));
}

/* A choice of one of several, as a row of buttons that arrow keys move through. */
function segments(name, legend, options, value, onchange) {
  const set = el("fieldset", { class: "segments" }, el("legend", {}, legend));
  for (const [key, text] of options) {
    const radio = el("input", { type: "radio", name, id: name + "-" + key, value: key, onchange: () => onchange(key) });
    radio.checked = key === value;
    set.append(radio, el("label", { for: radio.id }, text));
  }
  return set;
}

async function copy(text, what) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  announce(done ? what + " copied" : "Copying is not allowed here: select the table and copy it by hand");
  return done;
}

function copyButton(id, label, what, text) {
  const button = el("button", { type: "button", id, class: "quiet" }, label);
  button.addEventListener("click", async () => {
    const done = await copy(text(), what);
    button.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = label), 1600);
  });
  return button;
}

/* Offers a text or a Blob as a file. */
function save(name, type, content) {
  const link = el("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
