// The chat page. Text from the model or the server becomes DOM text nodes only, never markup; all requests go to the
// server that this page came from. The conversation lives in this tab and is sent whole with every message.
"use strict";

const byId = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens"];
const SETTINGS = [...NUMBERS, "system", "thinking"];
const STARTING_POLL_MS = 2000;
const NEAR_END_PX = 48;
const MAX_INLINE_CHARS = 20000; // longer paragraphs stay plain, whatever they hold

let messages = []; // as the API wants them
let running = null; // the AbortController of the answer under way
let apiKey = sessionStorage.getItem("api-key") || "";

class RequestFailure extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// --- The server ---

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey) headers.Authorization = "Bearer " + apiKey;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestFailure(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  let details = {};
  try {
    details = (await response.json()).error || {};
  } catch {
    // Something between here and the server has answered.
  }
  throw new RequestFailure(response.status, details.message || `The server answered with status ${response.status}.`, details.code);
}

// The events of a stream, up to its end mark; a stream that breaks off, or tells of an error, is a failure.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new RequestFailure(0, "The connection to the server was lost.");
    }
    if (piece.done) throw new RequestFailure(0, "The connection to the server ended before the answer did.");
    const frames = (rest + piece.value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      const data = frame.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new RequestFailure(500, event.error.message, event.error.code);
      yield event;
    }
  }
}

async function loadModels() {
  let models;
  try {
    models = (await (await request("v1/models")).json()).data;
  } catch (error) {
    showFailure(error);
    if (error.code === "engine_starting") setTimeout(loadModels, STARTING_POLL_MS);
    return;
  }
  showError("");
  byId("key-form").hidden = true;
  byId("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  byId("model").disabled = models.length < 2;
}

function requestBody() {
  const system = byId("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (byId("model").value) body.model = byId("model").value;
  for (const id of NUMBERS) {
    if (byId(id).value !== "") body[id] = byId(id).valueAsNumber;
  }
  if (!byId("thinking").checked) body.chat_template_kwargs = { enable_thinking: false };
  return body;
}

// --- Asking ---

async function ask(text) {
  showError("");
  byId("hint").hidden = true;
  messages.push({ role: "user", content: text });
  const question = addTurn("user", "You");
  question.append(element("div", "", text));
  const answer = new Answer();
  running = new AbortController();
  setBusy(true);
  scrollToEnd();
  try {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()),
      signal: running.signal,
    });
    for await (const event of eventsOf(response)) answer.take(event);
    answer.end(answer.hasText ? "" : "no text");
    say("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") {
      answer.end("stopped");
      say("Stopped.");
    } else {
      if (!(error instanceof RequestFailure)) console.error(error);
      answer.end("broken off");
      showFailure(error);
      if (!answer.hasText) giveBack(text, question, answer);
    }
  }
  if (question.isConnected && answer.content) messages.push({ role: "assistant", content: answer.content });
  running = null;
  setBusy(false);
}

// A message that was not answered goes back to where it was written.
function giveBack(text, question, answer) {
  messages.pop();
  question.remove();
  answer.turn.remove();
  byId("hint").hidden = messages.length > 0;
  if (!byId("input").value) byId("input").value = text;
  fitInput();
}

class Answer {
  constructor() {
    this.turn = addTurn("assistant busy", "Model");
    this.waiting = element("p", "waiting", "Waiting");
    this.body = element("div", "answer");
    this.turn.append(this.waiting, this.body);
    this.content = "";
    this.thinking = null;
    this.thought = document.createTextNode("");
    this.blocks = []; // [key, node] of each part of the content
    this.note = "";
    this.frame = 0;
    this.startTime = performance.now();
    this.firstTime = null;
    this.numTokens = this.numFirstTokens = 0;
  }

  get hasText() {
    return this.content !== "" || this.thinking !== null;
  }

  take(event) {
    const now = performance.now();
    const choice = event.choices[0];
    if (event.usage) this.numTokens = event.usage.completion_tokens;
    if (this.firstTime === null) {
      this.firstTime = now;
      this.numFirstTokens = this.numTokens;
    }
    this.lastTime = now;
    if (choice) {
      if (choice.delta.reasoning_content) this.addThought(choice.delta.reasoning_content);
      if (choice.delta.content) this.addContent(choice.delta.content);
      if (choice.finish_reason === "length") this.note = "cut off at the token limit";
      if (choice.finish_reason === "abort") this.note = "ended by the server";
    }
    if (!this.frame) this.frame = requestAnimationFrame(() => this.render());
  }

