"use strict";
const MOST_KEPT = 5000, MOST_SHOWN = 500, LARGE = 64, MOST_PROBLEMS = 20, MOST_RANKS = 32;
const MOST_SAMPLES = 60, RATE_WINDOW = 5.5;  // looks that are kept, one a second; seconds over which a rate is a mean
const SIGN = { lost: "✕", missing: "!" };
const byId = (id) => document.getElementById(id);
const OWN_MESHES = new Set(byId("meshes").dataset.ownMeshes.split(" "));  // those that meshgate spawns for a moment
const short = (text) => text.slice(0, 12);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function age(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["m", 60]])
    if (seconds >= length) return `${Math.floor(seconds / length)}${unit} ${Math.floor((seconds % length) / (length / (unit === "d" ? 24 : 60)))}${{ d: "h", h: "m", m: "s" }[unit]}`;
  return `${seconds.toFixed(seconds < 10 ? 1 : 0)}s`;
}

function table(target, columns, rows, empty, classes = []) {
  const said = JSON.stringify(rows.map((row) => row.map((cell) => cell.outerHTML ?? cell)));
  if (target.said === said) return;  // a button that stays does not vanish under the mouse
  target.said = said;
  const kept = target.scrollTop, focused = target.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  if (!rows.length) return target.replaceChildren(el("span", { class: "dim" }, empty));
  const head = el("tr", {}, ...columns.map((name, at) => el("th", { scope: "col", class: classes[at] || "" }, name)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, at) => el("td", { class: classes[at] || "" }, cell))));
  target.replaceChildren(el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
  target.scrollTop = kept;
  if (focused) [...target.querySelectorAll("button")].find((button) => button.dataset.key === focused)?.focus({ preventScroll: true });
}

// --- ranks

class Grid {
  constructor() {
    this.summary = el("span", { class: "dim" });
    this.title = el("h3");
    this.box = el("div", { class: "grid", role: "group" });
    this.root = el("div", {}, this.title, this.box);
    this.buttons = [];
    this.box.addEventListener("keydown", (event) => this.move(event));
  }

  update(name, about, cells, perGroup) {
    this.cells = cells;
    this.perGroup = perGroup;
    if (this.buttons.length !== cells.length) this.build();
    const counts = {};
    cells.forEach((cell, at) => {
      counts[cell.state] = (counts[cell.state] || 0) + 1;
      const button = this.buttons[at];
      if (button.dataset.state !== cell.state) {
        button.dataset.state = cell.state;
        button.textContent = (SIGN[cell.state] || "") + (cells.length > LARGE && SIGN[cell.state] ? "" : cell.rank);
      }
      const label = `rank ${cell.rank}, ${cell.state}${cell.about ? ", " + cell.about : ""}`;
      if (button.title !== label) { button.title = label; button.setAttribute("aria-label", label); }
    });
    const said = Object.entries(counts).map(([state, count]) => `${count} ${state}`).join(", ");
    this.title.replaceChildren(`${name} `, el("span", { class: "dim" }, `${about} · ${cells.length} ${cells.length === 1 ? "rank" : "ranks"}: ${said}`));
    this.box.setAttribute("aria-label", `Ranks of ${name}: ${said}`);
  }

  build() {
    this.box.classList.toggle("small", this.cells.length > LARGE);
    this.buttons = this.cells.map((cell, at) => {
      const button = el("button", { type: "button", class: "rank", tabindex: at ? "-1" : "0", "aria-pressed": "false" });
      button.addEventListener("click", () => choose(this, at));
      return button;
    });
    const groups = [];
    for (let at = 0; at < this.buttons.length; at += this.perGroup)
      groups.push(el("div", { class: "group" }, ...this.buttons.slice(at, at + this.perGroup)));
    this.box.replaceChildren(...groups);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.perGroup, ArrowUp: -this.perGroup }[event.key];
    const last = this.buttons.length - 1, now = this.buttons.indexOf(document.activeElement);
    const to = { Home: 0, End: last }[event.key] ?? (step === undefined ? undefined : Math.min(Math.max(now + step, 0), last));
    if (to === undefined || now < 0) return;
    event.preventDefault();
    this.buttons[now].tabIndex = -1;
    this.buttons[to].tabIndex = 0;
    this.buttons[to].focus();
  }
}

const grids = new Map();
let chosen = null, asked = null, events = [];  // asked: the title of the stack that is shown, or awaited

function choose(grid, at) {
  if (chosen) chosen.button.setAttribute("aria-pressed", "false");
  chosen = { grid, at, button: grid.buttons[at] };
  chosen.button.setAttribute("aria-pressed", "true");
  asked = null;
  byId("stack").hidden = true;
  showChosen();
  showUse();
}

function showChosen() {
  if (!chosen || chosen.button !== chosen.grid.buttons[chosen.at]) return;
  const cell = chosen.cell = chosen.grid.cells[chosen.at];
  const happened = events.filter((each) => cell.host && each.object.endsWith(`/${cell.host}`)).slice(-2);
  const text = [`${cell.mesh}, rank ${cell.rank}: ${cell.state}${cell.about ? ", " + cell.about : ""}`, ...happened.map((each) => `${each.reason}: ${each.message}`)].join(" · ") + (cell.report && cell.report !== cell.reason ? ` · ${cell.report}` : "");
  if (byId("detail-text").textContent !== text) byId("detail-text").textContent = text;
  byId("show-output").hidden = !cell.session;  // a line that several hosts have printed names none of them
  byId("show-stack").hidden = !cell.session || ["lost", "stopped"].includes(cell.state);
}

