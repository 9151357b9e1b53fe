"use strict";
// The fleet page. All words of the fleet become text, never markup. What is not known is said so, and is never a 0.

const LOOK_MS = 2000, LOG_MS = 2000, KEPT = 300, TOGETHER_S = 60;
const past = new Map();  // slot -> [{at, use, memory}], since this page was opened
const busyPast = [];  // [{at, value}]
const cards = new Map(), buttons = new Map(), rows = new Map();  // what is drawn, by node, slot and device, job
const layouts = new Map();  // the partitions of each GPU at the last look
const seen = [];  // changes of layouts that this page saw, the newest first
let state = null, chosen = null, followed = null, opener = null, waits = false, next = 0;

// Nodes ---------------------------------------------------------------------------------------------------------------

function drawSlot(slot) {
  const key = `${slot.slot} ${slot.uuid || ""} ${deviceOf(slot)}`;
  const words = taskWords(slot) || (slot.sick ? "sick" : slot.going ? "goes" : "idle");
  const done = slot.tasks.length ? share(slot.tasks[0]) : null;
  const pressed = slot.slot === chosen;
  const now = [words, done, slot.going, slot.sick, pressed].join("\n");
  let drawn = buttons.get(key);
  if (!drawn) {
    const button = copied(`slot ${deviceOf(slot)}`, () => made("button", { type: "button", tabindex: "-1" }, made("b", {}, ...broken(deviceOf(slot))), made("span", {})));
    button.dataset.slot = slot.slot;
    drawn = { button, now: "", fresh: busyPast.length > 0 };
    buttons.set(key, drawn);
  }
  drawn.current = true;
  if (drawn.now !== now) {
    const { button } = drawn;
    button.className = ["slot", slot.tone, slot.going || slot.sick ? "going" : "", slot.sick ? "sick" : "", drawn.fresh ? "fresh" : ""].filter(Boolean).join(" ");
    button.title = `${slot.slot} ${deviceOf(slot)}: ${words}`;
    button.setAttribute("aria-pressed", String(pressed));
    write(button.children[1], words);
    if (isKnown(done) && button.children[2]) button.children[2].firstChild.style.width = `${done}%`;
    else if (isKnown(done)) button.append(bar(done));
    else if (button.children[2]) button.children[2].remove();
    drawn.now = now;
  }
  return drawn.button;
}

// The elements of slots at their places on the GPU, with what is free between them.
function placed(slots, units, elements) {
  const drawn = [];
  let at = 0;
  const add = (element, size) => {
    element.style.flex = units ? `0 0 ${(100 * size) / units}%` : "1 1 0px";
    drawn.push(element);
  };
  const gap = (to) => { if (to > at) add(made("span", { class: "free" }), to - at); };
  slots.forEach((slot, number) => {
    const stands = units && slot.size, sharing = slots.filter((each) => each.start === slot.start).length;
    if (stands) gap(slot.start);
    add(elements[number], stands ? slot.size / sharing : units);
    if (stands) at = Math.max(at, slot.start + slot.size);
  });
  if (units && at) gap(units);
  return drawn;
}

function put(parent, children) {
  if (children.length !== parent.children.length || children.some((child, number) => parent.children[number] !== child)) parent.replaceChildren(...children);
}