  addThought(text) {
    if (this.thinking === null) {
      this.thinking = element("details", "thinking open-ended");
      this.thinkingSummary = element("summary", "", "Thinking");
      const body = element("div");
      body.append(this.thought);
      this.thinking.append(this.thinkingSummary, body);
      this.turn.insertBefore(this.thinking, this.body);
      this.thinkingStart = performance.now();
    }
    this.thought.appendData(text);
  }

  addContent(text) {
    if (!this.content) this.endThought();
    this.content += text;
  }

  endThought() {
    if (this.thinking === null || !this.thinking.classList.contains("open-ended")) return;
    this.thinking.classList.remove("open-ended");
    this.thinkingSummary.textContent = `Thought for ${seconds(performance.now() - this.thinkingStart)}`;
  }

  end(note) {
    if (note) this.note = note;
    this.endThought();
    this.turn.classList.remove("busy");
    cancelAnimationFrame(this.frame);
    this.render();
    this.waiting.remove();
    if (this.content) this.foot.append(copyButton("Copy", () => this.content, "Copy the answer"));
  }

  render() {
    this.frame = 0;
    const follows = isNearEnd();
    this.waiting.hidden = this.hasText;
    // Only what has changed is made anew: usually the last block.
    const parts = blocksOf(this.content);
    let same = 0;
    while (same < parts.length && same < this.blocks.length && this.blocks[same][0] === keyOf(parts[same])) same += 1;
    for (const [, node] of this.blocks.splice(same)) node.remove();
    for (const part of parts.slice(same)) {
      const node = nodeOf(part);
      this.blocks.push([keyOf(part), node]);
      this.body.append(node);
    }
    this.showFoot();
    if (follows) scrollToEnd();
  }

  showFoot() {
    if (!this.foot) {
      this.foot = element("div", "foot");
      this.stats = element("span", "stats");
      this.foot.append(this.stats);
      this.turn.append(this.foot);
    }
    const facts = [];
    if (this.firstTime !== null) {
      facts.push(`first token after ${seconds(this.firstTime - this.startTime)}`);
      const spent = (this.lastTime - this.firstTime) / 1000;
      const num = this.numTokens - this.numFirstTokens;
      if (num > 0 && spent > 0) facts.push(`${(num / spent).toFixed(1)} tokens/s`);
      facts.push(`${this.numTokens} tokens`);
    }
    this.stats.textContent = facts.join(" · ");
    if (this.note) this.stats.append(facts.length ? " · " : "", element("span", "note", this.note));
  }
}

// --- A little Markdown, as DOM nodes ---

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

// Parts of a text: {kind: "code" | "heading" | "list" | "text", lines, info}.
function blocksOf(text) {
  const blocks = [];
  let fence = null;
  let open = null; // the block that the next line may belong to
  for (const line of text.split("\n")) {
    if (fence !== null) {
      if (line.trim().startsWith(fence) && !line.trim().slice(fence.length).replaceAll(fence[0], "")) fence = open = null;
      else open.lines.push(line);
      continue;
    }
    const start = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (start) {
      fence = start[1];
      open = { kind: "code", lines: [], info: start[2] };
      blocks.push(open);
    } else if (heading) {
      blocks.push({ kind: "heading", lines: [heading[2]], info: heading[1].length });
      open = null;
    } else if (!line.trim()) {
      if (open?.kind !== "list") open = null;
    } else if (ITEM.test(line)) {
      if (open?.kind !== "list") blocks.push((open = { kind: "list", lines: [], info: "" }));
      open.lines.push(line);
    } else if (open?.kind === "text" || (open?.kind === "list" && /^\s/.test(line))) {
      open.lines.push(line);
    } else {
      blocks.push((open = { kind: "text", lines: [line], info: "" }));
    }
  }
  return blocks;
}

function keyOf(block) {
  return `${block.kind} ${block.info}\n${block.lines.join("\n")}`;
}

function nodeOf(block) {
  const text = block.lines.join("\n");
  if (block.kind === "code") return codeNode(text, block.info);
  if (block.kind === "list") return listNode(block.lines);
  const node = element(block.kind === "heading" ? `h${Math.min(block.info + 1, 4)}` : "p");
  node.append(...inlineNodes(text));
  return node;
}

function codeNode(text, language) {
  const box = element("div", "code");
  const head = element("div");
  head.append(element("span", "", language || "code"), copyButton("Copy", () => text, "Copy the code"));
  const pre = element("pre");
  pre.tabIndex = 0; // so that it can be scrolled with the keyboard
  pre.append(element("code", "", text));
  box.append(head, pre);
  return box;
}