byId("show-output").addEventListener("click", () => showOutput("rank", chosen.cell.rank));
byId("show-stack").addEventListener("click", () => {
  const { session, host, mesh, rank } = chosen.cell;
  asked = `${mesh}, rank ${rank}:`;
  if (socket?.readyState !== WebSocket.OPEN) return showStack("meshgate ui does not answer");
  showStack("asking …");
  byId("show-stack").disabled = true;
  socket.send(JSON.stringify({ session, host, mesh, rank }));
});

function showStack(text) {
  byId("show-stack").disabled = false;
  if (!asked) return;  // another rank has been chosen meanwhile
  byId("stack").hidden = false;
  byId("stack").textContent = `${asked}\n${text}`;
}

const megabytes = (bytes) => (bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);
const percent = (value) => `${Math.round(value)}%`;

function hostsOf(status) {  // by mesh; a session may still know the hosts that the mesh had before it was scaled
  const found = new Map();
  for (const host of [...status.hosts, ...status.sessions.flatMap((session) => session.hosts)]) {
    if (host.rank >= (status.meshes[host.mesh] ?? Infinity)) continue;
    if (!found.has(host.mesh)) found.set(host.mesh, []);
    const hosts = found.get(host.mesh), known = hosts[host.rank];
    if (!known || host.state === "missing" || (host.reason && known.state !== "missing")) hosts[host.rank] = host;
  }
  return [...found].map(([mesh, hosts]) => [mesh, hosts.filter(Boolean)]);
}

function cellsOfHosts(hosts) {
  return hosts.map((host) => ({
    mesh: host.mesh, rank: host.rank, state: host.state === "missing" ? "missing" : "up", host: host.name, reason: host.reason,
    about: [host.name, host.reason].filter(Boolean).join(": "),
  }));
}

const hostOf = (procs, rank, total) => procs.hosts[Math.floor((rank * procs.hosts.length) / total)] ?? "";

function endedOf(mesh) {  // why each rank ended
  const found = new Map();
  for (const group of mesh.ended)
    for (const [first, last] of group.ranks) for (let rank = first; rank <= last; rank++) found.set(rank, group);
  return found;
}

function ago(end) {  // of ranks with the same reason; changes once a minute at most
  if (typeof end?.age !== "number") return "";
  const [first, last] = [end.age, end.last_age ?? end.age].map((seconds) => (seconds < 60 ? "less than a minute ago" : `${age(seconds).split(" ")[0]} ago`));
  return first === last ? `, ${first}` : `, first ${first}, last ${last}`;
}

function cellsOfProcs(procs, session) {
  const total = Object.values(procs.sizes).reduce((product, size) => product * size, 1);
  const missing = new Map(session.hosts.filter((host) => host.state === "missing").map((host) => [host.name, host.reason]));
  const actors = session.meshes.filter((mesh) => mesh.kind === "actors" && mesh.procs === procs.number);
  const sameName = session.meshes.filter((mesh) => mesh.kind === "procs" && mesh.name === procs.name).length;
  const ended = new Map([procs, ...actors].map((mesh) => [mesh, endedOf(mesh)]));
  const busy = new Map();
  if (sameName === 1)
    for (const call of session.calls.filter((each) => each.procs === procs.name).reverse())
      for (const rank of Object.values(call.processes)) busy.set(rank, `runs or waits for ${call.mesh}.${call.endpoint} since ${age(call.age)}`);
  return Array.from({ length: total }, (_, rank) => {
    const host = hostOf(procs, rank, total);
    const [mesh, ranks] = [...ended].find(([mesh, ranks]) => ranks.has(rank) && (mesh === procs || !ranks.get(rank).stopped)) ?? [];
    const end = ranks?.get(rank);
    const state = end ? (end.stopped ? "stopped" : "lost") : missing.has(host) ? "missing" : busy.has(rank) ? "busy" : "up";
    const kept = procs.kept_by_rank[rank];
    const said = [host, end ? end.reason + ago(end) : missing.get(host) ?? busy.get(rank)].filter(Boolean).join(": ");
    const about = [said, kept ? `keeps ${megabytes(kept)}` : ""].filter(Boolean).join(", ");
    return { mesh: procs.name, rank, state, about, host, reason: end?.reason ?? missing.get(host), end, report: mesh?.dead[rank], session: session.session };
  });
}

