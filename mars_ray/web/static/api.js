// Call the endpoint from a page, with the API key of this tab, and read streams of events.

const BASE = new URL("../", import.meta.url);
const KEY = "mars-ray-key";
const dialog = document.getElementById("key-dialog");
const forget = document.getElementById("forget");
let asking = null;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const endpoint = (path) => new URL(path, BASE);

// Call the endpoint, and ask the user for a key if one is needed. Throws `Refused` with the message of the endpoint.
export async function call(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = body === undefined ? {} : { "content-type": "application/json" };
    if (key) headers.authorization = `Bearer ${key}`;
    forget.hidden = !key;
    const response = await fetch(endpoint(path), {
      method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (response.ok) return response;
    const refused = await refusal(response);
    const reasons = { 401: key ? "This endpoint does not know this key." : "This endpoint needs a key.", 403: refused.message };
    if (!reasons[response.status]) throw refused;
    if (key === sessionStorage.getItem(KEY)) await askForKey(reasons[response.status], refused);
  }
}

async function refusal(response) {
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not JSON, such as the error page of a proxy */ }
  return new Refused(response.status, message);
}

// Ask the user only once, even if several calls need a key.
function askForKey(says, refused) {
  asking ??= new Promise((resolve, reject) => {
    document.getElementById("key-says").textContent = says;
    const input = document.getElementById("key");
    input.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const key = input.value.trim();
      if (dialog.returnValue !== "use" || !key) return reject(refused);
      sessionStorage.setItem(KEY, key.replace(/[^\x21-\x7e]/g, "?"));
      input.value = "";
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

forget.hidden = !sessionStorage.getItem(KEY);
forget.addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});

// Yield the data of each server-sent event of a response.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        const lines = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
        rest = rest.slice(end + 2);
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
