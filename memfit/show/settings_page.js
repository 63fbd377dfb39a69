"use strict";
/* The controls of the page, and what it shows for their setting. */

const element = (id) => document.getElementById(id);
const MARKS = { yes: ["✓", "good", "Fits"], close: ["≈", "close", "May not fit"], no: ["✗", "bad", "Does not fit"] };
const PHASES = { train: "training", validate: "validation", save: "saving", setup: "building the nets" };
const HATCHES = { frozen: "up", buffers: "tall", ema: "dots", gradients: "flat", inputs: "tall", temporaries: "down", communication: "dots" };

/** A size for people, with three significant digits. */
function sizeText(bytes) {
  let value = Math.abs(bytes);
  const sign = bytes < 0 ? "-" : "";
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1024) return `${sign}${value.toFixed(unit === "B" || value >= 100 ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
  return `${sign}${value.toFixed(2)} GiB`;
}

const phaseText = (name) => PHASES[name] || name;
const unitsOf = (setting) => setting.items * (setting.length || 1);
const shapeText = (setting) => (setting.length === null ? `${setting.items}` : `${setting.items}x${setting.length}`);

function make(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function sentence(data, setting, answer) {
  const card = data.cards.find((item) => item.key === setting.card);
  if (answer.why) return `Not derived on ${setting.card} at ${shapeText(setting)}`;
  const phase = answer.phases[answer.limiting_phase], high = phase.process_bytes_high;
  const peak = `peak: ${phaseText(answer.limiting_phase)}, ${sizeText(phase.process_bytes)} of ${sizeText(card.usable)}`;
  const spare = answer.headroom_bytes, word = MARKS[answer.verdict][2];
  if (spare < 0) return `${word} on ${setting.card}: ${sizeText(-spare)} too much (${peak})`;
  if (!answer.fits) return `${word} on ${setting.card}: no free block holds a request of ${sizeText(answer.failed_request.bytes)} (${peak})`;
  if (answer.verdict === "close") return `${word} on ${setting.card}: ${sizeText(spare)} to spare, but the interval reaches ${sizeText(high)} (${peak})`;
  return `${word} on ${setting.card} with ${sizeText(spare)} to spare (${peak})`;
}

/** A command about the page's job, or about its script, which stands behind the options. */
function commandText(data, verb, options) {
  return data.script ? `memfit ${verb} ${options} -- ${data.arguments}` : `memfit ${verb} ${data.arguments} ${options}`;
}

function commandsOf(data, setting) {
  const ranks = setting.world > 1;
  const accumulate = setting.accumulate > 1 ? ` --accumulate ${setting.accumulate}` : "";
  const batch = unitsOf(setting) * setting.accumulate * setting.world;
  const device = `--device ${setting.card}${data.cards.find((card) => card.key === setting.card)?.options || ""}`;
  if (data.script) {
    const size = data.arguments.includes("{batch}") ? ` --micro-batch ${setting.items}` : "";
    return { predict: commandText(data, "predict", `${device}${size}`), plan: "" };
  }
  return {
    predict: commandText(data, "predict", `${device} --shape ${shapeText(setting)}${accumulate} --checkpoint ${setting.checkpoint}${ranks ? ` --engine ddp --world ${setting.world}` : ""}`),
    plan: commandText(data, "plan", `${device} --global-batch ${batch}${ranks ? ` --devices ${setting.world}` : ""} --out plan.toml`),
  };
}

function showVerdict(data, setting, answer) {
  const [mark, tone] = answer.why ? ["?", "underived"] : MARKS[answer.verdict];
  const text = sentence(data, setting, answer), verdict = element("verdict");
  verdict.className = tone;
  verdict.replaceChildren(make("span", { class: "mark", "aria-hidden": "true" }, mark), ` ${text}`);
  const unmeasured = answer.measured_runs === 0 ? `No measured runs of this model type (${answer.net_kind || "unknown"}): the interval is the widest there is.` : "";
  element("reason").textContent = answer.why ? `${answer.why} The first command below traces it.` : unmeasured;
  const commands = commandsOf(data, setting);
  element("command-predict").textContent = commands.predict;
  element("command-plan").textContent = commands.plan;
  element("command-plan").hidden = !commands.plan;
}

/** [name, bytes, class] of a phase's process, from the bottom of its peak up. */
function partsOf(data, phase) {
  const parts = data.layers.map((name) => [name, phase.categories[name]]).filter(([, bytes]) => bytes > 0);
  const tensors = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  parts.push(["free in the cache", phase.reserved_bytes - tensors]);
  parts.push(["CUDA context", phase.process_bytes - phase.reserved_bytes]);
  return parts.filter(([, bytes]) => bytes > 0);
}

function swatch(name) {
  if (name === "free in the cache") return { class: "cache" };
  if (name === "CUDA context") return { class: "outside" };
  return { class: HATCHES[name] ? `hatch-${HATCHES[name]}` : "", style: `--c:var(--${name})` };
}

function showBars(data, setting, answer) {
  const usable = data.cards.find((item) => item.key === setting.card).usable;
  const bars = element("bars"), legend = element("legend");
  bars.replaceChildren(); legend.replaceChildren();
  element("legend-caption").textContent = element("peak").textContent = "";
  if (answer.why) return;
  const scale = 1.02 * Math.max(usable, ...Object.values(answer.phases).map((phase) => phase.process_bytes));
  for (const [name, phase] of Object.entries(answer.phases)) {
    const bar = make("div", { class: "bar", role: "img", "aria-label": `${phaseText(name)}: ${partsOf(data, phase).map(([part, bytes]) => `${part} ${sizeText(bytes)}`).join(", ")}` });
    for (const [part, bytes] of partsOf(data, phase)) {
      const piece = make("i", { ...swatch(part), title: `${part}: ${sizeText(bytes)}` });
      piece.style.width = `${100 * bytes / scale}%`;
      bar.append(piece);
    }
    const limit = make("b", { title: `usable: ${sizeText(usable)}` });
    limit.style.left = `${100 * usable / scale}%`;
    bar.append(limit);
    const interval = `${sizeText(phase.process_bytes)} (interval ${sizeText(phase.process_bytes_low)} to ${sizeText(phase.process_bytes_high)})`;
    bars.append(make("div", { class: "phase" }, make("p", {}, make("span", {}, phaseText(name)), make("span", {}, interval)), bar));
  }
  const phase = answer.phases[answer.limiting_phase];
  element("legend-caption").textContent = `At the peak of ${phaseText(answer.limiting_phase)}; the dashed line is the card's usable ${sizeText(usable)}`;
  for (const [part, bytes] of partsOf(data, phase)) {
    const look = swatch(part);
    legend.append(make("tr", {}, make("th", { scope: "row", class: "short" }, make("span", { ...look, class: `swatch ${look.class}` }), part), make("td", { class: "n" }, sizeText(bytes))));
  }
  const { module, operator } = phase.at;
  element("peak").textContent = `The peak is in ${module || "the step"} (${operator || "unknown"}).`;
}