function showRanks(status) {
  const seen = new Set(), problems = [];
  const show = (key, name, about, cells, perGroup) => {
    if (!cells.length) return;
    if (!grids.has(key)) { grids.set(key, new Grid()); byId("meshes").append(grids.get(key).root); }
    grids.get(key).update(name, about, cells, perGroup);
    problems.push(...problemsOf(grids.get(key), cells));
    seen.add(key);
  };
  for (const [mesh, hosts] of hostsOf(status))
    show(`hosts ${mesh}`, mesh, "hosts", cellsOfHosts(hosts), hosts.length > LARGE ? 8 : hosts.length);
  for (const session of status.sessions)
    for (const procs of session.meshes.filter((mesh) => mesh.kind === "procs" && !OWN_MESHES.has(mesh.name))) {
      const actors = session.meshes.filter((mesh) => mesh.kind === "actors" && mesh.procs === procs.number);
      const shape = Object.entries(procs.sizes).map(([label, size]) => `${label}=${size}`).join(" ");
      const runs = actors.length ? `, actors ${actors.map((mesh) => `${mesh.name} (${mesh.class_name})`).join(", ")}` : "";
      const code = procs.version ? `, code ${short(procs.version)}` : "";
      const keeps = procs.kept ? `, keeps ${megabytes(procs.kept)}` : "";
      const sizes = Object.values(procs.sizes);
      const perGroup = sizes.length > 1 ? sizes[sizes.length - 1] : 8;
      show(`${session.session} ${procs.number} ${procs.name}`, procs.name, `${shape}${runs}${code}${keeps}, session ${session.session.slice(0, 8)}`, cellsOfProcs(procs, session), perGroup);
    }
  for (const [key, grid] of grids) if (!seen.has(key)) { grid.root.remove(); grids.delete(key); }
  showChosen();
  showAttention(problems);
}

// --- what needs attention

function ranges(ranks) {
  const runs = [];
  for (const rank of ranks)
    if (runs.length && runs[runs.length - 1][1] === rank - 1) runs[runs.length - 1][1] = rank; else runs.push([rank, rank]);
  const said = runs.slice(0, 8).map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  return `${ranks.length === 1 ? "rank" : "ranks"} ${said.join(", ")}${runs.length > 8 ? " and others" : ""}`;
}

function problemsOf(grid, cells) {
  const found = new Map();  // those with the same reason are one
  cells.forEach((cell, at) => {
    if (cell.state !== "lost" && cell.state !== "missing") return;
    const key = `${cell.state} ${cell.state === "missing" ? cell.host : ""} ${cell.reason}`;
    if (!found.has(key)) found.set(key, { grid, at, cell, ranks: [] });
    found.get(key).ranks.push(cell.rank);
  });
  return [...found.values()];
}

function showAttention(found) {
  const lostFor = ({ cell: { end } }) => end?.last_age ?? end?.age ?? 0;
  const problems = found.slice().sort((a, b) => lostFor(a) - lostFor(b));  // the last losses first, and what may come back
  const where = ({ cell, ranks }) => `${cell.mesh || "an endpoint's mesh"}, ${ranges(ranks)}: ${cell.state === "lost" ? "lost" : `${cell.host} is missing`}${cell.reason ? ": " + cell.reason : ""}`;
  const said = JSON.stringify(problems.map(where));
  const list = byId("attention"), tell = () => list.querySelectorAll("time").forEach((time, at) => { time.textContent = ago(problems[at].cell.end); });
  if (list.dataset.said === said) return tell();  // a button that stays keeps the focus
  list.dataset.said = said;
  byId("attention-section").hidden = !problems.length;
  const items = problems.slice(0, MOST_PROBLEMS).map((problem) => {
    const show = el("button", { type: "button", "aria-label": `Show ${problem.cell.mesh}, ${ranges(problem.ranks)}` }, "Show");
    show.addEventListener("click", () => { choose(problem.grid, problem.at); problem.grid.buttons[problem.at].focus(); });
    return el("li", {}, el("i", { class: `i-${problem.cell.state}`, "aria-hidden": "true" }, SIGN[problem.cell.state]), el("span", {}, where(problem), el("time", { "aria-live": "off" })), show);
  });
  if (problems.length > MOST_PROBLEMS) items.push(el("li", {}, `and ${problems.length - MOST_PROBLEMS} more`));
  list.replaceChildren(...items);
  tell();
}

// --- what ranks use

const PAST = 900, FINE = 60, COARSE = 15;  // seconds; looks older than FINE are one for each COARSE, with the highest values
const MEASURES = [["CPU", percent], ["Memory", megabytes], ["GPU", percent], ["Kept", megabytes]];
const past = { at: [], of: new Map() };  // the times of looks, and by rank its values then: a list for each measure, NaN if unknown
let used = [], usage = {}, measuring = false;  // used: what each rank uses now

function remember(at, now) {  // now: the values by rank; a rank that is not there is forgotten
  if (past.at.at(-1) !== at) past.at.push(at);  // the same while no status can be read: a measurement may be new
  for (const key of past.of.keys()) if (!now.has(key)) past.of.delete(key);
  for (const [key, values] of now) {
    if (!past.of.has(key)) past.of.set(key, values.map(() => Array(past.at.length - 1).fill(NaN)));
    past.of.get(key).forEach((series, measure) => { series[past.at.length - 1] = values[measure]; });
  }
  const lists = [...past.of.values()].flat(), bucket = (index) => Math.floor(past.at[index] / COARSE);
  for (let index = past.at.length - 1; index > 0; index--)
    if (at - past.at[index] > FINE && bucket(index) === bucket(index - 1)) {
      past.at.splice(index, 1);
      for (const series of lists) { const [value] = series.splice(index, 1); if (!(series[index - 1] >= value)) series[index - 1] = value; }
    }
  const old = past.at.findIndex((time) => at - time <= PAST);
  if (old > 0) for (const series of [past.at, ...lists]) series.splice(0, old);
}

