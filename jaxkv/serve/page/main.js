// The page: connects, polls, and keeps the chats. What a chat or the pool looks like stands in their own files.

import { ask, key } from "/page/api.js";
import { Chat } from "/page/chat.js";
import { Pool } from "/page/pool.js";

const POLL_MS = 400;
const QUIET_MS = 1500; // while nothing goes on, or nobody looks
const PROMPTS = [
  "Write a long story about a lighthouse keeper who finds a door in the sea.",
  "Explain in detail how bread is made, from the field to the table.",
  "Tell me the story of a robot who learns to paint, in many chapters.",
  "Describe a walk through a rain forest, with every animal you meet.",
  "Write a long letter from a sailor in the year 1800 to his sister.",
  "Explain how a steam engine works, part by part, to a curious child.",
  "Make up the history of a small town on the moon, year by year.",
  "Describe ten inventions that nobody has made yet, one after another.",
];

const find = (id) => document.getElementById(id);
const chats = [];
const pool = new Pool((id) => chats.find((chat) => chat.id !== null && id === chat.id));
let served = null; // what /props says, once it does
let isKeyWanted = false;

// The link to the server

function link(state, text) {
  const shown = find("link");
  shown.dataset.state = state;
  if (shown.textContent !== text) shown.textContent = text;
}

async function connect() {
  const props = await (await ask("/props")).json();
  served = props;
  document.title = `${props.model} · jaxkv`;
  find("eight").disabled = false;
  show();
}

async function look() {
  try {
    if (served === null) await connect();
    const state = await (await ask("/pool")).json();
    link("up", `${served.model}, ${served.pool_tokens.toLocaleString("en")} tokens of pool`);
    pool.show(state);
    return state.sequences.length ? POLL_MS : QUIET_MS;
  } catch (error) {
    if (error.status === 401) wantKey();
    else link("wait", error.code ? error.message : "the server cannot be reached");
    return QUIET_MS;
  }
}

async function poll() {
  let next = QUIET_MS;
  if (!document.hidden && !isKeyWanted) next = await look();
  const isBusy = chats.some((chat) => chat.isBusy);
  setTimeout(poll, isBusy && !document.hidden ? POLL_MS : next);
}

function draw() {
  for (const chat of chats) {
    if (chat.isBusy) chat.show();
    chat.draw();
  }
  setTimeout(draw, 200);
}

function wantKey() {
  isKeyWanted = true;
  find("key-note").textContent = key.get()
    ? "The server does not know this key. Try another."
    : "This server asks for a key. It stays in this tab and goes when the tab is closed.";
  find("gate").hidden = false;
  link("wait", "a key is needed");
  find("key").focus();
}

find("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(find("key").value.trim());
  find("key").value = "";
  find("gate").hidden = true;
  isKeyWanted = false;
  link("wait", "connecting");
  look();
});

// The chats

function options() {
  const fields = { max_tokens: "max-tokens", temperature: "temperature", seed: "seed" };
  const given = Object.entries(fields).filter(([, id]) => find(id).value !== "" && find(id).checkValidity());
  const chosen = Object.fromEntries(given.map(([field, id]) => [field, Number(find(id).value)]));
  return find("endless").checked ? { ...chosen, ignore_eos: true } : chosen;
}

function add() {
  const number = (chats.at(-1)?.number ?? 0) + 1;
  const chat = new Chat(number, { options, told: tell, changed: show, closed: remove });
  chats.push(chat);
  find("chats").append(chat.card);
  return chat;
}

function remove(chat) {
  chats.splice(chats.indexOf(chat), 1);
  if (!chats.length) add();
  if (document.activeElement === document.body) find("new").focus(); // its own button is gone
  show();
}

function show() {
  find("stop-all").disabled = !chats.some((chat) => chat.isBusy);
}

/** What somebody who does not see the page should hear of; of several things at once the last. */
function tell(text) {
  find("news").textContent = text;
}

/** Eight answers that may grow to about twice what the pool holds: so some will be parked, and all will be complete. */
function startEight() {
  const most = Math.max(16, Math.min(served.max_model_len - 64, Math.ceil((2 * served.pool_tokens) / PROMPTS.length)));
  const unused = chats.filter((chat) => !chat.isBusy && !chat.messages.length);
  for (const prompt of PROMPTS) (unused.shift() ?? add()).send(prompt, { max_tokens: most, ...options() });
  tell("Eight chats started");
}

find("new").addEventListener("click", () => add().field.focus());
find("eight").addEventListener("click", startEight);
find("stop-all").addEventListener("click", () => chats.forEach((chat) => chat.stop()));
document.addEventListener("visibilitychange", () => !document.hidden && !isKeyWanted && look());

add();
poll();
draw();
