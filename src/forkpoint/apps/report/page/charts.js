// Curves over optimizer steps, or over layers.

function chartLegend(parent, chart) {
  const legend = make("div", { class: "legend" }, parent);
  if (chart.series.length + (chart.band ? 1 : 0) < 2) return;
  for (const series of chart.series) {
    const item = make("span", {}, legend);
    const key = svg("svg", { viewBox: "0 0 18 10", "aria-hidden": "true" }, item);
    const stroke = `var(--${series.color})`;
    if (series.style === "points") svg("circle", { cx: 9, cy: 5, r: 3, fill: stroke }, key);
    else {
      const dash = series.style === "dashed" ? "4 3" : "none";
      const under = series.style === "under";
      svg("line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke, "stroke-width": under ? 6 : 2, opacity: under ? 0.45 : 1, "stroke-dasharray": dash }, key);
    }
    make("span", {}, item, series.name);
  }
  if (chart.band) {
    const item = make("span", {}, legend);
    const key = svg("svg", { viewBox: "0 0 18 10", "aria-hidden": "true" }, item);
    svg("rect", { width: 18, height: 10, fill: "var(--shared)", opacity: 0.15 }, key);
    make("span", {}, item, chart.band_name);
  }
}

function valueRange(chart) {
  const values = chart.series.flatMap((series) => series.values).filter((v) => v !== null);
  if (chart.band) values.push(...chart.band[0], ...chart.band[1]);
  if (chart.zero) values.push(0);
  if (!values.length) return chart.log ? [1e-1, 1] : [0, 1];
  let low = values.reduce((a, b) => Math.min(a, b));
  let high = values.reduce((a, b) => Math.max(a, b));
  if (chart.log) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high * 1.0001))];
  if (low === high) { const pad = Math.abs(low) || 1; low -= pad / 2; high += pad / 2; }
  const pad = (high - low) * 0.06;
  return [low === 0 ? 0 : low - pad, high === 0 ? 0 : high + pad];
}

function drawChart(parent, chart, width) {
  const height = width < 420 ? 210 : 240;
  const [low, high] = valueRange(chart);
  const level = chart.log ? Math.log10 : (v) => v;
  let marks = chart.log ? [] : ticks(low, high, 5);
  if (chart.log) {
    const span = Math.round(Math.log10(high / low));
    const every = Math.max(1, Math.ceil(span / 6));
    for (let n = Math.round(Math.log10(low)); n <= Math.round(Math.log10(high)); n += every) marks.push(10 ** n);
  }
  const texts = marks.map((v) => (chart.log ? `1e${Math.round(Math.log10(v))}`.replace("-", "−") : shortNumber(v)));
  const left = 14 + 7.4 * Math.max(...texts.map((t) => t.length), chart.x_label.length - 1);
  const box = { left, right: width - 10, top: 24, bottom: height - 30 };
  const first = chart.x[0], last = chart.x[chart.x.length - 1];
  const xOf = (x) => (first === last ? (box.left + box.right) / 2 : box.left + ((x - first) / (last - first)) * (box.right - box.left));
  const yOf = (v) => box.bottom - ((level(v) - level(low)) / (level(high) - level(low))) * (box.bottom - box.top);
  const names = chart.series.map((series) => series.name).join(", ");
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${chart.y_label}: ${names}` }, parent);
  svg("text", { x: 0, y: 12 }, root, chart.y_label);
  marks.forEach((value, index) => {
    const y = yOf(value);
    if (y < box.top - 1 || y > box.bottom + 1) return;
    svg("line", { class: value === 0 && low < 0 ? "axis" : "grid", x1: box.left, x2: box.right, y1: y, y2: y }, root);
    svg("text", { x: box.left - 7, y: y + 4, "text-anchor": "end" }, root, texts[index]);
  });
  const steps = ticks(first, last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger);
  for (const step of new Set([...steps])) svg("text", { x: xOf(step), y: height - 12, "text-anchor": "middle" }, root, whole(step));
  svg("text", { x: 0, y: height - 12 }, root, chart.x_label);
  svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, root);
  if (chart.band) {
    const up = chart.x.map((x, n) => `${xOf(x)},${yOf(chart.band[1][n])}`);
    const down = chart.x.map((x, n) => `${xOf(x)},${yOf(chart.band[0][n])}`).reverse();
    svg("polygon", { points: [...up, ...down].join(" "), fill: "var(--shared)", opacity: 0.13 }, root);
  }
  for (const series of chart.series) {
    const stroke = `var(--${series.color})`;
    if (series.style === "points") {
      const r = chart.x.length > 60 ? 2.2 : 3;
      chart.x.forEach((x, n) => {
        if (series.values[n] !== null) svg("circle", { cx: xOf(x), cy: yOf(series.values[n]), r, fill: stroke }, root);
      });
      continue;
    }
    let path = "", open = false;
    chart.x.forEach((x, n) => {
      const v = series.values[n];
      if (v === null) { open = false; return; }
      path += `${open ? "L" : "M"}${xOf(x).toFixed(2)} ${yOf(v).toFixed(2)}`;
      open = true;
    });
    const dash = series.style === "dashed" ? "5 4" : "none";
    const under = series.style === "under";
    svg("path", { d: path || "M0 0", fill: "none", stroke, "stroke-width": under ? 6 : 1.8, opacity: under ? 0.45 : 1, "stroke-dasharray": dash, "stroke-linejoin": "round" }, root);
  }
  const line = svg("line", { class: "axis", y1: box.top, y2: box.bottom, visibility: "hidden" }, root);
  root.addEventListener("pointermove", (event) => {
    const frame = root.getBoundingClientRect();
    const at = ((event.clientX - frame.left) / frame.width) * width;
    let near = 0;
    chart.x.forEach((x, n) => { if (Math.abs(xOf(x) - at) < Math.abs(xOf(chart.x[near]) - at)) near = n; });
    const x = xOf(chart.x[near]);
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    line.setAttribute("visibility", "visible");
    const values = chart.series.map((series) => `${series.name}: ${shortNumber(series.values[near])}`);
    tip.show(event, [`${chart.x_label} ${whole(chart.x[near])}`, ...values].join("\n"));
  });
  root.addEventListener("pointerleave", () => {
    line.setAttribute("visibility", "hidden");
    tip.hide();
  });
}

function showCharts(place, figure) {
  const pair = make("div", { class: "pair" }, place);
  for (const chart of figure.charts) {
    const cell = make("div", {}, pair);
    const picture = make("div", {}, cell);
    chartLegend(cell, chart);
    whenSized(picture, (width) => {
      picture.replaceChildren();
      drawChart(picture, chart, width);
    });
  }
}