function usedNow(status) {
  const meshes = status.sessions.flatMap((session) => session.meshes.filter((mesh) => mesh.kind === "procs" && !OWN_MESHES.has(mesh.name)).map((mesh) => ({ mesh, session })));
  const measured = new Map((usage.ranks || []).map(([mesh, rank, ...values]) => [`${mesh} ${rank}`, values]));
  const found = [];
  for (const { mesh, session } of meshes) {
    const alone = meshes.filter((each) => each.mesh.name === mesh.name).length === 1;  // a host does not know the session of a process
    const total = Object.values(mesh.sizes).reduce((product, size) => product * size, 1);
    for (let rank = 0; rank < total; rank++) {
      const [cpu, memory, gpu, gpuMemory] = (alone && measured.get(`${mesh.name} ${rank}`)) || [], kept = mesh.kept_by_rank?.[rank];
      const key = `${session.session} ${mesh.number} ${rank}`, hasKept = past.of.get(key)?.[3].some((value) => value > 0);
      const values = [cpu, memory, gpu, kept ?? (hasKept ? 0 : NaN)].map((value) => value ?? NaN);
      if (past.of.has(key) || !values.every(Number.isNaN)) found.push({ key, session: session.session, mesh: mesh.name, rank, host: hostOf(mesh, rank, total), gpuMemory, values });
    }
  }
  return found;
}

function showUse() {
  const order = byId("use-order").value, found = [...used];
  const isChosen = (row) => chosen?.cell && chosen.cell.session === row.session && chosen.cell.mesh === row.mesh && chosen.cell.rank === row.rank;
  if (order) found.sort((a, b) => (b.values[order] || 0) - (a.values[order] || 0));
  const shown = [...found.filter(isChosen), ...found.filter((row) => !isChosen(row))].slice(0, MOST_RANKS);
  const since = Math.max((past.at.at(-1) ?? 0) - (past.at[0] ?? 0), FINE), start = past.at.at(-1) - since;
  const said = since < 120 ? "the last minute" : `the last ${Math.round(since / 60)} minutes`;
  const known = shown.map((row) => past.of.get(row.key).map((series) => series.map((value, at) => [(past.at[at] - start) / since, value]).filter(([, value]) => !Number.isNaN(value))));
  const most = MEASURES.map((_, measure) => Math.max(1e-9, ...known.flatMap((lists) => lists[measure].map(([, value]) => value))));  // ranks can be compared
  table(byId("use"), ["Rank", ...MEASURES.map(([name]) => name)], shown.map((row, at) => [
    `${row.mesh} ${row.rank}${row.host ? " on " + row.host : ""}${isChosen(row) ? " (chosen)" : ""}`,
    ...MEASURES.map(([name, text], measure) => {
      const points = known[at][measure], value = row.values[measure], values = points.map(([, each]) => each);
      if (!points.length) return "–";
      const more = name === "GPU" && row.gpuMemory ? `, ${megabytes(row.gpuMemory)}` : "";
      return el("span", { class: "used" }, el("span", {}, Number.isNaN(value) ? "–" : text(value) + more),
        spark(points, most[measure], `${name}, ${said}: from ${text(Math.min(...values))} to ${text(Math.max(...values))}`));
    }),
  ]), "no rank keeps a value, and nothing else has been measured");
  const problems = Object.entries(usage.problems || {}).map(([host, problem]) => (host ? `${host}: ` : "") + problem.split("\n")[0]);
  const rest = found.length > shown.length ? `${shown.length} of ${found.length} ranks: choose a rank, or an order, to see another. ` : "";
  const state = measuring ? (usage.ranks ? "" : "measuring …") : problems.length ? "" : "Measuring opens a session with a process on each host, until the page is closed.";
  const note = rest + (problems.length ? `Not measured: ${problems[0]}${problems.length > 1 ? ` and ${problems.length - 1} more` : ""}` : state);
  if (byId("use-note").textContent !== note) byId("use-note").textContent = note;
  byId("measure").textContent = measuring ? "Stop measuring" : "Measure CPU, memory and GPUs";
}

byId("use-order").addEventListener("input", showUse);
byId("measure").addEventListener("click", () => { if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ measure: !measuring })); });

// --- rates

const samples = [];  // of the counts of all endpoints, and when each session's engine said so

function sampleOf(status, at, before) {  // a session whose engine has not answered keeps what it had before
  const found = new Map(), answered = new Map();
  for (const { session, problem, meshes } of status.sessions) {
    answered.set(session, problem ? before?.answered.get(session) ?? null : at);  // null: it never has
    if (problem) for (const [key, each] of before?.found ?? []) if (each.session === session) found.set(key, each);
    if (!problem) for (const mesh of meshes)
      for (const [endpoint, counts] of Object.entries(mesh.endpoints || {}))
        found.set(`${session} ${mesh.number} ${endpoint}`, { name: `${mesh.name}.${endpoint}`, session, counts });
  }
  return { at, found, answered };
}

function spark(points, most, label) {  // points: each from 0 to 1 in time, and its value
  const svg = byId("spark").content.firstElementChild.cloneNode(true);
  svg.setAttribute("aria-label", label);
  svg.firstElementChild.setAttribute("points", points.map(([x, value]) => `${(120 * x).toFixed(1)},${(17 - (16 * value) / most).toFixed(1)}`).join(" "));
  return svg;
}