function drawNode(node) {
  let card = cards.get(node.name);
  if (!card) {
    const element = made("article", { "data-node": node.name }, made("h3", {}, node.name, " ", made("span", { class: "pale" })), made("p", { class: "bad" }), made("div"), made("p", { class: "pale" }),
      made("p", {}, made("button", { class: "log", type: "button", onclick: () => follow(node.name, "", `the runner of ${node.name}`) }, `log of the runner of ${node.name}`)));
    // What is out of view is laid out when it comes into it; until then its height is that of so many GPUs.
    element.style.containIntrinsicSize = `auto ${5 + 5.25 * node.gpus.length}rem`;
    card = { element, gpus: new Map(), shown: [] };
    cards.set(node.name, card);
  }
  card.current = true;
  const [title, bad, gpus, missing] = card.element.children;
  write(title.lastChild, [node.machine, node.zone, node.head ? "head" : null].filter(Boolean).join(", "));
  write(bad, node.problem || "");
  write(missing, node.missing.length ? `to come: ${node.missing.join(", ")}` : "");
  // While a layout changes or a process starts anew, a GPU may have no slot, and the fleet says nothing of it: its row stays
  // while slots are to come.
  const gone = node.missing.length ? card.shown.filter((last) => isKnown(last.gpu) && !node.gpus.some((gpu) => gpu.gpu === last.gpu)) : [];
  card.shown = [...node.gpus, ...gone.map((gpu) => ({ ...gpu, slots: [] }))].sort((one, other) => (one.gpu ?? Infinity) - (other.gpu ?? Infinity));
  put(gpus, card.shown.map((gpu) => {
    const called = isKnown(gpu.gpu) ? `GPU ${gpu.gpu} ${gpu.accelerator || ""}` : "CPU";
    if (!card.gpus.has(called)) card.gpus.set(called, made("div", { class: "gpu" }, made("span", { class: "pale" }, called), made("div", { class: "bar" })));
    write(card.gpus.get(called).firstChild, gpu.slots.length ? called : `${called}: no slot now`);
    const row = card.gpus.get(called).lastChild, drawn = gpu.slots.map(drawSlot), slots = [...row.querySelectorAll("button")];
    if (drawn.length !== slots.length || drawn.some((each, number) => each !== slots[number])) row.replaceChildren(...placed(gpu.slots, gpu.units, drawn));
    if (isKnown(gpu.gpu) && gpu.slots.length) noteLayout(node.name, gpu);
    return card.gpus.get(called);
  }));
  return card.element;
}

// One change of a GPU may take several looks: partitions go, and others come.
function noteLayout(node, gpu) {
  const key = `${node} ${gpu.gpu}`, now = gpu.slots.filter((slot) => !slot.going).map(({ profile, kind, tone, start, size, uuid }) => ({ profile, kind, tone, start, size, uuid }));
  const before = layouts.get(key), same = before && JSON.stringify(before.slots) === JSON.stringify(now);
  if (before && !same) {
    const last = seen.find((each) => each.key === key), at = Date.now() / 1000;
    if (last && at - last.at < TOGETHER_S) {
      Object.assign(last, { after: now, at });
      // A process that started anew has changed nothing.
      if (JSON.stringify(last.before) === JSON.stringify(now)) seen.splice(seen.indexOf(last), 1);
    }
    else seen.unshift({ key, node, gpu: gpu.gpu, units: gpu.units || before.units, before: before.slots, after: now, at });
    seen.splice(10);
  }
  layouts.set(key, { slots: now, units: gpu.units });
}

function names(slots) {
  return slots.map(deviceOf).join(", ") || "nothing yet";
}

function drawChanges() {
  const small = (slots, units) => made("span", { class: "bar small", "aria-hidden": "true" }, ...placed(slots, units, slots.map((slot) => made("span", { class: `slot ${slot.tone}` }))));
  hide("changes", !seen.length && !state.changes.length);
  const drawn = JSON.stringify([seen, state.changes]);
  if (by("changes").drawn === drawn) return;
  by("changes").drawn = drawn;
  by("seen").replaceChildren(...seen.map((each) => made("li", {}, `${moment(each.at)}: ${each.node} GPU ${each.gpu}: ${names(each.before)} became ${names(each.after)}`, made("div", { class: "pair" }, small(each.before, each.units), "→", small(each.after, each.units)))));
  by("followed").replaceChildren(...[...state.changes].reverse().map((each) => made("li", {}, `${moment(each.at)}: ${each.node} GPU ${each.gpu}${each.before ? `: ${each.before}` : ""} became ${each.layout}: ${each.why}`)));
}

// Figures -------------------------------------------------------------------------------------------------------------

function drawNumbers(numbers) {
  const list = by("numbers");
  if (list.children.length !== numbers.length) list.replaceChildren(...numbers.map(() => made("div", {}, made("dt"), made("dd"), made("dd"), made("dd"))));
  numbers.forEach((words, at) => [0, 1, 2, 3].forEach((part) => write(list.children[at].children[part], words[part] || "")));
}

