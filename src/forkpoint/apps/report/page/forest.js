// The forest of a batch: a band for each segment, as long as its tokens and as wide as its rollouts.

const FORK = 16; // pixels over which a band bends to where it lies below its parent

// Where a position lies. Not to scale, each stretch in which no rollout parts or ends is as long as
// the square root of its tokens; equal positions still lie above each other.
function positionMap(forest, toScale) {
  const places = new Set();
  for (const node of forest.nodes) places.add(node.start).add(node.start + node.length);
  const found = new Map();
  let x = 0, before = null;
  for (const place of [...places].sort((a, b) => a - b)) {
    if (before !== null) x += toScale ? place - before : Math.sqrt(place - before);
    found.set(place, x);
    before = place;
  }
  return found;
}

function placeForest(forest, gutter, width, height, toScale) {
  const at = positionMap(forest, toScale);
  const nodes = forest.nodes.map((node, index) => ({ ...node, index, children: [] }));
  let reach = 0;
  const roots = [];
  for (const node of nodes) {
    const parent = node.parent < 0 ? null : nodes[node.parent];
    (parent ? parent.children : roots).push(node);
    node.x0 = at.get(node.start);
    node.x1 = at.get(node.start + node.length);
    node.many = node.end - node.begin;
    reach = Math.max(reach, node.x1);
  }
  // Lanes: one a rollout, with air between neighbours that part early.
  const air = new Float64Array(forest.rollouts + 1);
  const visit = (list, depth) => {
    list.sort((a, b) => a.begin - b.begin);
    list.forEach((node, n) => {
      if (n > 0) air[node.begin] = Math.max(air[node.begin], 1 / (1 + depth));
    });
  };
  visit(roots, 0);
  const depthOf = new Array(nodes.length).fill(0);
  for (const node of nodes) {
    depthOf[node.index] = node.parent < 0 ? 0 : depthOf[node.parent] + 1;
    visit(node.children, depthOf[node.index] + 1);
  }
  const airTotal = air.reduce((a, b) => a + b, 0);
  const free = height - 24;
  const airUnit = airTotal ? Math.min(16, (free * 0.35) / airTotal) : 0;
  const lane = Math.min(26, (free - airUnit * airTotal) / Math.max(1, forest.rollouts));
  const top = new Float64Array(forest.rollouts + 1);
  let y = 12;
  for (let n = 0; n < forest.rollouts; n += 1) {
    y += air[n] * airUnit;
    top[n] = y;
    y += lane;
  }
  top[forest.rollouts] = y;
  const bottom = (n) => top[n - 1] + lane;
  for (const node of nodes) {
    // As wide as its rollouts, in the middle of what lies below it.
    const middle = (top[node.begin] + bottom(node.end)) / 2;
    node.y0 = middle - (node.many * lane) / 2;
    node.y1 = middle + (node.many * lane) / 2;
  }
  const scale = (width - gutter - 24) / (reach || 1);
  for (const node of nodes) {
    node.x0 = gutter + 12 + node.x0 * scale;
    node.x1 = gutter + 12 + node.x1 * scale;
  }
  const groups = forest.runs.map(([begin, end, group]) => ({ y0: top[begin], y1: bottom(end), here: end - begin, ...forest.groups[group] }));
  return { nodes, lane, groups, used: y + 12 };
}

// Where a node leaves its parent: rollouts of the parent in order, each one lane wide.
function forkTop(node, parent, lane) {
  return parent.y0 + (node.begin - parent.begin) * lane;
}

function bandPath(node, parent, lane, view) {
  const X = (x) => (x * view.k + view.x).toFixed(2);
  const Y = (y) => (y * view.k + view.y).toFixed(2);
  if (!parent) return `M${X(node.x0)} ${Y(node.y0)}H${X(node.x1)}V${Y(node.y1)}H${X(node.x0)}Z`;
  const bend = Math.min(FORK / view.k, (node.x1 - node.x0) * 0.6);
  const x0 = node.x0, x1 = node.x0 + bend, half = (x0 + x1) / 2;
  const from = forkTop(node, parent, lane), to = from + node.many * lane;
  return `M${X(x0)} ${Y(from)}C${X(half)} ${Y(from)} ${X(half)} ${Y(node.y0)} ${X(x1)} ${Y(node.y0)}`
    + `H${X(node.x1)}V${Y(node.y1)}H${X(x1)}`
    + `C${X(half)} ${Y(node.y1)} ${X(half)} ${Y(to)} ${X(x0)} ${Y(to)}Z`;
}

