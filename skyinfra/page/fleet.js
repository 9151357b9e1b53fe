"use strict";
// The fleet page. All words of the fleet become text, never markup.

const LOOK_MS = 2000, LOG_MS = 2000, KEPT = 900;
const past = new Map();  // slot -> [{at, use, memory}], since this page was opened
let chosen = null, followed = null, state = null;

const by = (id) => document.getElementById(id);

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

async function asked(path) {
  const answer = await fetch(path, { cache: "no-store" });
  const found = answer.headers.get("content-type").startsWith("application/json") ? await answer.json() : { problem: await answer.text() };
  if (!answer.ok) throw new Error(found.problem);
  return found;
}

const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
const percent = (value) => `${Math.round(value)} %`;
const moment = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "");

function span(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function taskWords(slot) {
  return slot.tasks.map((task) => `${task.name} ${span(task.seconds)}`).join(", ");
}

function slotButton(slot, grow) {
  const words = taskWords(slot) || (slot.sick ? "sick" : slot.going ? "goes" : "idle");
  const called = slot.profile || slot.kind;
  const button = made("button", {
    class: `slot ${slot.tone}${slot.going || slot.sick ? " going" : ""}`, type: "button", "data-slot": slot.slot, "aria-pressed": String(slot.slot === chosen),
    title: `${slot.slot} ${called}: ${words}`, onclick: () => choose(slot.slot, true),
  }, made("b", {}, called), made("span", {}, words));
  button.style.flex = `${grow} 1 0`;
  return button;
}

function free(units) {
  const gap = made("span", { class: "free" });
  gap.style.flex = `${units} 1 0`;
  return gap;
}

function bar(gpu) {
  const drawn = made("div", { class: "bar" });
  let at = 0;
  for (const slot of gpu.slots) {
    const placed = gpu.units && slot.size;
    if (placed && slot.start > at) drawn.append(free(slot.start - at));
    drawn.append(slotButton(slot, placed ? slot.size : 1));
    if (placed) at = Math.max(at, slot.start + slot.size);
  }
  if (gpu.units && at && at < gpu.units) drawn.append(free(gpu.units - at));
  return drawn;
}

function nodeCard(node) {
  const about = [node.machine, node.zone, node.head ? "head" : null].filter(Boolean).join(", ");
  const card = made("article", { "data-node": node.name }, made("h3", {}, node.name, " ", made("span", { class: "pale" }, about)));
  if (node.problem) card.append(made("p", { class: "bad" }, node.problem));
  for (const gpu of node.gpus) {
    const called = gpu.gpu === null || gpu.gpu === undefined ? "CPU" : `GPU ${gpu.gpu} ${gpu.accelerator || ""}`;
    card.append(made("div", { class: "gpu" }, made("span", {}, called), bar(gpu)));
  }
  if (node.missing.length) card.append(made("p", { class: "pale" }, `not there: ${node.missing.join(", ")}`));
  card.append(made("p", {}, made("button", { class: "log", type: "button", onclick: () => follow(node.name, "", `the runner of ${node.name}`) }, "log of the runner")));
  return card;
}

function jobsTable() {
  if (!state.jobs.length) return made("p", { class: "pale" }, "No jobs. skyinfra run --detach and pool.submit(..., detach=NAME) make them.");
  const head = made("tr", {}, ...["Job", "Task", "State", "Slot", "Submitted", "Took", "Log"].map((name) => made("th", { scope: "col" }, name)));
  const rows = state.jobs.map((job) => {
    const took = job.started ? span((job.ended || Date.now() / 1000) - job.started) : "";
    const node = (job.slot || "").replace(/\/[^/]*$/, "");
    const log = job.slot ? made("button", { class: "log", type: "button", "data-job": job.name, onclick: () => follow(node, job.key, `the job ${job.name}`) }, `log of ${job.name}`) : "";
    const words = job.problem ? `${job.state}: ${job.problem}` : job.state;
    return made("tr", {}, ...[job.name, job.task, words, job.slot || "", moment(job.submitted), took, log].map((cell) => made("td", {}, cell)));
  });
  return made("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "jobs-title" }, made("table", {}, made("thead", {}, head), made("tbody", {}, ...rows)));
}

function slotNamed(name) {
  for (const node of state.nodes) for (const gpu of node.gpus) for (const slot of gpu.slots) if (slot.slot === name) return slot;
  return null;
}

function chart(name, points, words) {
  const first = points[0].at, width = Math.max(1, points[points.length - 1].at - first);
  const line = points.map((point) => `${((point.at - first) / width) * 100},${30 - point.value * 0.28}`).join(" ");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 100 31", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${words}` })) svg.setAttribute(key, value);
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  drawn.setAttribute("points", line);
  svg.append(drawn);
  return made("figure", {}, svg, made("figcaption", {}, `${name}: ${words}, of the last ${span(width)}`));
}

function showSlot() {
  const slot = chosen && slotNamed(chosen);
  by("slot").hidden = !chosen;
  if (!chosen) return;
  by("slot-title").textContent = `Slot ${chosen}`;
  const facts = by("slot-facts"), charts = by("charts");
  facts.replaceChildren();
  charts.replaceChildren();
  if (!slot) { facts.append(made("dt", {}, "state"), made("dd", {}, "it is gone")); return; }
  const reading = slot.reading;
  const rows = [
    ["device", [slot.accelerator, slot.profile].filter(Boolean).join(" ") || slot.kind], ["uuid", slot.uuid], ["task", taskWords(slot) || "none"],
    ["use", reading.utilization === null || reading.utilization === undefined ? null : percent(reading.utilization)],
    ["memory", reading.memory_total ? `${gib(reading.memory_used || 0)} of ${gib(reading.memory_total)}` : null],
    ["temperature", reading.temperature ? `${reading.temperature} °C (of the GPU)` : null], ["power", reading.power ? `${Math.round(reading.power)} W (of the GPU)` : null],
  ];
  for (const [name, value] of rows) if (value) facts.append(made("dt", {}, name), made("dd", {}, value));
  for (const task of slot.tasks) {
    const node = slot.slot.replace(/\/[^/]*$/, "");
    facts.append(made("dt", {}, "log"), made("dd", {}, made("button", { class: "log", type: "button", onclick: () => follow(node, task.key, task.name) }, `log of ${task.name}`)));
  }
  const points = past.get(chosen) || [];
  for (const name of ["use", "memory"]) {
    const known = points.filter((point) => point[name] !== null).map((point) => ({ at: point.at, value: point[name] }));
    if (known.length > 1) charts.append(chart(name, known, percent(known[known.length - 1].value)));
  }
}

function choose(slot, asks) {
  chosen = slot;
  draw();
  if (asks) by("slot-title").focus();
}

function remember() {
  const at = Date.now() / 1000;
  for (const node of state.nodes) for (const gpu of node.gpus) for (const slot of gpu.slots) {
    const { utilization = null, memory_used: used = null, memory_total: total = null } = slot.reading;
    const points = past.get(slot.slot) || [];
    points.push({ at, use: utilization, memory: total && used !== null ? (100 * used) / total : null });
    past.set(slot.slot, points.slice(-KEPT));
  }
}

function draw() {
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.slot : null;
  const slots = state.nodes.flatMap((node) => node.gpus.flatMap((gpu) => gpu.slots));
  const busy = slots.filter((slot) => slot.tasks.length).length;
  document.title = `${state.fleet}: ${busy} of ${slots.length} slots busy`;
  by("fleet").textContent = state.fleet + (state.simulated ? " (simulated)" : "");
  by("facts").textContent = [state.provider, `${state.nodes.length} nodes`, `${busy} of ${slots.length} slots busy`, state.price].filter(Boolean).join(" · ");
  by("nodes").replaceChildren(...state.nodes.map((node) => nodeCard(node)));
  by("jobs").replaceChildren(jobsTable());
  by("changes").hidden = !state.changes.length;
  by("changes-list").replaceChildren(...state.changes.map((each) => made("li", {}, `${moment(each.at)}: ${each.node} GPU ${each.gpu} became ${each.layout}: ${each.why}`)));
  showSlot();
  const again = focused && document.querySelector(`[data-slot="${CSS.escape(focused)}"]`);
  if (again) again.focus();
}

function say(problem) {
  by("problem").hidden = !problem;
  by("problem").textContent = problem || "";
}

async function look() {
  try {
    state = await asked("/fleet/state");
    remember();
    draw();
    say("");
  } catch (error) {
    say(`The fleet does not answer: ${error.message}. What is shown is what it said last.`);
  }
  setTimeout(look, LOOK_MS);
}

function follow(node, task, words) {
  followed = { node, task };
  by("log").hidden = false;
  by("log-title").textContent = `Log of ${words}`;
  by("log-text").textContent = "";
  by("log-title").focus();
  readLog();
}

async function readLog() {
  const mine = followed;
  if (!mine) return;
  const shown = by("log-text");
  const atEnd = shown.scrollTop + shown.clientHeight >= shown.scrollHeight - 8;
  try {
    const found = await asked(`/fleet/log?${new URLSearchParams(mine)}`);
    if (mine === followed) shown.textContent = found.text || "Nothing was printed yet.";
  } catch (error) {
    if (mine === followed) shown.textContent = error.message;
  }
  if (atEnd) shown.scrollTop = shown.scrollHeight;
}

setInterval(readLog, LOG_MS);
look();
