"use strict";
// Texts and elements of which the fleet page is made, see fleet.js. All words of the fleet become text, never markup.

const by = (id) => document.getElementById(id);
const isKnown = (value) => value !== null && value !== undefined;
const or = (value, show) => (isKnown(value) ? show(value) : "not known");
const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
const percent = (value) => `${Math.round(value)} %`;
const usd = (value) => value.toLocaleString("en", { style: "currency", currency: "USD" });
const dates = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "numeric", day: "numeric", hour: "numeric", minute: "numeric", second: "numeric" });
const moment = (seconds) => (isKnown(seconds) ? dates.format(seconds * 1000) : "");
const mark = () => (state.simulated ? " (simulated)" : "");
const deviceOf = (slot) => slot.profile || slot.kind;
const nodeOf = (slot) => slot.replace(/\/[^/]*$/, "");
// Made once: a page with a thousand slots has more than ten thousand elements.
const copies = new Map();
const copied = (key, make) => {
  if (!copies.has(key)) copies.set(key, make());
  return copies.get(key).cloneNode(true);
};
const everySlot = () => state.nodes.flatMap((node) => node.gpus.flatMap((gpu) => gpu.slots));

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (isKnown(value) && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter(isKnown));
  return element;
}

// Writes only what is another: what a person selected, focused or scrolled stays.
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function hide(id, hidden) {
  if (by(id).hidden !== hidden) by(id).hidden = hidden;
}

function span(seconds) {
  if (!isKnown(seconds)) return "";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// Progress ------------------------------------------------------------------------------------------------------------

function share(task) {
  const said = task.progress;
  return said && isKnown(said.total) && said.total > 0 && isKnown(said.done) ? Math.min(100, Math.max(0, (100 * said.done) / said.total)) : null;
}

function progressWords(task) {
  const said = task.progress, number = (value) => String(Number(value.toFixed(2)));
  if (!said || !isKnown(said.done)) return "";
  return isKnown(said.total) ? `${number(said.done)} of ${number(said.total)}` : `${number(said.done)} steps`;
}

function taskWords(slot) {
  return slot.tasks.map((task) => [task.name, span(task.seconds), isKnown(share(task)) ? percent(share(task)) : progressWords(task)].filter(Boolean).join(" ")).join(", ");
}

function bar(done) {
  const drawn = copied("bar", () => made("span", { class: "done" }, made("i")));
  drawn.firstChild.style.width = `${done}%`;
  return drawn;
}

// A name that is broken after a dot, where it has no room.
const broken = (name) => name.split(".").flatMap((part, number) => (number ? [".", made("wbr"), part] : [part]));

function usedWords(figures) {
  if (!figures) return "";
  const words = [isKnown(figures.memory_peak) ? gib(figures.memory_peak) : null, isKnown(figures.energy) ? `${(figures.energy / 3600).toFixed(2)} Wh` : null].filter(isKnown);
  return words.length ? words.join(", ") + mark() : "";
}

// Figures over time ---------------------------------------------------------------------------------------------------

function chart(name, points, most, words) {
  const first = points[0].at, width = Math.max(1, points[points.length - 1].at - first);
  const line = points.map((point) => `${(((point.at - first) / width) * 100).toFixed(2)},${(30 - (28 * point.value) / (most || 1)).toFixed(2)}`).join(" ");
  const element = (tag, attributes) => {
    const drawn = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) drawn.setAttribute(key, value);
    return drawn;
  };
  const svg = element("svg", { viewBox: "0 0 100 31", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${words}` });
  svg.append(element("polyline", { points: line }));
  return made("figure", {}, svg, made("figcaption", {}, `${name}${mark()}: ${words}, of the last ${span(width)}`));
}

const highest = (points) => Math.max(...points.map((point) => point.value));

// The counts of a minute, from those of shorter periods; a minute in which one is not known is not known.
function minutes(counts, period, join) {
  const each = Math.max(1, Math.round(60 / period)), found = [];
  for (let end = counts.length; end >= each; end -= each) found.unshift({ at: (end * period), value: join(counts.slice(end - each, end)) });
  return found.filter((point) => isKnown(point.value));
}

const sum = (counts) => (counts.every(isKnown) ? counts.reduce((all, each) => all + each, 0) : null);

// Sum, hours, and what is in neither, of what a fleet has cost.
const costWords = (spent, kept = "") => [
  or(spent.usd, (value) => (spent.estimated ? "~" : "") + usd(value)), `${spent.hours.toFixed(1)} node hours${kept}`,
  spent.unknown.length ? `not in the sum: ${spent.unknown.join("; ")}` : "",
];