function plural(count, word) {
  return `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
}

// How long the prompts of a group are; without masks, what all of its rollouts share.
function promptText(group) {
  if (!group.prompt) return group.shared ? `share ${whole(group.shared)}` : "";
  const [least, most] = group.prompt;
  return `prompt ${whole(least)}${least === most ? "" : `–${whole(most)}`}`;
}

function groupText(forest, node) {
  const inside = forest.runs.filter(([begin, end]) => begin < node.end && end > node.begin);
  const numbers = new Set(inside.map(([, , group]) => group));
  if (numbers.size !== 1) return numbers.size ? `${whole(numbers.size)} groups` : "";
  const group = forest.groups[inside[0][2]];
  const prompt = promptText(group);
  return `group ${group.name}: ${plural(group.rollouts, "rollout")}${prompt ? `, ${prompt} tokens` : ""}`;
}

function nodeText(forest, node) {
  if (node.segments) {
    return `${whole(node.segments)} segments not drawn\n${whole(node.tokens)} tokens, ${whole(node.many)} rollouts`;
  }
  const lines = [
    `${plural(node.length, "token")} × ${plural(node.many, "rollout")}`,
    ...[groupText(forest, node)].filter(Boolean),
    `positions ${whole(node.start)} to ${whole(node.start + node.length - 1)}, microbatch ${node.microbatches}`,
  ];
  if (forest.names) {
    const shown = forest.names.slice(node.begin, Math.min(node.end, node.begin + 4));
    lines.push(shown.join("\n") + (node.many > 4 ? `\nand ${whole(node.many - 4)} more` : ""));
  }
  return lines.join("\n");
}

function showForest(place, figure) {
  const controls = make("div", { class: "controls" }, place);
  const counts = make("p", { class: "caption" }, place);
  const picture = make("div", { class: "canvas" }, place);
  const legend = make("div", { class: "legend" }, place);
  for (const [kind, word] of [["common", "shared by several rollouts"], ["", "one rollout's own"]]) {
    const item = make("span", {}, legend);
    const key = svg("svg", { viewBox: "0 0 18 10", "aria-hidden": "true" }, item);
    svg("rect", { width: 18, height: 10, rx: 2, class: `band ${kind}` }, key);
    make("span", {}, item, word);
  }
  const hidden = make("p", { class: "caption" }, place);
  let forest = figure.choices[0].data, width = 0, gutter = 0, toScale = false, chosen = -1;
  let view = { k: 1, x: 0, y: 0 }, placed = null, root = null, layer = null;
  const paths = [];

  chooser(controls, "Batch", figure.choices, (index) => {
    forest = figure.choices[index].data;
    chosen = -1;
    listRollouts();
    begin();
  });
  const rolloutLabel = make("label", {}, controls, "Rollout");
  const rolloutList = make("select", {}, rolloutLabel);
  rolloutList.addEventListener("change", () => { chosen = Number(rolloutList.value); light(null); });
  const scaleLabel = make("label", {}, controls, "Length");
  const scaleList = make("select", {}, scaleLabel);
  make("option", { value: "stretched" }, scaleList, "stretched where rollouts part");
  make("option", { value: "scale" }, scaleList, "to scale");
  scaleList.addEventListener("change", () => { toScale = scaleList.value === "scale"; begin(); });
  const zoomBox = make("span", { class: "zoom" }, controls);
  for (const [text, label, action] of [["+", "Zoom in", () => zoom(1.6)], ["−", "Zoom out", () => zoom(1 / 1.6)], ["Fit", "Show all", () => { view = { k: 1, x: 0, y: 0 }; redraw(); }]]) {
    make("button", { type: "button", "aria-label": label }, zoomBox, text).addEventListener("click", action);
  }

  function listRollouts() {
    rolloutList.replaceChildren();
    make("option", { value: -1 }, rolloutList, "none highlighted");
    rolloutLabel.hidden = !forest.names || forest.rollouts > 500;
    if (!rolloutLabel.hidden) forest.names.forEach((name, n) => make("option", { value: n }, rolloutList, name));
    const t = forest.tokens;
    counts.textContent = `${whole(forest.rollouts)} rollouts, ${whole(forest.segments)} segments`
      + (forest.drawn < forest.segments ? ` (${whole(forest.drawn)} drawn)` : "")
      + `. Tokens: ${whole(t.given)} given, ${whole(t.unique)} unique, ${whole(t.run)} run (${forest.sharing}, ${forest.boundary}).`;
  }

  // Highlight the path of the rollouts of a node, or of the rollout chosen from the list.
  function light(node) {
    const range = node ? [node.begin, node.end] : chosen >= 0 ? [chosen, chosen + 1] : null;
    root.classList.toggle("lit", range !== null);
    placed.nodes.forEach((other, n) => {
      const above = range && other.begin <= range[0] && other.end >= range[1];
      const below = range && other.begin >= range[0] && other.end <= range[1];
      paths[n].classList.toggle("hot", Boolean(above || below));
    });
  }

  function begin() {
    view = { k: 1, x: 0, y: 0 };
    const wanted = Math.min(520, Math.max(150, 24 + forest.rollouts * 22));
    gutter = !forest.runs.length ? 0 : width < 640 ? Math.round(width * 0.27) : 190;
    placed = placeForest(forest, gutter, width, wanted, toScale);
    const height = Math.round(Math.min(wanted, Math.max(90, placed.used)));
    picture.replaceChildren();
    paths.length = 0;
    root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Forest of shared segments" }, picture);
    const hatch = svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("defs", {}, root));
    svg("rect", { width: 6, height: 6, fill: "var(--raised)" }, hatch);
    svg("line", { x1: 0, x2: 0, y1: 0, y2: 6, stroke: "var(--quiet)", "stroke-width": 2 }, hatch);
    layer = svg("g", {}, root);
    for (const node of placed.nodes) {
      const kind = node.segments ? "end" : node.many > 1 ? "common" : "own";
      const path = svg("path", { class: `band ${kind}`, "data-begin": node.begin, "data-end": node.end }, layer);
      path.addEventListener("pointerenter", () => light(node));
      path.addEventListener("pointermove", (event) => tip.show(event, nodeText(forest, node)));
      path.addEventListener("pointerleave", () => { light(null); tip.hide(); });
      paths.push(path);
    }
    svg("g", { class: "labels" }, root);
    svg("rect", { class: "gutter", x: 0, y: 0, width: gutter, height }, root);
    svg("g", { class: "names" }, root);
    movable(height);
    redraw();
    light(null);
  }

  function redraw() {
    placed.nodes.forEach((node, n) => {
      paths[n].setAttribute("d", bandPath(node, node.parent < 0 ? null : placed.nodes[node.parent], placed.lane, view));
    });
    const labels = root.querySelector(".labels");
    labels.replaceChildren();
    for (const node of placed.nodes) {
      const bend = node.parent < 0 ? 0 : Math.min(FORK, (node.x1 - node.x0) * view.k * 0.6);
      const from = Math.max(gutter, node.x0 * view.k + view.x + bend), to = Math.min(width, node.x1 * view.k + view.x);
      const tall = (node.y1 - node.y0) * view.k, middle = ((node.y0 + node.y1) / 2) * view.k + view.y;
      if (node.segments || tall < 14) continue;
      const full = `${whole(node.length)} × ${whole(node.many)}`;
      const text = node.many > 1 ? full : whole(node.length);
      if (to - from < text.length * 7 + 8) continue;
      svg("text", { class: node.many > 1 ? "inside common" : "inside", x: from + 6, y: middle + 4 }, labels, text);
    }
    nameGroups();
  }

  // Beside their rollouts, as far as there is room for a line of text; zooming in makes more.
  function nameGroups() {
    const names = root.querySelector(".names"), height = root.viewBox.baseVal.height;
    names.replaceChildren();
    let last = 0, skipped = 0;
    for (const group of placed.groups) {
      const y0 = group.y0 * view.k + view.y, y1 = group.y1 * view.k + view.y;
      if (y1 < 0 || y0 > height) continue;
      const low = Math.max(0, y0), high = Math.min(height, y1);
      if (high - low > 3) svg("line", { class: "bracket", x1: gutter - 1, x2: gutter - 1, y1: low + 1, y2: high - 1 }, names);
      const middle = (low + high) / 2, prompt = promptText(group);
      const narrow = gutter < 150, part = group.here < group.rollouts;
      const size = part ? `${whole(group.here)} of ${whole(group.rollouts)}` : plural(group.rollouts, "rollout");
      const second = narrow ? [size, prompt].filter(Boolean) : [prompt ? `${size}, ${prompt}` : size];
      const lines = second.slice(0, Math.max(0, Math.floor((high - low) / 16) - 1));
      const top = middle - 8 * (1 + lines.length);
      if (top < last - 1 || top + 16 > height) { skipped += 1; continue; }
      const room = gutter - 16;
      const beside = !narrow && !lines.length && group.name.length + size.length + 2 <= room / 7 ? `, ${size}` : "";
      svg("text", { class: "group", x: 8, y: top + 12 }, names, fitted(group.name, room) + beside);
      lines.forEach((line, n) => svg("text", { x: 8, y: top + 28 + 16 * n }, names, fitted(line, room)));
      last = top + 16 * (1 + lines.length);
    }
    hidden.textContent = skipped ? `${plural(skipped, "name")} of groups find no room here: zoom in, or see Groups below.` : "";
    hidden.hidden = !skipped;
  }

  function zoom(factor, at) {
    const k = Math.min(400, Math.max(1, view.k * factor));
    const [x, y] = at || [width / 2, root.viewBox.baseVal.height / 2];
    view = { k, x: x - ((x - view.x) / view.k) * k, y: y - ((y - view.y) / view.k) * k };
    settle();
  }

  // The forest never leaves the frame.
  function settle() {
    const height = root.viewBox.baseVal.height;
    view.x = Math.min(0, Math.max(width - width * view.k, view.x));
    view.y = Math.min(0, Math.max(height - height * view.k, view.y));
    redraw();
  }

  function movable() {
    const held = new Map();
    const where = (event) => {
      const frame = root.getBoundingClientRect();
      return [((event.clientX - frame.left) / frame.width) * width, event.clientY - frame.top];
    };
    root.addEventListener("wheel", (event) => {
      // Without a key the page scrolls, once all of the forest is in view.
      if (!event.ctrlKey && !event.metaKey && view.k === 1 && event.deltaY > 0) return;
      event.preventDefault();
      zoom(Math.exp(-event.deltaY * 0.002), where(event));
    }, { passive: false });
    root.addEventListener("pointerdown", (event) => { held.set(event.pointerId, where(event)); });
    root.addEventListener("pointermove", (event) => {
      const before = held.get(event.pointerId);
      if (!before || (event.pointerType === "mouse" && event.buttons === 0)) return;
      const now = where(event);
      if (held.size === 2) {
        const other = [...held].find(([id]) => id !== event.pointerId)[1];
        const apart = (p) => Math.hypot(p[0] - other[0], p[1] - other[1]) || 1;
        zoom(apart(now) / apart(before), [(now[0] + other[0]) / 2, (now[1] + other[1]) / 2]);
      } else {
        root.classList.add("dragging");
        view.x += now[0] - before[0];
        view.y += now[1] - before[1];
        settle();
      }
      held.set(event.pointerId, now);
    });
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
      root.addEventListener(end, (event) => { held.delete(event.pointerId); root.classList.remove("dragging"); });
    }
  }

  listRollouts();
  whenSized(picture, (now) => { width = now; begin(); });
}