function drawFigures() {
  const slots = everySlot(), busy = slots.filter((slot) => slot.tasks.length).length, work = state.work;
  busyPast.push({ at: Date.now() / 1000, value: busy });
  busyPast.splice(0, busyPast.length - KEPT);
  const ended = work ? minutes(work.ended, work.period, sum) : [], waited = work ? minutes(work.waited, work.period, (each) => Math.max(...each)) : [];
  const last = work && work.ended.length >= 60 / work.period ? sum(work.ended.slice(-Math.round(60 / work.period))) : null;
  const price = state.usd_per_hour, spent = state.spent && (isKnown(state.spent.usd) || !price) ? state.spent : null;
  const sinceHead = work && price ? [`about ${usd((price * work.seconds) / 3600)}`, `since its head began, ${span(work.seconds)} ago`] : ["not known"];
  const numbers = [
    ["Slots busy", `${busy} of ${slots.length}`],
    ["Tasks waiting at the head", or(work && work.waiting, String)],
    ["Jobs queued", or(state.jobs_queued, String)],
    ["Tasks ended in the last minute", or(last, String)],
    ["Price", isKnown(price) ? (price ? `${usd(price)} per hour` : "costs nothing") : "not known"],
    price || spent ? ["So far", ...(spent ? costWords(spent) : sinceHead)] : null,
  ].filter(isKnown);
  drawNumbers(numbers);
  const charts = [["slots busy", busyPast, slots.length], ["tasks ended, by minute", ended], ["tasks waiting at the head", waited]];
  by("rates").replaceChildren(...charts.filter(([, points]) => points.length > 1).map(([name, points, most]) => chart(name, points, most || highest(points), `${points[points.length - 1].value}, at most ${highest(points)}`)));
}

// Jobs ----------------------------------------------------------------------------------------------------------------

function drawJob(job, there) {
  const now = state.kept ? state.kept.at : Date.now() / 1000, runs = (there.get(job.slot) || { tasks: [] }).tasks.find((task) => task.key.startsWith(job.key));
  const done = runs ? [progressWords(runs), runs.progress && runs.progress.note].filter(Boolean).join(", ") : "";
  const shown = state.kept && !isKnown(job.ended) ? `${job.state} when kept` : [job.state, done].filter(Boolean).join(", ");
  const cells = [job.name, [shown, job.problem, job.note].filter(Boolean).join(": "), null, job.task, null, moment(job.submitted), moment(job.ended), isKnown(job.started) ? span((isKnown(job.ended) ? job.ended : now) - job.started) : "", usedWords(job.figures)];
  let row = rows.get(job.id);
  if (!row) {
    row = copied("row", () => made("tr", {}, ...cells.map(() => made("td"))));
    rows.set(job.id, row);
  }
  row.current = true;
  cells.forEach((cell, number) => { if (cell !== null) write(row.children[number], cell); });
  const button = (number, wanted, attributes, words, onclick) => {
    const cell = row.children[number];
    if (cell.wanted === wanted) return;
    cell.wanted = wanted;
    cell.replaceChildren(...(attributes ? [made("button", { class: "log", type: "button", ...attributes, onclick }, words)] : [words]));
  };
  button(2, String(Boolean(job.slot)), job.slot ? { "data-job": job.name } : null, job.slot ? `log of ${job.name}` : "", () => follow(nodeOf(job.slot), job.key, `the job ${job.name}`));
  const stands = there.has(job.slot);
  button(4, `${job.slot} ${stands}`, stands ? { "aria-label": `slot ${job.slot}` } : null, job.slot || "", () => choose(job.slot));
  return row;
}

function drawJobs() {
  const there = new Map(everySlot().map((slot) => [slot.slot, slot])), all = isKnown(state.jobs_in_all) ? state.jobs_in_all : state.jobs.length, more = all - state.jobs.length;
  hide("jobs-part", false);
  hide("jobs-scroll", !state.jobs.length);
  write(by("jobs-words"), !state.jobs.length ? "No jobs. skyinfra run --detach and pool.submit(..., detach=NAME) make them." : more ? `The newest ${state.jobs.length} of ${all}; skyinfra jobs ${state.fleet} lists them all.` : "The newest first.");
  put(by("jobs"), state.jobs.map((job) => drawJob(job, there)));
  sweep(rows);
}

// The slot that is chosen, and a log ----------------------------------------------------------------------------------