function showCards(data, setting) {
  const rows = data.cards.filter((card) => card.group !== null).map((card) => {
    const answer = footprintOf(data, { ...setting, card: card.key });
    if (answer.why) return make("tr", {}, make("th", { scope: "row" }, card.key), make("td", { colspan: "4" }, `not derived: ${commandText(data, "ui", `--device ${card.key}`)}`));
    const [mark, tone, word] = MARKS[answer.verdict];
    const cells = [answer.phases[answer.limiting_phase]?.process_bytes, card.usable, answer.headroom_bytes];
    return make("tr", {}, make("th", { scope: "row", class: "short" }, card.key), make("td", { class: tone }, `${mark} ${word}`), ...cells.map((bytes) => make("td", { class: "n" }, sizeText(bytes))));
  });
  element("card-rows").replaceChildren(...rows);
}

/** Fills the controls of a setting, and says in a line what cannot be chosen. */
function showControls(data, setting) {
  const kind = kindOf(data, setting), most = Math.max(1, ...(kind ? kind.ranges.map((range) => range.high) : []));
  element("items").max = element("items-number").max = most;
  element("items").value = element("items-number").value = setting.items;
  const units = setting.length === null ? data.unit : `items = ${unitsOf(setting).toLocaleString("en")} ${data.unit}`;
  element("items-text").textContent = units;
  const gaps = (kind ? kind.ranges : []).slice(1).map((range, i) => [kind.ranges[i].high + 1, range.low - 1]).filter(([low, high]) => low <= high);
  element("items-note").textContent = gaps.length ? `Not derivable: ${gaps.map(([low, high]) => (low === high ? low : `${low} to ${high}`)).join(", ")}, where the step's operators change or its bytes lie on no line.` : "";
  element("items").parentElement.classList.toggle("gap", footprintOfItems(kind, setting.items) === undefined);
  const at = data.lengths.indexOf(setting.length);
  element("length").max = data.lengths.length - 1;
  element("length").value = at;
  element("length").disabled = data.lengths.length < 2;
  element("length-text").textContent = setting.length === null ? "none" : `${setting.length}`;
  element("length-note").textContent = setting.length === null ? (data.script ? "A script's length is its own." : "The job's samples have no length.") : `Traced at ${data.lengths.join(", ")}; a length in between has other steps.`;
  element("accumulate").value = setting.accumulate;
  const batch = unitsOf(setting) * setting.accumulate * setting.world;
  element("accumulate-text").textContent = `${setting.accumulate}: global batch ${batch.toLocaleString("en")}`;
  element("checkpoint").value = setting.checkpoint;
  element("world").value = setting.world;
  element("card").value = setting.card;
}

