"use strict";
/* A setting's footprint: its step derived on the line between two traced ones, and replayed. The data is that of
   memfit/show/settings_page.py. */

/** Part of the largest phase: reserved bytes up to it count as left in the cache by an earlier phase. */
const INHERITED = 0.1;

/** The kind of step that a setting asks for, or undefined. */
function kindOf(data, setting) {
  const card = data.cards.find((item) => item.key === setting.card);
  if (card === undefined || card.group === null) return undefined;
  return data.groups[card.group].find((kind) => kind.checkpoint === setting.checkpoint
    && kind.accumulated === setting.accumulate > 1 && kind.world === setting.world && kind.length === setting.length);
}

/** Bytes of every storage at so many items, or null where one is no whole number. */
function bytesAt(range, items) {
  const values = range.low_bytes.map((low, i) => {
    if (range.low === range.high) return low;
    const product = (range.high_bytes[i] - low) * (items - range.low), width = range.high - range.low;
    return product % width === 0 ? low + product / width : NaN;
  });
  return values.some(Number.isNaN) ? null : range.which.map((row) => values[row]);
}

/** {why} where a setting is not derivable, or its footprint as memfit predict --json has it. */
function footprintOf(data, setting) {
  const card = data.cards.find((item) => item.key === setting.card);
  if (card !== undefined && card.group === null) return { why: card.why };
  const kind = kindOf(data, setting);
  if (kind === undefined) return { why: "This kind of step was not traced for this card." };
  const range = kind.ranges.find((item) => setting.items >= item.low && setting.items <= item.high);
  if (range === undefined) return { why: whyNot(kind, setting.items) };
  const nbytes = bytesAt(range, setting.items);
  if (nbytes === null) return { why: `The bytes of a tensor at ${setting.items} items are not on the line between ${range.low} and ${range.high}.` };
  return footprint(data, card, kind.world, data.steps[range.step], nbytes);
}

function whyNot(kind, items) {
  const low = Math.max(0, ...kind.ranges.filter((item) => item.high < items).map((item) => item.high));
  const high = Math.min(Infinity, ...kind.ranges.filter((item) => item.low > items).map((item) => item.low));
  if (kind.refused && (high === Infinity || low === 0)) return `The job refuses this size: ${kind.refused}`;
  if (high === Infinity) return `No step of more than ${low} items was traced.`;
  const [below, above] = [low, high].map((end) => kind.ranges.find((item) => item.low <= end && end <= item.high));
  if (below !== undefined && below.step === above.step) return `The step makes the same tensors at ${low} and at ${high} items, but the bytes of those between lie on no line that was found, so that nothing in between follows from them.`;
  return `The step runs other operators at ${low} and at ${high} items, so that nothing in between follows from them.`;
}

function footprint(data, card, world, step, nbytes) {
  const outside = card.context.map((bytes, i) => bytes + (world > 1 ? card.nccl[i] : 0));
  const [low, usual, high] = outside, capacity = card.usable - usual;
  let { peaks } = peaksOf(step, nbytes, Infinity), failed = null;
  if (Math.max(...[...peaks.values()].map((peak) => peak.reserved)) > capacity) {
    const limited = peaksOf(step, nbytes, capacity);
    if (limited.failed) failed = limited.failed;
    else peaks = limited.peaks;
  }
  const phases = {};
  for (const [name, peak] of peaks) {
    phases[name] = {
      allocated_bytes: peak.allocated, reserved_bytes: peak.reserved, process_bytes: peak.reserved + usual,
      process_bytes_low: Math.trunc((peak.reserved + low) * (1 + step.margin.low)),
      process_bytes_high: Math.ceil((peak.reserved + high) * (1 + step.margin.high)),
      at: placeOf(step, peak.event), categories: liveByCategory(data, step, nbytes, peak.event),
      largest_request: { bytes: peak.largest, ...placeOf(step, peak.largestEvent), phase: name },
    };
  }
  addLargerWorkspaces(phases, step, nbytes, card.usable + card.free, high);
  if (failed !== null && !(failed.phase in phases)) failed.phase = "train";
  const worst = Object.values(phases).reduce((a, b) => (b.process_bytes > a.process_bytes ? b : a));
  return {
    phases, fits: failed === null, verdict: verdictOf(failed, worst, card),
    limiting_phase: failed === null ? limitingPhase(phases) : failed.phase,
    headroom_bytes: card.usable - worst.process_bytes,
    failed_request: failed === null ? null : { bytes: failed.bytes, ...placeOf(step, failed.event), phase: failed.phase },
    measured_runs: step.margin.runs, net_kind: step.net_kind,
  };
}

/** Intervals hold the replay with twice the workspaces of convolutions, up to the card's memory; see
    memfit/replay/cudnn_workspaces.py. */
function addLargerWorkspaces(phases, step, nbytes, usable, outside) {
  if (!step.optional.length) return;
  const larger = [...nbytes];
  for (const storage of step.optional) larger[storage] *= 2;
  for (const [name, peak] of peaksOf(step, larger, Infinity).peaks) {
    if (!(name in phases)) continue;
    const above = Math.min(Math.ceil((peak.reserved + outside) * (1 + step.margin.without_workspaces)), usable);
    phases[name].process_bytes_high = Math.max(phases[name].process_bytes_high, above);
  }
}

function verdictOf(failed, worst, card) {
  if (failed === null && worst.process_bytes_high <= card.usable + card.free) return "yes";
  if (failed !== null && worst.process_bytes_low > card.usable) return "no";
  return "close";
}

function limitingPhase(phases) {
  const names = Object.keys(phases);
  const most = (key) => names.reduce((a, b) => (phases[b][key] > phases[a][key] ? b : a));
  const largest = most("process_bytes"), tensors = most("allocated_bytes");
  const more = phases[largest].process_bytes - phases[tensors].process_bytes;
  return more <= INHERITED * phases[largest].process_bytes ? tensors : largest;
}

function placeOf(step, event) {
  const [module, operator] = event < 0 ? ["", ""] : step.places[step.place[event]];
  return { module, operator };
}

function liveByCategory(data, step, nbytes, event) {
  const sums = Object.fromEntries(data.categories.map((name) => [name, 0])), alive = new Set();
  for (let i = 0; i <= event; i++) {
    const code = step.codes[i];
    if (code > 0) alive.add(code - 1);
    else if (code < 0) alive.delete(-code - 1);
  }
  for (const storage of alive) sums[data.categories[step.category[storage]]] += nbytes[storage];
  return sums;
}

/** The most items that fit: they do, and the next size does not or is not derived; null where not even the smallest fits. */
function largestThatFits(data, setting) {
  const kind = kindOf(data, setting);
  if (kind === undefined || !kind.ranges.length) return null;
  const fits = (items) => footprintOf(data, { ...setting, items }).fits === true;
  for (const range of [...kind.ranges].reverse()) {
    if (!fits(range.low)) continue;
    let low = range.low, high = range.high + 1;
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (fits(middle)) low = middle; else high = middle;
    }
    return low;
  }
  return null;
}
