// What the page asks of its server, always of the same origin.

let key = sessionStorage.getItem("phasewise-key") || "";

export function useKey(given) {
  key = given;
  sessionStorage.setItem("phasewise-key", given);
}

export class KeyNeeded extends Error {}

const AWAY = "the server does not answer: it has ended, or the network is away";
const ENDED = "the connection ended before the answer did";

// What is fetched or read, or an error in words: a browser's own say "Failed to fetch" or "network error".
async function orAway(asked, words) {
  try {
    return await asked;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(words);
  }
}

export async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await orAway(fetch(path, { ...options, headers }), AWAY);
  if (answer.status === 401) throw new KeyNeeded(await reason(answer));
  if (!answer.ok) throw new Error(await reason(answer));
  return answer;
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

// The events of a streamed chat, as objects. An event may be cut anywhere.
export async function* chatEvents(body, signal) {
  const answer = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, return_progress: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await orAway(reader.read(), ENDED);
    if (done) throw new Error(ENDED);
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      if (event.startsWith(":")) continue; // a comment: the server is still at it
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const said = JSON.parse(data);
      if (said.error) throw new Error(said.error.message);
      yield said;
    }
  }
}
