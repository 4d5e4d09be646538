// The schedule: a lane for each way of running the batch, with what is held beneath it.

const PHASES = [
  ["score", "score, without a graph", "var(--score)"],
  ["prefix forward", "prefix: forward", "var(--prefix-forward)"],
  ["leaf forward", "leaf: forward", "var(--leaf-forward)"],
  ["leaf backward", "leaf: backward", "var(--leaf-backward)"],
  ["prefix recompute", "prefix: forward again", "var(--prefix-recompute)"],
  ["prefix backward", "prefix: backward", "var(--prefix-backward)"],
  ["idle", "idle: other ranks run", "var(--idle)"],
  ["rest", "planning and optimizer", "var(--rest)"],
  ["left out", "events left out", "url(#hatch)"],
];

function drawTimeline(parent, lanes, width) {
  const label = 58, right = width - 8, laneHeight = 26, memoryHeight = 54, gap = 52;
  const height = lanes.length * (laneHeight + memoryHeight + gap) + 26;
  const longest = lanes.reduce((most, lane) => Math.max(most, lane.total), 0) || 1;
  const X = (v) => label + (v / longest) * (right - label);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Timeline of phases with memory" }, parent);
  const colors = Object.fromEntries(PHASES.map(([key, , color]) => [key, color]));
  const unit = lanes[0].unit;
  const most = lanes.reduce((m, lane) => lane.events.reduce((n, e) => Math.max(n, e.held), m), 0) || 1;
  let short = 0;
  lanes.forEach((lane, index) => {
    const top = 18 + index * (laneHeight + memoryHeight + gap);
    svg("text", { class: "lane", x: 0, y: top + 17 }, root, lane.name);
    let at = 0;
    const area = [];
    const blocks = [];
    const block = (size, key, text) => {
      blocks.push({ from: X(at), to: X(at + size), key, text });
      at += size;
    };
    const memory = lane.memory;
    for (const event of lane.events) {
      area.push([X(at), X(at + event.size), event.held]);
      block(event.size, event.key,
        `${event.name}\n${amount(event.size, unit)}, ${event.key === "idle" ? "no microbatch of this rank" : plural(event.tokens, "token")}\nheld: ${amount(event.held, memory.unit)} (${memory.source})`);
    }
    if (lane.events_left_out) block(lane.size_left_out, "left out", `${whole(lane.events_left_out)} events not drawn\n${amount(lane.size_left_out, unit)}`);
    if (lane.rest > 0) block(lane.rest, "rest", `planning and optimizer\n${amount(lane.rest, unit)}`);
    short += drawBlocks(root, blocks, top, laneHeight, colors, right);
    const beside = X(at) + 80 < right;
    svg("text", { x: beside ? X(at) + 6 : right, y: beside ? top + 17 : top - 5, "text-anchor": beside ? "start" : "end" }, root, amount(lane.total, unit));
    const floor = top + laneHeight + 8 + memoryHeight;
    const Y = (v) => floor - (v / most) * (memoryHeight - 4);
    svg("line", { class: "grid", x1: label, x2: right, y1: floor, y2: floor }, root);
    if (area.length) {
      let path = `M${area[0][0]} ${floor}`;
      for (const [from, to, held] of area) path += `L${from} ${Y(held)}L${to} ${Y(held)}`;
      path += `L${area[area.length - 1][1]} ${floor}Z`;
      svg("path", { class: "memory", d: path, fill: index === lanes.length - 1 ? "var(--shared)" : "var(--dense)", opacity: 0.35 }, root);
      const peak = area.reduce((m, a) => Math.max(m, a[2]), 0);
      svg("text", { x: label - 6, y: floor - memoryHeight / 2 + 4, "text-anchor": "end" }, root, memory.source === "measured" ? "memory" : "held");
      svg("text", { x: right, y: floor + 14, "text-anchor": "end" }, root, `at most ${amount(peak, memory.unit)} (${memory.source})`);
    }
  });
  const base = height - 14, inSeconds = unit === "ms" && longest >= 1000;
  for (const value of ticks(0, longest, Math.max(2, Math.floor(width / 130)))) {
    const text = shortNumber(inSeconds ? value / 1000 : value);
    const anchor = value === 0 ? "start" : X(value) + text.length * 3.6 > width ? "end" : "middle";
    svg("text", { x: X(value), y: base + 12, "text-anchor": anchor }, root, text);
  }
  svg("text", { x: 0, y: base + 12 }, root, inSeconds ? "s" : unit);
  return short;
}

const LEAST = 3; // pixels that a block is drawn wide, however short it is

// Blocks to scale; those too short to be seen lie over them, wider than they are, the rarest on top.
function drawBlocks(root, blocks, top, height, colors, right) {
  const sums = {};
  for (const { from, to, key } of blocks) sums[key] = (sums[key] || 0) + to - from;
  const short = blocks.filter(({ from, to }) => to - from < LEAST).sort((a, b) => sums[b.key] - sums[a.key]);
  for (const block of [...blocks.filter(({ from, to }) => to - from >= LEAST), ...short]) {
    const { from, to, key, text } = block;
    const tooShort = to - from < LEAST;
    const x = tooShort ? Math.max(0, Math.min((from + to - LEAST) / 2, right - LEAST)) : from;
    const w = tooShort ? LEAST : to - from - 0.7;
    const rect = svg("rect", { class: tooShort ? "event short" : "event", "data-phase": key, x, y: top, width: w, height, rx: w > 5 ? 2 : 0, fill: colors[key] }, root);
    rect.addEventListener("pointermove", (event) => tip.show(event, text));
    rect.addEventListener("pointerleave", () => tip.hide());
  }
  return short.length;
}

function showTimeline(place, figure) {
  const controls = make("div", { class: "controls" }, place);
  const picture = make("div", {}, place);
  const legend = make("div", { class: "legend" }, place);
  const widened = make("p", { class: "caption widened" }, place);
  let lanes = figure.choices[0].data, width = 0;
  const draw = () => {
    picture.replaceChildren();
    const short = drawTimeline(picture, lanes, width);
    const all = lanes.reduce((n, lane) => n + lane.events.length + (lane.rest > 0) + (lane.events_left_out > 0), 0);
    widened.textContent = `${whole(short)} of ${whole(all)} blocks are too short to be seen at this width. They are drawn ${LEAST} pixels wide, over their neighbours; hovering says how long they are.`;
    widened.hidden = !short;
    const used = new Set(lanes.flatMap((lane) => lane.events.map((event) => event.key)));
    if (lanes.some((lane) => lane.rest > 0)) used.add("rest");
    if (lanes.some((lane) => lane.events_left_out)) used.add("left out");
    legend.replaceChildren();
    for (const [key, word, color] of PHASES) {
      if (!used.has(key)) continue;
      const item = make("span", {}, legend);
      svg("rect", { width: 18, height: 10, rx: 2, fill: color }, svg("svg", { viewBox: "0 0 18 10", "aria-hidden": "true" }, item));
      make("span", {}, item, word);
    }
  };
  chooser(controls, "Batch", figure.choices, (index) => { lanes = figure.choices[index].data; draw(); });
  whenSized(picture, (now) => { width = now; draw(); });
}