function footprintOfItems(kind, items) {
  return kind && kind.ranges.find((range) => items >= range.low && items <= range.high);
}

/** The options that never change, and why some of them cannot be chosen. */
function fillOptions(data) {
  for (const card of data.cards) {
    const option = make("option", { value: card.key }, `${card.key}, ${sizeText(card.usable)}`);
    option.disabled = card.group === null;
    element("card").append(option);
  }
  const other = data.cards.find((card) => card.group === null);
  if (other !== undefined) element("card-note").textContent = `Greyed cards run other kernels and were not traced; trace them with ${commandText(data, "ui", "--device NAME")}`;
  element("checkpoint").disabled = data.checkpoints.length < 2;
  for (const world of data.worlds) element("world").append(make("option", { value: world }, world === 1 ? "1" : `${world}, by DDP`));
  element("world").disabled = data.worlds.length < 2;
  if (data.script) {
    element("accumulate").disabled = true;
    for (const id of ["checkpoint-note", "world-note"]) element(id).textContent = "A script is traced as it is written.";
    return;
  }
  if (data.checkpoints.length < 2) element("checkpoint-note").textContent = "The job has no blocks that can be recomputed.";
  else element("checkpoint-note").textContent = "memfit plan chooses block by block.";
  if (data.worlds.length < 2) element("world-note").textContent = `Traced on one device; trace several with memfit ui ${data.arguments} --devices 8`;
}

async function unpacked() {
  const bytes = Uint8Array.from(atob(element("data").textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function start() {
  const data = await unpacked(), setting = { ...data.start };
  let waiting = 0;
  function show() {
    const answer = footprintOf(data, setting);
    showControls(data, setting);
    showVerdict(data, setting, answer);
    showBars(data, setting, answer);
    clearTimeout(waiting);
    waiting = setTimeout(() => showCards(data, setting), 150);
  }
  function on(id, change) {
    element(id).addEventListener(element(id).tagName === "SELECT" ? "change" : "input", () => { change(element(id).value); show(); });
  }
  on("items", (value) => { setting.items = Number(value); });
  on("items-number", (value) => { if (Number.isInteger(Number(value)) && Number(value) >= 1) setting.items = Number(value); });
  on("length", (value) => { setting.length = data.lengths[Number(value)]; });
  on("accumulate", (value) => { setting.accumulate = Number(value); });
  on("checkpoint", (value) => { setting.checkpoint = value; });
  on("world", (value) => { setting.world = Number(value); });
  on("card", (value) => { setting.card = value; });
  element("largest").addEventListener("click", () => {
    const items = largestThatFits(data, setting);
    if (items !== null) setting.items = items;
    show();
    if (items === null) element("reason").textContent = "Not even one item fits at this setting.";
  });
  fillOptions(data);
  show();
  globalThis.memfit = { data, footprint: (asked) => footprintOf(data, asked), largest: (asked) => largestThatFits(data, asked), commands: (asked) => commandsOf(data, asked) };
  document.documentElement.dataset.ready = "yes";
}

start();