function drawDetails() {
  hide("details", !chosen && !followed);
  hide("slot", !chosen);
  if (!chosen) return;
  const slot = everySlot().find((each) => each.slot === chosen), facts = by("slot-facts");
  write(by("slot-title"), `Slot ${chosen}`);
  const reading = slot ? slot.reading : {}, measured = slot && slot.kind !== "cpu";
  const lines = !slot ? [["state", "it is gone"]] : [
    ["device", [slot.accelerator, slot.profile].filter(Boolean).join(" ") || slot.kind], ["uuid", slot.uuid],
    ["state", slot.sick ? "sick, takes no tasks" : slot.going ? "goes after its task" : null], ["task", taskWords(slot) || "none"],
    ["use", measured ? or(reading.utilization, percent) : null],
    ["memory", measured ? (isKnown(reading.memory_total) ? `${or(reading.memory_used, gib)} of ${gib(reading.memory_total)}${slot.shared_by > 1 ? `, shared by ${slot.shared_by}` : ""}` : "not known") : null],
    ["temperature", isKnown(reading.temperature) ? `${reading.temperature} °C (of the GPU)` : null], ["power", isKnown(reading.power) ? `${Math.round(reading.power)} W (of the GPU)` : null],
  ];
  const shown = lines.filter(([, value]) => value).map(([name, value]) => [name, ["use", "memory", "temperature", "power"].includes(name) && value !== "not known" ? value + mark() : value]);
  if (facts.drawn !== JSON.stringify(shown)) facts.replaceChildren(...shown.flatMap(([name, value]) => [made("dt", {}, name), made("dd", {}, value)]));
  facts.drawn = JSON.stringify(shown);
  drawTasks(slot);
  const points = past.get(chosen) || [];
  by("charts").replaceChildren(...["use", "memory"].map((name) => [name, points.filter((point) => isKnown(point[name])).map((point) => ({ at: point.at, value: point[name] }))])
    .filter(([, known]) => known.length > 1).map(([name, known]) => chart(name, known, 100, percent(known[known.length - 1].value))));
}

function drawTasks(slot) {
  const keys = slot ? slot.tasks.map((task) => task.key).join("\n") : "", tasks = by("tasks");
  if (tasks.keys !== keys) tasks.replaceChildren(...(slot ? slot.tasks : []).map((task) => made("div", {}, made("p"), made("button", { class: "log", type: "button", onclick: () => follow(nodeOf(slot.slot), task.key, task.name) }, `log of ${task.name}`))));
  tasks.keys = keys;
  (slot ? slot.tasks : []).forEach((task, number) => {
    const told = [progressWords(task), task.progress ? task.progress.note : ""].filter(Boolean).join(": ");
    write(tasks.children[number].firstChild, [[task.name, span(task.seconds)].filter(Boolean).join(", for "), told].filter(Boolean).join(": "));
    const drawn = tasks.children[number].querySelector(".done"), done = share(task);
    if (drawn) drawn.remove();
    if (isKnown(done)) tasks.children[number].firstChild.after(bar(done));
  });
}

function choose(slot) {
  open();
  chosen = slot;
  draw();
  by("slot-title").focus();
}

// Notes where the focus returns to.
function open() {
  if (!by("details").contains(document.activeElement)) opener = document.activeElement;
}

function close() {
  chosen = followed = null;
  hide("log", true);
  draw();
  if (opener && opener.isConnected) opener.focus();
}

function follow(node, task, words) {
  open();
  followed = { node, task };
  hide("details", false);
  hide("log", false);
  write(by("log-title"), `Log of ${words}`);
  write(by("log-text"), "");
  by("log-title").focus();
  readLog();
}

async function readLog() {
  const mine = followed;
  if (!mine || document.hidden) return;
  const shown = by("log-text"), atEnd = shown.scrollTop + shown.clientHeight >= shown.scrollHeight - 8;
  let text = "";
  try {
    text = (await asked(`/fleet/log?${new URLSearchParams({ node: mine.node, task: mine.task })}`)).text || (state.kept ? "Nothing of it is kept." : "Nothing was printed yet.");
  } catch (error) {
    text = error.message;
  }
  if (mine !== followed || shown.textContent === text) return;
  shown.textContent = text;
  if (atEnd) shown.scrollTop = shown.scrollHeight;
}

// The whole -----------------------------------------------------------------------------------------------------------

function remember() {
  const at = Date.now() / 1000, there = new Set();
  for (const slot of everySlot()) {
    const { utilization: use, memory_used: used, memory_total: total } = slot.reading, points = past.get(slot.slot) || [];
    points.push({ at, use, memory: total && isKnown(used) ? (100 * used) / total : null });
    if (points.length > KEPT) points.shift();
    past.set(slot.slot, points);
    there.add(slot.slot);
  }
  for (const slot of past.keys()) if (!there.has(slot)) past.delete(slot);
}

