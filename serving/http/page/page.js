import { ask, KeyNeeded, useKey } from "./server.js";
import { startChat } from "./chat.js";

const byId = (id) => document.getElementById(id);

function show(view) {
  for (const name of ["key", "chat"]) byId(`${name}-view`).hidden = name !== view;
  document.body.dataset.view = view;
}

async function start() {
  try {
    const models = (await (await ask("/v1/models")).json()).data;
    const model = models.find((one) => one.state === "loaded") || models[0];
    if (!model) throw new Error("there is no model in the server's folder");
    byId("model").textContent = model.max_model_len ? `${model.id}, context ${model.max_model_len} tokens` : `${model.id}, ${model.state}`;
    startChat(model);
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
