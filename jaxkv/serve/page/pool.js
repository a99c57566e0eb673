// The picture of the pool, from what /pool tells. Asks for nothing itself, and knows of chats only which colour theirs is.

import { bytes, colour, count, hatch, owner, paper, seconds } from "/page/format.js";

const find = (id) => document.getElementById(id);
const AWAY = new Set(["parking", "parked", "restoring", "replaying"]);
const NUM_SPEEDS = 120; // polls that the little curve shows

export class Pool {
  /** `chatOf(requestId)` is the chat that sent a request, if it is one of this page's. */
  constructor(chatOf) {
    this.chatOf = chatOf;
    this.speeds = [];
    this.before = null;
  }

  show(pool) {
    const who = pool.sequences.map((sequence) => this.person(sequence));
    this.measure(pool);
    this.tell(pool);
    this.drawPages(pool, who);
    this.drawImages(pool, who);
    this.list(pool, who);
  }

  person(sequence) {
    const chat = this.chatOf(sequence.request_id);
    if (chat) return { sequence, name: chat.name, place: chat.number - 1 };
    return { sequence, name: `other ${sequence.id}`, place: sequence.id };
  }

  /** Tokens per second between two looks, smoothed a little. */
  measure(pool) {
    const { before } = this;
    this.before = pool;
    if (!before || pool.clock_s <= before.clock_s) return;
    const speed = Math.max(0, pool.generated_tokens - before.generated_tokens) / (pool.clock_s - before.clock_s);
    const last = this.speeds.at(-1) ?? speed;
    this.speeds.push(speed === 0 && last < 0.5 ? 0 : 0.6 * last + 0.4 * speed);
    this.speeds.splice(0, this.speeds.length - NUM_SPEEDS);
  }

  tell(pool) {
    const set = (id, text) => {
      if (find(id).textContent !== text) find(id).textContent = text;
    };
    const speed = this.speeds.at(-1) ?? 0;
    set("speed", speed && speed < 10 ? speed.toFixed(1) : speed.toFixed(0));
    set("busy", count(pool.rows.busy));
    set("rows", `of ${pool.rows.total} rows`);
    set("parked", count(pool.parked));
    set("waiting", count(pool.waiting));
    set("copies", count(pool.copies.to_host + pool.copies.to_device));
    set("directions", pool.copies.to_host + pool.copies.to_device ? `${pool.copies.to_host} out, ${pool.copies.to_device} back` : "");
    set("parks", count(pool.num_parks));
    set("returns", count(pool.num_restores));
    const { total, free } = pool.pages;
    set("used", `${count(total - free)} of ${count(total)} pages`);
    const budget = pool.host_budget_bytes === null ? "" : ` of ${bytes(pool.host_budget_bytes)}`;
    set("host", `${bytes(pool.host_bytes)}${budget}`);
    this.curve();
  }

  curve() {
    const { pen, width, height } = paper(find("spark"));
    const most = Math.max(1, ...this.speeds);
    pen.strokeStyle = colour("accent");
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    pen.beginPath();
    this.speeds.forEach((speed, index) => {
      pen.lineTo(width - (this.speeds.length - 1 - index) * (width / (NUM_SPEEDS - 1)), height - 2 - (speed / most) * (height - 4));
    });
    pen.stroke();
  }