function listNode(lines) {
  const levels = []; // open lists, outermost first: {indent, list, item}
  for (const line of lines) {
    const [, space, mark, text] = ITEM.exec(line) || [];
    if (mark === undefined) {
      levels.at(-1).item.append("\n", ...inlineNodes(line.trim()));
      continue;
    }
    while (levels.length > 1 && space.length < levels.at(-1).indent) levels.pop();
    if (!levels.length || space.length > levels.at(-1).indent + 1) {
      const list = element(/\d/.test(mark) ? "ol" : "ul");
      if (list.tagName === "OL") list.start = parseInt(mark, 10);
      levels.at(-1)?.item.append(list);
      levels.push({ indent: space.length, list, item: null });
    }
    const level = levels.at(-1);
    level.item = element("li");
    level.item.append(...inlineNodes(text));
    level.list.append(level.item);
  }
  return levels[0].list;
}

function inlineNodes(text) {
  if (text.length > MAX_INLINE_CHARS) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(/`([^`\n]+)`|\*\*([^*\n]+)\*\*|(?<![\w*])\*([^\s*][^*\n]*)\*(?![\w*])/g)) {
    const [whole, code, strong, emphasis] = match;
    if (match.index > end) nodes.push(text.slice(end, match.index));
    if (code !== undefined) nodes.push(element("code", "", code));
    else nodes.push(element(strong !== undefined ? "strong" : "em", "", strong ?? emphasis));
    end = match.index + whole.length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

// --- The page ---

function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

function addTurn(className, label) {
  const turn = element("article", "turn " + className);
  turn.setAttribute("aria-label", label);
  byId("log").append(turn);
  return turn;
}

function copyButton(text, content, label) {
  const button = element("button", "small", text);
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    button.textContent = (await copy(content())) ? "Copied" : "Cannot copy";
    setTimeout(() => (button.textContent = text), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages over plain HTTP have no clipboard; the old way works there.
  }
  const area = element("textarea", "hidden");
  area.value = text;
  document.body.append(area);
  const before = document.activeElement;
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}

function seconds(ms) {
  return ms < 9950 ? `${(ms / 1000).toFixed(ms < 995 ? 2 : 1)} s` : `${Math.round(ms / 1000)} s`;
}

function isNearEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
}

function scrollToEnd() {
  byId("log").scrollTop = byId("log").scrollHeight;
}

function say(text) {
  byId("status").textContent = text;
}

function showError(text) {
  byId("error").textContent = text;
  byId("error").hidden = !text;
}

function showFailure(error) {
  if (error.status === 401) {
    const isNew = byId("key-form").hidden;
    byId("key-form").hidden = false;
    byId("key").focus();
    showError(isNew && !apiKey ? "" : "The server does not accept this API key.");
  } else if (error.code === "engine_starting") {
    showError("The engine is starting. This page waits for it.");
  } else {
    showError(error instanceof RequestFailure ? sentence(error.message) : "The server's answer could not be read.");
  }
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

function setBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

function fitInput() {
  const input = byId("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + input.offsetHeight - input.clientHeight}px`;
}

function showSettings(shown) {
  byId("settings").hidden = !shown;
  byId("show-settings").setAttribute("aria-expanded", String(shown));
}

function send() {
  const input = byId("input");
  const text = input.value.trim();
  if (running || !text) return;
  if (!byId("settings").checkValidity()) {
    showSettings(true);
    byId("settings").reportValidity();
    return;
  }
  input.value = "";
  fitInput();
  ask(text);
}

function newChat() {
  running?.abort();
  messages = [];
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  byId("hint").hidden = false;
  showError("");
  byId("input").focus();
}

function saveSettings() {
  const values = SETTINGS.map((id) => [id, id === "thinking" ? byId(id).checked : byId(id).value]);
  localStorage.setItem("settings", JSON.stringify(Object.fromEntries(values)));
}

function restoreSettings() {
  let values = {};
  try {
    values = JSON.parse(localStorage.getItem("settings")) || {};
  } catch {
    // Whatever that was, it is no settings of this page.
  }
  for (const id of SETTINGS) {
    if (!(id in values)) continue;
    if (id === "thinking") byId(id).checked = Boolean(values[id]);
    else byId(id).value = values[id];
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("input").addEventListener("input", fitInput);
byId("stop").addEventListener("click", () => {
  running?.abort();
  byId("input").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) running?.abort();
});
byId("new-chat").addEventListener("click", newChat);
byId("show-settings").addEventListener("click", () => showSettings(byId("settings").hidden));
byId("settings").addEventListener("change", saveSettings);
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = byId("key").value.trim();
  sessionStorage.setItem("api-key", apiKey);
  loadModels();
  byId("input").focus();
});

restoreSettings();
loadModels();
