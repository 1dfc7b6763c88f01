// The playground: a chat with one setting, or with two settings side by side.

import { Answer } from "./answer.js";
import { call, endpoint, events, make } from "./api.js";

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null;

const setting = (which) => ({ mode: $(`mode-${which}`).value, threshold: Number($(`threshold-${which}`).value) });
const named = ({ mode, threshold }) => (mode === "threshold" ? `threshold ${threshold}` : mode);

// Return the body of a request with a setting. Throws if the schema is not JSON.
function bodyOf({ mode, threshold }) {
  const body = { model: $("model").value, messages: [...messages], temperature: 0, mode };
  if (mode === "threshold") body.threshold = threshold;
  if ($("max-tokens").value) body.max_tokens = Number($("max-tokens").value);
  const schema = $("schema").value.trim();
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  return body;
}

const SHOWN = { stream: true, stream_options: { include_usage: true, single_tokens: true }, logprobs: true };

async function answer(shown, at, signal) {
  try {
    const response = await call("v1/chat/completions", { method: "POST", body: { ...bodyOf(at), ...SHOWN }, signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      shown.take(chunk, at.mode);
    }
    shown.end();
  } catch (error) {
    if (error.name !== "AbortError") shown.fail(error.message);
    shown.end(error.name === "AbortError" ? "stopped" : "failed");
  }
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  const settings = $("race").checked ? [setting("a"), setting("b")] : [setting("a")];
  messages.push({ role: "user", content: text });
  try {
    bodyOf(settings[0]);
  } catch (error) {
    messages.pop();
    $("says").textContent = `The schema is not valid JSON: ${error.message}`;
    return;
  }
  $("says").textContent = "";
  $("welcome").hidden = true;
  const answers = settings.map((at) => new Answer(named(at)));
  const lanes = make("div", "lanes");
  lanes.append(...answers.map(({ element }) => element));
  $("conversation").append(make("p", "question card", text), lanes);
  lanes.scrollIntoView({ block: "end" });
  $("prompt").value = "";
  running = new AbortController();
  switchTo(true);
  for (const [number, shown] of answers.entries()) { // one after the other; in parallel, they would share the engine
    shown.begin();
    await answer(shown, settings[number], running.signal);
  }
  running = null;
  switchTo(false);
  if (answers[0].text) messages.push({ role: "assistant", content: answers[0].text });
  else messages.pop();
  if (answers.length > 1) $("says").textContent = "The answers ran one after the other, so that neither slowed down the other. The chat continues from the first answer.";
  $("prompt").focus();
}

function switchTo(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
}

function asCurl(body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${endpoint("v1/chat/completions")} \\\n  -H "Authorization: Bearer $MARS_RAY_API_KEY" \\\n  -H "Content-Type: application/json" \\\n  -d '${quoted}'`;
}

function asPython(body) {
  const { mode, threshold, ...usual } = body;
  const extra = threshold === undefined ? { mode } : { mode, threshold };
  const lines = Object.entries({ ...usual, extra_body: extra }).map(([name, value]) => `    ${name}=${literal(value)},`);
  return `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${endpoint("v1")}", api_key=os.environ.get("MARS_RAY_API_KEY", "none"))\nanswer = client.chat.completions.create(\n${lines.join("\n")}\n)\nprint(answer.choices[0].message.content)`;
}

function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, field]) => `${JSON.stringify(name)}: ${literal(field)}`).join(", ")}}`;
}

function showCode(title, write) {
  const text = $("prompt").value.trim();
  try {
    const body = bodyOf(setting("a"));
    body.messages = messagesWith(text);
    $("code").textContent = write(body);
    $("code-title").textContent = title;
    $("code-dialog").showModal();
  } catch (error) {
    $("says").textContent = `The schema is not valid JSON: ${error.message}`;
  }
}

// Use the next question, or the last one, or the example, because the messages must end with a turn of the user.
function messagesWith(text) {
  if (text) return [...messages, { role: "user", content: text }];
  const turns = messages.slice(0, messages.findLastIndex(({ role }) => role === "user") + 1);
  return turns.length ? turns : [{ role: "user", content: $("prompt").placeholder }];
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("code").textContent);
    $("copy").textContent = "Copied";
  } catch { // copying needs https; otherwise select the text, so that the user can copy it
    getSelection().selectAllChildren($("code"));
  }
}

for (const which of ["a", "b"]) {
  const shown = () => {
    $(`threshold-${which}-says`).textContent = $(`threshold-${which}`).value;
    $(`threshold-${which}`).disabled = $(`mode-${which}`).value !== "threshold";
  };
  $(`threshold-${which}`).addEventListener("input", shown);
  $(`mode-${which}`).addEventListener("change", shown);
  shown();
}
const showRace = () => ($("setting-b").hidden = !$("race").checked);
$("race").addEventListener("change", showRace);
showRace(); // some browsers keep the state of a form when a page is loaded again
switchTo(false);
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) running?.abort();
});
$("as-curl").addEventListener("click", () => showCode("As curl", asCurl));
$("as-python").addEventListener("click", () => showCode("As Python", asPython));
$("copy").addEventListener("click", copy);
$("code-close").addEventListener("click", () => $("code-dialog").close());
$("code-dialog").addEventListener("close", () => ($("copy").textContent = "Copy"));
$("clear").addEventListener("click", () => location.reload());

try {
  const models = await (await call("v1/models")).json();
  $("model").append(...models.data.map(({ id }) => make("option", "", id)));
  if (!models.data.length) throw new Error("This key may use no model here.");
  const showNotice = () => {
    const notice = models.data.find(({ id }) => id === $("model").value)?.notice ?? "";
    $("figures-notice").textContent = notice;
    $("figures-notice").hidden = !notice;
  };
  $("model").addEventListener("change", showNotice);
  showNotice();
} catch (error) {
  $("says").textContent = error.message;
}
