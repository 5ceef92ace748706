// The live view: asks the server once a second, and only while it is shown.

import { ask } from "./server.js";

const EVERY_MS = 1000;
const KEPT = 120;
const byId = (id) => document.getElementById(id);
const series = { prefill: [], decode: [], requests: [] };
let last = null;
let timer = null;
let hasFacts = false;

export function showLive(isShown) {
  clearTimeout(timer);
  timer = null;
  last = null;
  if (isShown) {
    facts();
    tick();
  }
}

async function tick() {
  const began = performance.now();
  if (!document.hidden) {
    try {
      draw(await (await ask("/live")).json());
    } catch (error) {
      byId("live-state").textContent = error.message;
      last = null;
    }
  }
  timer = setTimeout(tick, Math.max(100, EVERY_MS - (performance.now() - began)));
}

function draw(now) {
  byId("live-state").textContent = `${now.state}, ${now.requests_ended} requests ended since the start`;
  if (last) {
    const seconds = now.at_s - last.at_s;
    rate("prefill", (now.prefill_tokens - last.prefill_tokens) / seconds);
    rate("decode", (now.decode_tokens - last.decode_tokens) / seconds);
  }
  last = now;
  byId("requests").textContent = `${now.running}, ${now.waiting}`;
  line("requests", now.running);
  byId("ttft").textContent = now.ttft_ms === null ? "–" : `${now.ttft_ms.toFixed(1)} ms`;
  byId("tpot").textContent = now.tpot_ms === null ? "–" : `${now.tpot_ms.toFixed(1)} ms`;
  const share = now.kv_slots ? now.kv_slots_used / now.kv_slots : 0;
  byId("slots").textContent = `${now.kv_slots_used} of ${now.kv_slots}`;
  byId("slots-meter").value = share;
  rows("buckets", now.buckets.map((one) => [
    one.name, one.bound_tokens, one.blocks_used, one.slots_used,
    now.kv_slots ? `${(100 * one.slots_used / now.kv_slots).toFixed(1)} %` : "",
  ]));
}

function rate(name, value) {
  byId(`${name}-rate`).textContent = value.toFixed(value < 100 ? 1 : 0);
  line(name, value);
}

function line(name, value) {
  const values = series[name];
  values.push(value);
  if (values.length > KEPT) values.shift();
  const svg = byId(`${name}-line`);
  svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  const highest = Math.max(...values, 1e-9);
  const points = values.map((one, at) => `${KEPT - values.length + at},${(1 - 0.96 * one / highest).toFixed(4)}`);
  let drawn = svg.firstElementChild;
  if (!drawn) {
    drawn = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    svg.append(drawn);
  }
  drawn.setAttribute("points", points.join(" "));
}

function rows(id, values) {
  byId(id).tBodies[0].replaceChildren(...values.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const made = document.createElement("td");
      made.textContent = cell;
      row.append(made);
    }
    return row;
  }));
}

// What does not change while the server runs.
async function facts() {
  if (hasFacts) return;
  hasFacts = true;
  let found;
  try {
    found = await (await ask("/live/machine")).json();
  } catch {
    hasFacts = false; // the state above says why; the next look asks again
    return;
  }
  if (found.machine_svg) {
    byId("machine").src = URL.createObjectURL(new Blob([found.machine_svg], { type: "image/svg+xml" }));
  }
  rows("schedules", found.schedules.map((one) => [
    one.phase, one.used_for, one.problem, one.rows, one.why, one.schedule,
  ]));
}