// Takes what is not drawn any more out of a map.
function sweep(drawn) {
  for (const [key, each] of drawn) if (each.current) each.current = false; else drawn.delete(key);
}

function draw() {
  const slots = everySlot(), busy = slots.filter((slot) => slot.tasks.length).length;
  document.title = state.kept ? `${state.fleet}: kept jobs` : `${state.fleet}: ${busy} of ${slots.length} slots busy`;
  write(by("fleet"), state.fleet + mark());
  write(by("facts"), state.kept ? `${state.kept.why}: what was kept of it ${moment(state.kept.at)}, in ${state.kept.where}` : [state.provider, `${state.nodes.length} node${state.nodes.length === 1 ? "" : "s"}`, state.price].filter(Boolean).join(" · "));
  for (const id of ["nodes-part", "rates-part", "footer"]) hide(id, Boolean(state.kept));
  hide("figures", Boolean(state.kept && !state.spent));
  if (state.kept && state.spent) drawNumbers([["Has cost", ...costWords(state.spent, `, as kept ${moment(state.spent.at)} in ${state.spent.where}`)]]);
  if (!state.kept) {
    put(by("nodes"), state.nodes.map(drawNode));
    sweep(cards);
    sweep(buttons);
    if (!by("nodes").querySelector('[tabindex="0"]')) rove(by("nodes").querySelector("[data-slot]"));
  }
  drawChanges();
  drawJobs();
  drawDetails();
}

async function asked(path) {
  const answer = await fetch(path, { cache: "no-store" });
  const found = answer.headers.get("content-type").startsWith("application/json") ? await answer.json() : { problem: await answer.text() };
  if (!answer.ok) throw new Error(found.problem);
  return found;
}

async function look() {
  if (document.hidden) { waits = true; return; }
  const began = performance.now();
  try {
    state = await asked("/fleet/state");
    remember();
    draw();
    if (!state.kept) drawFigures();
    hide("problem", true);
  } catch (error) {
    hide("problem", false);
    write(by("problem"), `The fleet does not answer: ${error.message}${state ? " What is shown is what it said last." : ""}`);
  }
  // A slow fleet is asked less often. What is kept does not change.
  clearTimeout(next);
  if (!state || !state.kept) next = setTimeout(look, Math.max(LOOK_MS, 4 * (performance.now() - began)));
}

// Keys ----------------------------------------------------------------------------------------------------------------

// One slot is reached by the tabulator, the others by arrow keys.
function rove(button) {
  for (const each of by("nodes").querySelectorAll('[tabindex="0"]')) each.tabIndex = -1;
  if (button) button.tabIndex = 0;
}

function neighbour(from, key) {
  const all = [...by("nodes").querySelectorAll("[data-slot]")], at = all.indexOf(from);
  if (key === "Home" || key === "End") return all.at(key === "Home" ? 0 : -1);
  if (key === "ArrowLeft" || key === "ArrowRight") return all[at + (key === "ArrowLeft" ? -1 : 1)];
  const bars = [...by("nodes").querySelectorAll(".bar:has([data-slot])")], next = bars[bars.indexOf(from.parentElement) + (key === "ArrowUp" ? -1 : 1)];
  const middle = (each) => each.getBoundingClientRect().left + each.getBoundingClientRect().width / 2;
  return next && [...next.querySelectorAll("[data-slot]")].sort((one, other) => Math.abs(middle(one) - middle(from)) - Math.abs(middle(other) - middle(from)))[0];
}

by("nodes").addEventListener("keydown", (event) => {
  if (!event.target.dataset.slot || !/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key)) return;
  event.preventDefault();
  const next = neighbour(event.target, event.key);
  if (next) next.focus();
});
by("nodes").addEventListener("click", (event) => {
  const button = event.target.closest("[data-slot]");
  if (button) choose(button.dataset.slot);
});
by("nodes").addEventListener("focusin", (event) => { if (event.target.dataset.slot) rove(event.target); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state && (chosen || followed)) close(); });
document.addEventListener("visibilitychange", () => { if (waits && !document.hidden) { waits = false; look(); } });
by("close").addEventListener("click", close);
setInterval(() => { if (state && !state.kept) readLog(); }, LOG_MS);
look();