function sparkOfRates(rates) {
  const most = Math.max(...rates, 1e-9), points = rates.map((rate, at) => [1 - (rates.length - 1 - at) / (MOST_SAMPLES - 1), rate]);
  return spark(points, most, `the last minute: at most ${rateText(most)} calls per second`);
}

const rateText = (rate) => rate.toLocaleString("en", { maximumFractionDigits: rate < 100 ? 1 : 0 });
const placeOf = (rank, host) => `rank ${rank}${host ? " on " + host : ""}`;

const latencyText = (seconds) => (seconds < 1 ? `${(seconds * 1000).toFixed(1)} ms` : `${seconds.toFixed(1)} s`);

function stragglerOf(counts) {
  const worst = counts.stragglers[0];
  if (!worst) return "–";
  const often = `${Math.round((100 * worst.calls) / counts.compared)}% of ${counts.compared}`;
  return `${placeOf(worst.rank, worst.host)}: ${often}, +${latencyText(worst.seconds / worst.calls)}`;
}

function showRates(status, at) {
  const previous = samples[samples.length - 1];
  if (previous?.at !== at) samples.push(sampleOf(status, at, previous));
  if (samples.length > MOST_SAMPLES + 1) samples.shift();
  const none = { ended: 0, failed: 0, seconds: 0, casts: 0 };
  const between = (key, session, before, after) => {  // null: it is not known
    const since = before.answered.has(session) ? before.answered.get(session) : before.at, until = after.answered.get(session);
    if (since === null || !(until > since)) return null;
    const then = before.found.get(key)?.counts ?? none, now = after.found.get(key)?.counts ?? none;
    const ended = now.ended - then.ended;
    return { ended, rate: (ended + now.casts - then.casts) / (until - since), seconds: now.seconds - then.seconds };
  };
  const newest = samples[samples.length - 1], recent = samples.find((each) => newest.at - each.at <= RATE_WINDOW);
  const rows = [...newest.found].map(([key, { name, session, counts }]) => {
    const last = recent === newest ? null : between(key, session, recent, newest);
    const rates = samples.slice(1).map((each, at) => between(key, session, samples[at], each)?.rate ?? 0);
    return { last, cells: [name, last ? rateText(last.rate) : "…", last?.ended ? latencyText(last.seconds / last.ended) : "–", String(counts.in_flight),
      String(counts.ended + counts.casts), String(counts.failed), stragglerOf(counts), rates.length > 1 ? sparkOfRates(rates) : "", session.slice(0, 8)] };
  });
  rows.sort((a, b) => (b.last?.rate ?? 0) - (a.last?.rate ?? 0));
  table(byId("rates"), ["Endpoint", "Calls/s", "Latency", "In flight", "Calls", "Failed", "Straggler", "Last minute", "Session"], rows.map((row) => row.cells),
    "nothing has been called yet", ["", "number", "number", "number", "number", "number", "line"]);
}

// --- timelines of calls

const sentAt = new Map();  // by call, the time of day: what follows from its age varies with each look
let drawn = null;  // the call whose timeline is shown, also when the gateway no longer reports it

function showTimelines(status) {
  const found = status.sessions.flatMap(({ session, timelines }) =>
    timelines.filter((call) => !OWN_MESHES.has(call.mesh)).map((call) => ({ ...call, session, key: `timeline ${session} ${call.call}` })));
  found.sort((a, b) => (a.seconds !== null) - (b.seconds !== null) || (a.seconds === null ? b.age - a.age : a.age - a.seconds - (b.age - b.seconds)));
  const keys = new Set(found.map((call) => call.key));
  for (const key of sentAt.keys()) if (!keys.has(key)) sentAt.delete(key);
  for (const { key, age } of found) if (!sentAt.has(key)) sentAt.set(key, new Date(Date.now() - 1000 * age).toLocaleTimeString("en-GB"));
  table(byId("timelines"), ["Call", "Ranks", "Sent at", "Took", "Replied", "Straggler", "Session"], found.map((call) => {
    const late = call.straggler === null ? null : call.replies[0];
    const show = el("button", { type: "button", "data-key": call.key, "aria-pressed": String(drawn?.key === call.key), "aria-label": `Show the ranks of ${call.mesh}.${call.endpoint}, sent at ${sentAt.get(call.key)}` }, "Show");
    show.addEventListener("click", () => { drawn = drawn?.key === call.key ? null : { ...call, at: sentAt.get(call.key) }; showTimelines(status); });
    return [`${call.mesh}.${call.endpoint}`, show, sentAt.get(call.key), outcomeOf(call), `${call.answered} of ${call.total}`,
      late ? `${placeOf(late.rank, late.host)}, +${latencyText(late.seconds - call.half)}` : "–", call.session.slice(0, 8)];
  }), "no recent call went to several ranks", ["", "", "number", "line", "number", "line"]);
  const again = found.find((call) => call.key === drawn?.key);
  if (again) drawn = { ...again, at: drawn.at };
  else if (drawn && drawn.seconds === null) drawn = { ...drawn, gone: true };
  drawTimeline();
}

