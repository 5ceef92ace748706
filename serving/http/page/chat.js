// The conversation: kept in this tab, so that a reload does not lose it.

import { chatEvents } from "./server.js";
import { rendered } from "./markdown.js";

const KEPT = "phasewise-conversation";
const FIELDS = ["system", "temperature", "top-p", "min-p", "max-tokens"];
const byId = (id) => document.getElementById(id);

let conversation = restored();
let running = null;
let modelId = "";

export function startChat(model) {
  modelId = model.id;
  for (const name of FIELDS) {
    const field = byId(name);
    field.value = sessionStorage.getItem(`phasewise-${name}`) || "";
    field.addEventListener("change", () => sessionStorage.setItem(`phasewise-${name}`, field.value));
  }
  const sampling = model.default_sampling || { temperature: "", top_p: "", min_p: "" }; // not loaded yet
  byId("temperature").placeholder = sampling.temperature;
  byId("top-p").placeholder = sampling.top_p;
  byId("min-p").placeholder = sampling.min_p;
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("stop").addEventListener("click", () => running && running.abort());
  byId("again").addEventListener("click", again);
  byId("clear").addEventListener("click", () => {
    if (running) running.abort();
    conversation = [];
    keep();
    drawAll();
    byId("question").focus();
  });
  drawAll();
}

function restored() {
  try {
    return JSON.parse(sessionStorage.getItem(KEPT)) || [];
  } catch {
    return [];
  }
}

function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(conversation));
  } catch {
    // The tab's storage is full: the conversation goes on without it.
  }
}

function send() {
  const field = byId("question");
  const text = field.value.trim();
  if (!text || running) return;
  field.value = "";
  conversation.push({ role: "user", content: text });
  draw(conversation.at(-1));
  toEnd();
  answer();
}

function again() {
  if (running) return;
  if (conversation.at(-1)?.role === "assistant") conversation.pop();
  drawAll();
  answer();
}

function body() {
  const messages = conversation.map(({ role, content }) => ({ role, content }));
  const system = byId("system").value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const out = { model: modelId, messages };
  for (const [field, name] of [["temperature", "temperature"], ["top-p", "top_p"], ["min-p", "min_p"], ["max-tokens", "max_tokens"]]) {
    const value = byId(field).value;
    if (value !== "") out[name] = Number(value);
  }
  return out;
}

async function answer() {
  const said = { role: "assistant", content: "", thought: "" };
  const element = draw(said);
  running = new AbortController();
  buttons();
  const began = performance.now();
  let first = 0;
  let reason = "";
  try {
    for await (const event of chatEvents(body(), running.signal)) {
      if (event.prompt_progress) {
        progress(event.prompt_progress);
        continue;
      }
      const choice = event.choices[0];
      if (choice) {
        // The answer begins with its first text: an event without any comes before the prompt is computed.
        if (!first && (choice.delta.content || choice.delta.reasoning_content)) {
          progress(null);
          byId("status").textContent = "";
          first = performance.now();
        }
        said.content += choice.delta.content || "";
        said.thought += choice.delta.reasoning_content || "";
        reason = choice.finish_reason || reason;
        later(element, said);
      }
      if (event.usage) status(event.usage, began, first, reason);
    }
  } catch (error) {
    const isStopped = error.name === "AbortError";
    byId("status").textContent = isStopped ? "stopped" : "";
    if (!isStopped) failed(`${error.message}. Regenerate asks again.`);
  }
  running = null;
  progress(null);
  if (said.content || said.thought) {
    conversation.push(said);
    fill(element, said);
  } else {
    element.remove();
  }
  keep();
  buttons();
}

// The bar while a prompt is computed; null: it is, or was given up.
function progress(prompt) {
  byId("prompt-bar").hidden = !prompt;
  if (!prompt) return;
  byId("prompt-bar").max = prompt.total;
  byId("prompt-bar").value = prompt.processed;
  const done = prompt.processed - prompt.cache;
  const left = done ? (prompt.time_ms / 1000) * ((prompt.total - prompt.processed) / done) : 0;
  byId("status").textContent = `prompt: ${prompt.processed} of ${prompt.total} tokens, ${Math.round(left)} s left`;
}

function status(usage, began, first, reason) {
  first = first || performance.now();
  const seconds = (performance.now() - first) / 1000;
  const rate = usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / seconds : 0;
  const cut = reason === "length" ? ", cut at the limit of tokens" : "";
  byId("status").textContent =
    `${usage.completion_tokens} tokens, first after ${Math.round(first - began)} ms, ${rate.toFixed(1)} tokens/s${cut}`;
}

// Drawn at most once a frame: an answer may bring hundreds of tokens a second.
let pendingFrame = null;
function later(element, said) {
  if (pendingFrame) return;
  pendingFrame = requestAnimationFrame(() => {
    pendingFrame = null;
    fill(element, said);
  });
}

function drawAll() {
  byId("messages").replaceChildren();
  conversation.forEach(draw);
  buttons();
}

function draw(message) {
  const element = document.createElement("div");
  element.className = message.role === "user" ? "message user" : "message answer";
  byId("messages").append(element);
  fill(element, message);
  return element;
}

function fill(element, message) {
  const log = byId("messages");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const who = document.createElement("p");
  who.className = "who";
  who.textContent = message.role === "user" ? "You" : modelId;
  const parts = [who];
  if (message.thought) {
    const thought = document.createElement("details");
    thought.className = "thought";
    const title = document.createElement("summary");
    title.textContent = "Thoughts";
    const text = document.createElement("p");
    text.textContent = message.thought;
    thought.append(title, text);
    parts.push(thought);
  }
  if (message.role === "user") {
    const text = document.createElement("p");
    text.textContent = message.content;
    parts.push(text);
  } else {
    parts.push(rendered(message.content));
  }
  element.replaceChildren(...parts);
  if (follows) toEnd();
}

function toEnd() {
  const log = byId("messages");
  log.scrollTop = log.scrollHeight;
}

function failed(reason) {
  const element = document.createElement("div");
  element.className = "message error";
  element.setAttribute("role", "alert");
  element.textContent = reason;
  byId("messages").append(element);
  toEnd();
}

// A button that is disabled loses the focus to nothing: the field has it next.
function buttons() {
  const focused = document.activeElement;
  byId("send").disabled = running !== null;
  byId("stop").disabled = running === null;
  byId("again").disabled = running !== null || conversation.length === 0;
  if (focused.disabled) byId("question").focus();
}