  /** Squares, each a page or as many as fit the picture: by owner, then what several share, what leaves, what is kept, what is free. */
  drawPages(pool, who) {
    const canvas = find("pages");
    const { pen, width, height } = paper(canvas);
    const { total, free, cached, leaving } = pool.pages;
    const groups = who.filter(({ sequence }) => sequence.n_pages_own).map((one) => ({ num: one.sequence.n_pages_own, ink: owner(one.place) }));
    const own = groups.reduce((sum, group) => sum + group.num, 0);
    const shared = Math.max(0, total - free - own - leaving);
    groups.push({ num: shared, ink: "shared" }, { num: leaving, ink: "shared", isHatched: true }, { num: cached, ink: "cached" });
    const size = squareSize(width, height, total);
    const columns = Math.max(1, Math.floor(width / size));
    const places = Math.min(total, columns * Math.max(1, Math.floor(height / size)));
    let done = 0;
    let at = 0;
    const square = (ink, isHatched) => {
      const [x, y, side] = [(at % columns) * size, Math.floor(at / columns) * size, size - (size > 5 ? 2 : 1)];
      if (isHatched) hatch(pen, x, y, side, side, colour(ink));
      else {
        pen.fillStyle = colour(ink);
        pen.beginPath();
        pen.roundRect(x, y, side, side, size > 5 ? 2 : 0);
        pen.fill();
      }
      at += 1;
    };
    for (const { num, ink, isHatched } of groups) {
      done += num;
      const until = Math.round((done / total) * places);
      while (at < until) square(ink, isHatched);
    }
    while (at < places) square("free", false);
    const told = who.filter(({ sequence }) => sequence.n_pages).map(({ name, sequence }) => `${name} ${sequence.n_pages}`);
    canvas.setAttribute("aria-label", told.length ? `Pages held: ${told.join(", ")}; ${free} of ${total} free` : "Nobody holds a page");
  }

  /** One bar as long as the pool has bytes, longer only if more lies there. */
  drawImages(pool, who) {
    const canvas = find("images");
    const { pen, width, height } = paper(canvas);
    pen.fillStyle = colour("free");
    pen.beginPath();
    pen.roundRect(0, 0, width, height, 4);
    pen.fill();
    const images = who.filter(({ sequence }) => sequence.host_bytes);
    const most = Math.max(pool.pool_bytes, pool.host_bytes);
    let x = 0;
    for (const { sequence, place } of images) {
      const length = (sequence.host_bytes / most) * width;
      if (AWAY.has(sequence.state)) hatch(pen, x, 0, Math.max(1, length - 1), height, colour(owner(place)));
      else {
        pen.globalAlpha = 0.3; // an image that stays, of one that runs
        pen.fillStyle = colour(owner(place));
        pen.fillRect(x, 0, Math.max(1, length - 1), height);
        pen.globalAlpha = 1;
      }
      x += length;
    }
    const kept = pool.host_bytes - images.reduce((sum, { sequence }) => sum + sequence.host_bytes, 0);
    pen.fillStyle = colour("cached"); // what stays there of those that are back
    pen.fillRect(x, 0, (Math.max(0, kept) / most) * width, height);
    const told = images.map(({ name, sequence }) => `${name} ${bytes(sequence.host_bytes)}`);
    canvas.setAttribute("aria-label", told.length ? `Images: ${told.join(", ")}` : "Nobody is parked");
  }

  list(pool, who) {
    const body = find("sequences");
    find("nobody").hidden = who.length > 0;
    body.parentElement.hidden = who.length === 0;
    while (body.rows.length > who.length) body.deleteRow(-1);
    while (body.rows.length < who.length) newRow(body);
    who.forEach(({ name, place, sequence }, index) => {
      const [who_, ...cells] = body.rows[index].cells;
      who_.firstChild.className = `swatch ${owner(place)}`;
      const texts = [name, stateText(sequence), count(sequence.n_tokens), count(sequence.n_pages), count(sequence.n_preempt)];
      [who_.lastChild, ...cells.map((cell) => cell.firstChild)].forEach((node, column) => {
        if (node.data !== texts[column]) node.data = texts[column];
      });
      cells[0].className = AWAY.has(sequence.state) ? "away" : "";
    });
  }
}

function newRow(body) {
  const row = body.insertRow();
  for (let column = 0; column < 5; column += 1) {
    const cell = column ? row.insertCell() : row.appendChild(Object.assign(document.createElement("th"), { scope: "row" }));
    if (!column) cell.append(document.createElement("i"));
    if (column > 1) cell.className = "n";
    cell.append(document.createTextNode(""));
  }
}

function stateText({ state, waiting_s: waited, is_held: isHeld }) {
  if (state === "decoding") return "running";
  if (state === "prefilling") return "reading";
  const since = waited === null ? "" : ` ${seconds(waited)}`;
  return `${isHeld ? "held" : state}${since}`;
}

/** The largest squares, from 28 pixels down to 3, of which so many fit. */
function squareSize(width, height, num) {
  for (let size = 28; size > 3; size -= 1) {
    if (Math.floor(width / size) * Math.floor(height / size) >= num) return size;
  }
  return 3;
}
