import { ask, KeyNeeded, useKey } from "./server.js";
import { startChat } from "./chat.js";
import { showLive } from "./live.js";

const byId = (id) => document.getElementById(id);

function show(view) {
  for (const name of ["key", "chat", "live"]) byId(`${name}-view`).hidden = name !== view;
  document.body.dataset.view = view;
  byId("show-chat").setAttribute("aria-pressed", view === "chat");
  byId("show-live").setAttribute("aria-pressed", view === "live");
  showLive(view === "live");
}

async function start() {
  try {
    const models = (await (await ask("/v1/models")).json()).data;
    const model = models.find((one) => one.state === "loaded") || models[0];
    if (!model) throw new Error("there is no model in the server's folder");
    byId("model").textContent = model.max_model_len ? `${model.id}, context ${model.max_model_len} tokens` : `${model.id}, ${model.state}`;
    startChat(model);
    byId("show-chat").addEventListener("click", () => show("chat"));
    byId("show-live").addEventListener("click", () => show("live"));
    show("chat");
    byId("question").focus();
  } catch (error) {
    byId("model").textContent = error instanceof KeyNeeded ? "a key is needed" : error.message;
    if (error instanceof KeyNeeded) {
      show("key");
      byId("key").focus();
    }
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key-error").textContent = "";
  start().then(() => {
    if (!byId("key-view").hidden) byId("key-error").textContent = "The server does not know this key.";
  });
});

start();