function outcomeOf({ seconds, failed, cancelled, gone }) {
  if (gone) return "no longer reported";
  if (seconds === null) return cancelled ? "cancelled, runs" : "runs";
  return `${latencyText(seconds)}${cancelled ? ", cancelled" : failed ? ", failed" : ""}`;
}

function drawTimeline() {
  const box = byId("timeline"), said = JSON.stringify(drawn);
  if (box.dataset.said === said) return;
  box.dataset.said = said;
  box.hidden = !drawn;
  if (!drawn) return;
  const { seconds, replies, straggler, total, answered, half } = drawn, most = seconds ?? drawn.age;
  const row = (rank, host, length, state, text) => {
    const bar = el("i", { class: state });
    bar.style.width = `${Math.min(100, (100 * length) / most)}%`;  // the page's policy allows no style attributes
    return el("li", {}, el("span", {}, placeOf(rank, host)), el("span", { class: "bar", "aria-hidden": "true" }, bar), el("span", { class: state }, text));
  };
  const missing = Object.entries(drawn.missing).map(([rank, host]) => row(rank, host, most, "none", seconds === null ? "no reply yet" : drawn.failed ? "no reply before it failed" : "no reply"));
  const more = [[total - answered - missing.length, "without a reply"], [answered - replies.length, "that replied earlier"]];
  byId("timeline-ranks").style.setProperty("--half", half === null ? "100%" : `${(100 * half) / most}%`);
  byId("timeline-ranks").replaceChildren(...missing, ...replies.map(({ rank, host, seconds, raised }) => {
    const state = raised ? "raised" : rank === straggler ? "late" : "";
    return row(rank, host, seconds, state, latencyText(seconds) + { raised: " ✕ raised", late: " ◆ straggler", "": "" }[state]);
  }));
  const facts = [`${answered} of ${total} ranks replied`, drawn.first === null ? "" : `the first after ${latencyText(drawn.first)}`, half === null ? "" : `half of all after ${latencyText(half)} (the line)`];
  byId("timeline-title").textContent = `${drawn.mesh}.${drawn.endpoint}, sent at ${drawn.at}: ${outcomeOf(drawn)}`;
  byId("timeline-facts").textContent = `${facts.filter(Boolean).join(", ")}. The last reply comes first.`;
  byId("timeline-more").textContent = more.filter(([count]) => count > 0).map(([count, which]) => `and ${count} more ${which}`).join(", ");
}

// --- tables

function showStatus(status) {
  showRanks(status);
  showTimelines(status);
  const calls = status.sessions.flatMap((session) => session.calls.map((call) => ({ session, call })));
  calls.sort((a, b) => b.call.age - a.call.age);
  table(byId("calls"), ["Call", "Age", "Answered", "Waits for", "Session"], calls.map(({ session, call }) => {
    const names = Object.entries(call.waiting).map(([rank, host]) => placeOf(rank, host));
    const more = call.total - call.answered - 4;
    return [`${call.mesh}.${call.endpoint}${call.cancelled ? " (cancelled)" : ""}`, age(call.age), `${call.answered} of ${call.total}`, names.slice(0, 4).join(", ") + (more > 0 ? ` and ${more} more` : ""), session.session.slice(0, 8)];
  }), "no call is in flight", ["", "number", "number"]);
  const hosts = status.sessions.some((session) => session.hosts.length)
    ? status.sessions.flatMap((session) => session.hosts.map((host) => ({ host, session })))
    : status.hosts.map((host) => ({ host, session: null }));
  const attention = ({ host, session }) => host.state === "missing" ? 0 : host.seconds_left != null || (session?.version && host.version !== session.version) ? 1 : 2;
  hosts.sort((a, b) => attention(a) - attention(b));  // the sort is stable
  table(byId("hosts"), ["Host", "Mesh", "Rank", "State", "Code", "Code comes from", "Session"], hosts.map(({ host, session }) => {
    const newest = session?.version ?? "";
    const code = !newest ? "none synced" : host.version === newest ? short(host.version) : `not yet ${short(newest)}`;
    const state = host.seconds_left == null ? host.state : `ends in ${Math.round(host.seconds_left)} s`;
    return [host.name, host.mesh, String(host.rank), host.reason ? `${state}: ${host.reason}` : state, code, host.parent || "–", session ? session.session.slice(0, 8) : "–"];
  }), "the gateway has reported no hosts yet");
  sessions = status.sessions;
  hostCount = Object.values(status.meshes).reduce((sum, hosts) => sum + hosts, 0);
  liveRuns = (status.runs || []).filter((run) => LIVE.has(run.state)).length;
  showSessions();
  showRuns(status.runs || []);
  byId("about").textContent = `meshgate ${status.gateway_version}, Python ${status.python}`;
}

// --- sessions

const ending = new Set();  // those, and "job", for which meshgate ui has not answered yet
let sessions = [], hostCount = 0, liveRuns = 0;

function nameOf({ session, name }) {
  const id = session.slice(0, 8);
  return name && name !== id ? `${name} (${id})` : id;
}

function showSessions() {
  table(byId("sessions"), ["Session", "Identity", "State", "Engine", "Code", "Meshes", "Calls", "Problem", "End"], sessions.map((session) => {
    const name = nameOf(session), waits = ending.has(session.session);
    const end = el("button", { type: "button", "data-key": `end ${session.session}`, "aria-disabled": String(waits), "aria-label": `End session ${name}` }, "End");
    end.addEventListener("click", () => endSession(session));
    return [
      name, session.owner, session.connected ? "connected" : "disconnected", `pid ${session.pid}`,
      session.version ? short(session.version) : "none synced", String(session.meshes.length), String(session.calls_in_flight), session.problem || "–", end,
    ];
  }), "the job has no sessions");
  byId("end-job").setAttribute("aria-disabled", String(ending.has("job")));
}

function endSession(session) {
  const holds = session.connected ? " A program is connected to it: its calls fail." : "", name = `session ${nameOf(session)}`;
  askToEnd(session.session, name, `End ${name} of ${session.owner} and its processes?${holds}`);
}

byId("end-job").addEventListener("click", () => {
  const many = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;
  const owners = [...new Set(sessions.map((session) => session.owner))].join(", "), connected = sessions.filter((session) => session.connected).length;
  const all = [many(hostCount, "host"), many(sessions.length, "session") + (owners && ` of ${owners}`), many(liveRuns, "submitted program")].join(", ");
  const holds = connected ? ` Programs are connected to ${many(connected, "session")}: their calls fail.` : "";
  askToEnd("job", "the job", `End ${byId("title").textContent} and all that it has (${all})?${holds}`);
});

function askToEnd(what, name, question) {
  if (ending.has(what) || !confirm(`${question} This cannot be undone.`)) return;
  if (socket?.readyState !== WebSocket.OPEN) return showEnded("meshgate ui does not answer");
  ending.add(what);
  showEnded(`ending ${name} …`);
  socket.send(JSON.stringify({ end: what }));
}

function showEnded(text) {
  byId("ended").hidden = false;
  byId("ended").textContent = text;
  showSessions();
}

// --- submitted programs

const LIVE = new Set(byId("runs-section").dataset.liveStates.split(" "));

function showRuns(runs) {
  byId("runs-section").hidden = !runs.length;
  table(byId("runs"), ["Run", "State", "Exit code", "Age", "Why", "Output"], runs.toReversed().map((run) => {
    const show = el("button", { type: "button", "data-key": run.name, "aria-label": `Show the output of ${run.name}` }, "Show");
    show.addEventListener("click", () => { addMeshes([`run ${run.name}`]); showOutput("mesh", `run ${run.name}`); });
    return [run.news ? `${run.name} *` : run.name, run.state, LIVE.has(run.state) || run.exit_code === null ? "–" : String(run.exit_code), age(run.age), run.reason || "–", show];
  }), "none", ["", "", "number", "number"]);
}

// --- output

const rows = new WeakMap();  // by line
let lines = [], linked = "", linkFollowed = false;  // linked: the key of the line that the address leads to

const keyOf = (line) => `${line.session.slice(0, 8) || line.mesh}.${line.number}`;
const sourceOf = (line) => `${line.session} ${line.mesh} ${line.count} ${line.ranks}`;

function addLines(fresh) {
  for (const line of fresh) {
    if (line.end === "\r" && !line.text) continue;
    const source = sourceOf(line);  // a progress bar is one line
    const at = lines.slice(-50).findLastIndex((each) => each.end === "\r" && sourceOf(each) === source);
    if (at >= 0) lines[Math.max(lines.length - 50, 0) + at] = line; else lines.push(line);
  }
  lines = lines.slice(-MOST_KEPT);
  addMeshes(fresh.map((line) => line.mesh));
}

function addMeshes(names) {
  const select = byId("mesh");
  const known = new Set([...select.options].map((option) => option.value));
  for (const name of names) if (!known.has(name)) { known.add(name); select.append(el("option", { value: name }, name)); }
}

function label(line) {
  const ranks = line.count > 1 ? `${line.count} ranks` : line.ranks.length ? `rank ${line.ranks[0]}` : "";
  return `[${[line.host, line.mesh, ranks].filter(Boolean).join(" ")}] `;
}

function printedBy(line, rank) {
  return line.ranks.includes(rank) || (line.more_ranks || []).some(([first, last]) => first <= rank && rank <= last);
}

function wantedLines() {
  const wanted = byId("search").value.toLowerCase(), rank = byId("rank").value, mesh = byId("mesh").value, errors = byId("errors").checked;
  return lines.filter((line) =>
    (!rank || printedBy(line, Number(rank))) && (!mesh || line.mesh === mesh) && (!errors || line.stream === "stderr") &&
    (!wanted || (label(line) + line.text).toLowerCase().includes(wanted)));
}

function showLines() {
  const found = wantedLines(), box = byId("lines"), at = linked ? found.findIndex((line) => keyOf(line) === linked) : -1;
  const follows = at < 0 && box.scrollHeight - box.scrollTop - box.clientHeight < 8;
  const start = Math.max(Math.min(at < 0 ? Infinity : at - MOST_SHOWN / 2, found.length - MOST_SHOWN), 0), base = addressOf();
  const shown = found.slice(start, start + MOST_SHOWN), wanted = shown.map((line) => rowOf(line, base)), staying = new Set(wanted);
  for (const row of [...box.children]) if (!staying.has(row)) row.remove();
  let next = box.firstChild;
  for (const row of wanted) if (row === next) next = next.nextSibling; else box.insertBefore(row, next);
  byId("shown").textContent = `${shown.length} of ${lines.length} lines${linked && at < 0 && lines.length ? ", without the one of the link: it is no longer kept" : ""}`;
  byId("newest").hidden = !linked;
  if (follows) box.scrollTop = box.scrollHeight;
  if (at >= 0 && !linkFollowed) { linkFollowed = true; wanted[at - start].scrollIntoView({ block: "center" }); }
}

function rowOf(line, base) {  // a row that stays keeps the focus, what is selected, and a click that has begun
  if (!rows.has(line)) {
    const link = el("a", { class: "dim", title: "Link to this line" }, label(line));
    rows.set(line, el("div", line.stream === "stderr" ? { class: "err" } : {}, link, line.text));
  }
  const row = rows.get(line), key = keyOf(line), href = `#${base}${base && "&"}line=${encodeURIComponent(key)}`;
  if (row.firstChild.getAttribute("href") !== href) row.firstChild.setAttribute("href", href);
  if (key === linked) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
  return row;
}

// --- the address: behind # are the filters of the output, and the line that a link leads to

const FILTERS = ["search", "rank", "mesh", "errors"];

function addressOf() {
  const set = FILTERS.map((id) => [id, id === "errors" ? (byId(id).checked ? "1" : "") : byId(id).value]).filter(([, value]) => value);
  return new URLSearchParams(set).toString();
}

function filtersChanged() {
  const address = addressOf();
  linked = "";
  history.replaceState(null, "", address ? `#${address}` : "/");
  showLines();
}

function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  if (found.get("mesh")) addMeshes([found.get("mesh")]);
  for (const id of FILTERS) if (id === "errors") byId(id).checked = found.has(id); else byId(id).value = found.get(id) ?? "";
  linked = found.get("line") ?? "";
  linkFollowed = false;
  showLines();
}

function showOutput(filter, value) {  // by this filter alone: another would hide what was asked for
  byId("errors").checked = false;
  for (const id of ["search", "rank", "mesh"]) byId(id).value = id === filter ? value : "";
  filtersChanged();
  byId("lines").focus();
}

byId("newest").addEventListener("click", () => { filtersChanged(); byId("lines").scrollTop = byId("lines").scrollHeight; byId("lines").focus(); });
for (const id of FILTERS) byId(id).addEventListener("input", filtersChanged);
addEventListener("hashchange", readAddress);

byId("download").addEventListener("click", () => {
  const text = wantedLines().map((line) => label(line) + line.text + "\n").join("");
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  el("a", { href: url, download: "output.txt" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);  // a browser may still read it
});

// --- the websocket

let signedIn = false, socket = null;

// The secret of the first link is behind # and works once. What replaces it stays in this tab: a reload needs it. Links
// to lines have an =, which no secret has.
if (location.hash && !location.hash.includes("=")) {
  sessionStorage.setItem("secret", location.hash.slice(1));
  history.replaceState(null, "", "/");
}
readAddress();

let latest = null, shownLines = null;  // latest: the message that is shown next; a slow browser leaves out those before it

function showLatest() {
  const message = latest;
  latest = null;
  document.title = byId("title").textContent = message.title;
  byId("problem").textContent = message.problem;
  byId("end-job").hidden = !message.may_end;
  events = message.events;
  if (message.status) {
    showStatus(message.status);
    ({ usage, measuring } = message);
    used = usedNow(message.status);
    remember(message.at, new Map(used.map((row) => [row.key, row.values])));
    showUse();
    showRates(message.status, message.at);
  }
  byId("events-section").hidden = !message.events.length;
  table(byId("events"), ["Object", "Reason", "Count", "Message"], message.events.map((each) => [each.object, each.reason, String(each.count), each.message]), "none");
  if (lines !== shownLines) { shownLines = lines; showLines(); }
}

function connect() {
  const secret = sessionStorage.getItem("secret");
  if (!secret) { byId("connection").textContent = "not signed in: open the link that meshgate ui prints"; return; }
  socket = new WebSocket(`ws://${location.host}/live`, ["meshgate-ui", secret]);
  let fresh = true;
  socket.onopen = () => { signedIn = true; byId("connection").textContent = "live"; };
  socket.onmessage = (event) => {
    const message = JSON.parse(event.data);
    if (message.secret) { sessionStorage.setItem("secret", message.secret); return; }
    if (message.stack !== undefined) { showStack(message.stack); return; }
    if (message.ended !== undefined) { ending.delete(message.what); showEnded(message.ended); return; }
    if (fresh) { lines = []; fresh = false; }  // the server sends what it has kept to each new connection
    if (message.lines.length) addLines(message.lines);
    if (!latest) setTimeout(showLatest);
    latest = message;
  };
  socket.onclose = () => {
    if (byId("show-stack").disabled) showStack("meshgate ui does not answer");
    if (ending.size) { ending.clear(); showEnded("meshgate ui does not answer"); }
    byId("connection").textContent = signedIn
      ? "disconnected: meshgate ui has ended, or does not answer; trying again"
      : "not accepted: the link works once, in one tab; run meshgate ui again";
    if (!signedIn) return;
    setTimeout(connect, 2000);
  };
}
connect();
