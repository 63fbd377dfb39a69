"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const escape = (text) => String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  const narrow = () => window.innerWidth < 641;
  const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const PATTERNS = { up: "/", down: "\\", flat: "-", tall: "|", dots: "." };
  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };

  function size(bytes) {
    if (bytes === null || bytes === undefined) return "unknown";
    const [unit, scale] = UNITS.find(([, s]) => Math.abs(bytes) >= s) || UNITS[3];
    const value = bytes / scale;
    return `${unit === "GiB" ? value.toFixed(2) : unit === "B" || Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
  }
  const scaleOf = (most) => UNITS.find(([, s]) => most >= 2 * s) || UNITS[3];

  function base() {
    const axis = { gridcolor: colour("line"), linecolor: colour("quiet"), zeroline: false, tickfont: { color: colour("quiet"), size: 12 }, fixedrange: true };
    return {
      axis,
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x",
        hoverdistance: -1, spikedistance: -1, dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",
        font: { family: getComputedStyle(document.body).fontFamily, color: colour("ink"), size: 13 },
        hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("quiet"), font: { color: colour("ink"), size: 13 }, align: "left", namelength: -1 },
      },
    };
  }
  const spike = () => ({ showspikes: true, spikemode: "across", spikesnap: "data", spikecolor: colour("ink"), spikethickness: 1, spikedash: "solid" });

  function place(d, i) { return d.places[d.place[i]]; }
  function spanAt(d, event) { return d.spans.find((s) => event >= s.start && event < s.end); }

  function timeline(figure, d) {
    const plot = figure.querySelector(".plot");
    const slider = figure.querySelector("input");
    const ends = [d.x[0], d.x[d.x.length - 1]];
    const peak = Math.max(...d.total, ...(d.held || [0]));
    const [unit, scale] = scaleOf(peak);
    const shows = d.limit !== null && d.limit < 2.5 * peak;
    const top = Math.max(peak, shows ? d.limit : 0) * 1.05 / scale;
    let range = ends;

    const traces = () => {
      const bands = d.bands.map((band) => ({
        x: d.x, y: band.y.map((v) => v / scale), name: band.name, stackgroup: "alive", mode: "lines", hoverinfo: "skip",
        line: { width: 0.5, color: colour(band.name), shape: "hv" }, fillcolor: colour(band.name),
        fillpattern: band.hatch ? { shape: PATTERNS[band.hatch], fillmode: "replace", bgcolor: colour(band.name), fgcolor: colour("paper"), size: 6, solidity: 0.25 } : undefined,
      }));
      if (d.held) bands.push({ x: d.x, y: d.held.map((v) => v / scale), mode: "lines", name: "reserved", hoverinfo: "skip", line: { color: colour("ink"), width: 1.5, dash: "dot", shape: "hv" } });
      bands.push({
        x: d.x, y: d.total.map((v) => v / scale), mode: "lines", name: "", line: { width: 0.75, color: colour("quiet"), shape: "hv" },
        text: d.x.map((_, i) => `<b>${size(d.total[i])}</b><br>${escape(place(d, i)[0] || "outside of any module")}<br>${escape(place(d, i)[1])}`.split("<br>").map(cut).join("<br>")),
        hovertemplate: "%{text}<extra></extra>",
      });
      return bands;
    };
    const cut = (line) => (line.length > 60 && !line.startsWith("<b>") ? `…${line.slice(-58)}` : line);

    function marks() {
      const pixels = Math.max(plot.clientWidth - 78, 100) / (range[1] - range[0]);
      const quiet = colour("quiet"), annotations = [], shapes = [];
      const fits = (text, from, to) => (Math.min(to, range[1]) - Math.max(from, range[0])) * pixels > text.length * 7 + 6;
      const label = (text, from, to, y) => annotations.push({
        x: (Math.max(from, range[0]) + Math.min(to, range[1])) / 2, y, yref: "paper", yanchor: "bottom", text: escape(text), showarrow: false, font: { size: 12, color: y > 1.05 ? colour("ink") : quiet },
      });
      for (const s of d.spans) if (s.end > range[0] && s.start < range[1] && s.part !== s.phase && fits(s.part, s.start, s.end)) label(s.part, s.start, s.end, 1);
      for (const p of d.phases) {
        if (p.start > range[0]) shapes.push({ type: "line", x0: p.start, x1: p.start, y0: 0, y1: 1.12, yref: "paper", line: { color: quiet, width: 1 } });
        if (p.end > range[0] && p.start < range[1] && fits(p.name, p.start, p.end)) label(p.name, p.start, p.end, 1.06);
      }
      if (d.limit !== null) {
        if (shows) shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: d.limit / scale, y1: d.limit / scale, line: { color: colour("limit"), width: 2, dash: "dash" } });
        annotations.push({
          xref: "paper", x: 0.005, xanchor: "left", y: shows ? d.limit / scale : top, yanchor: shows && d.limit / scale < top * 0.85 ? "bottom" : "top", showarrow: false,
          text: shows ? `<b>limit ${size(d.limit)}</b>` : `<b>↑ limit ${size(d.limit)}</b>`, font: { color: colour("limit"), size: 13 }, bgcolor: colour("paper"), opacity: 0.9,
        });
      }
      if (d.failed !== null) annotations.push({ x: d.failed, y: 0.5, yref: "paper", text: "<b>✗ no room from here</b>", showarrow: true, arrowcolor: colour("limit"), ax: 0, ay: 0, xanchor: d.failed > (range[0] + range[1]) / 2 ? "right" : "left", font: { color: colour("limit") }, bgcolor: colour("paper") });
      if (d.failed !== null) shapes.push({ type: "line", x0: d.failed, x1: d.failed, y0: 0, y1: 1, yref: "paper", line: { color: colour("limit"), width: 2 } });
      return { annotations, shapes };
    }
    const layout = () => {
      const { axis, layout } = base();
      return {
        ...layout, ...marks(), margin: { l: 62, r: 12, t: 52, b: 42 },
        xaxis: { ...axis, fixedrange: false, range: [...range], tickformat: ",d", nticks: narrow() ? 4 : 9, title: { text: "events, in order", font: { size: 12, color: colour("quiet") }, standoff: 6 }, ...spike() },
        yaxis: { ...axis, range: [0, top], ticksuffix: ` ${unit}`, nticks: 7 },
      };
    };

    const out = (name) => figure.querySelector(`[data-out=${name}]`);
    function read(i) {
      const span = spanAt(d, d.x[i]), [module, operator] = place(d, i);
      out("total").textContent = size(d.total[i]) + (d.held ? `, ${size(d.held[i])} held by the allocator` : "");
      out("when").textContent = span ? `${span.phase}${span.part === span.phase ? "" : `, ${span.part}`}; event ${(d.x[i] + 1).toLocaleString("en")} of ${d.count.toLocaleString("en")}` : "";
      out("module").textContent = module || "outside of any module";
      out("operator").textContent = operator || "unknown";
      for (const band of d.bands) {
        const row = figure.querySelector(`tr[data-band=${band.name}]`);
        row.querySelector(".bytes").textContent = size(band.y[i]);
        row.querySelector("i").style.width = `${d.total[i] ? (100 * band.y[i]) / d.total[i] : 0}%`;
      }
      slider.setAttribute("aria-valuetext", `${size(d.total[i])}, ${module}, ${operator}`);
    }
    function go(i) {
      slider.value = i;
      read(i);
      if (d.x[i] < range[0] || d.x[i] > range[1]) show(ends);
      Plotly.Fx.hover(plot, [{ curveNumber: plot.data.length - 1, pointNumber: i }]);
    }
    function show(next) {
      range = next;
      for (const button of figure.querySelectorAll("button[data-from]")) button.setAttribute("aria-pressed", String(Number(button.dataset.from) === range[0] && Number(button.dataset.to) === range[1]));
      Plotly.relayout(plot, { "xaxis.range": [...range], ...marks() });
    }
    const draw = () => Plotly.react(plot, traces(), layout(), CONFIG);
    slider.addEventListener("input", () => go(Number(slider.value)));
    for (const button of figure.querySelectorAll("button[data-go]")) button.addEventListener("click", () => go(Number(button.dataset.go)));
    for (const button of figure.querySelectorAll("button[data-from]")) button.addEventListener("click", () => show([Number(button.dataset.from), Number(button.dataset.to)]));
    draw().then(() => {
      plot.on("plotly_hover", (event) => { const i = event.points[0].pointNumber; slider.value = i; read(i); });
      plot.on("plotly_relayout", (change) => {
        const next = change["xaxis.range"] || ("xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null);
        if (next && (next[0] !== range[0] || next[1] !== range[1])) show([...next]);
      });
      read(Number(slider.value));
      figure.dataset.drawn = "yes";
    });
    return draw;
  }

  function windows(figure, d) {
    const plot = figure.querySelector(".plot");
    const slider = figure.querySelector("input");
    const [unit, scale] = scaleOf(d.highest || 1);
    const shown = (panel, v) => (v === null ? "unknown" : panel.bytes ? size(v) : Number(v.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));
    const glyph = (line) => ({ dash: "╍", dot: "┅" })[line.dash] || "●";
    const title = (panel) => `<b>${escape(panel.name)}</b>${panel.lines.length > 1 ? panel.lines.map((line) => `   <span style="color:${colour(line.colour)}">${line.far ? "↑" : glyph(line)} ${escape(line.name)}${line.far ? ` ${size(line.y[0])}` : ""}</span>`).join("") : ""}`;
    const traces = () => d.panels.flatMap((panel, p) => panel.lines.filter((line) => !line.far).map((line) => ({
      x: d.x, y: line.y.map((v) => (v === null ? null : panel.bytes ? v / scale : v)), yaxis: p ? `y${p + 1}` : "y", name: escape(line.name),
      mode: d.x.length < 60 && (line.symbol !== "line-ew" || d.x.length === 1) ? "lines+markers" : "lines", marker: { size: 6, symbol: line.symbol, line: { width: line.symbol === "line-ew" ? 2 : 0, color: colour(line.colour) } }, line: { color: colour(line.colour), dash: line.dash || "solid", width: 2 },
      text: line.y.map((v) => `${escape(line.name)}: ${shown(panel, v)}`), hovertemplate: "%{text}<extra></extra>",
    })));
    const layout = () => {
      const { axis, layout } = base();
      const n = d.panels.length, annotations = [], axes = {};
      d.panels.forEach((panel, p) => {
        const high = 1 - p / n, low = 1 - (p + 1) / n + 0.22 / n;
        axes[p ? `yaxis${p + 1}` : "yaxis"] = { ...axis, domain: [low, high - 0.14 / n], nticks: 5, rangemode: panel.zero ? "tozero" : "normal", ...(panel.whole ? { dtick: Math.max(1, Math.ceil(Math.max(...panel.lines[0].y) / 4)) } : {}), ticksuffix: panel.bytes ? ` ${unit}` : "" };
        annotations.push({ xref: "paper", yref: "paper", x: 0, xanchor: "left", xshift: -70, y: high - 0.12 / n, yanchor: "bottom", showarrow: false, text: title(panel), font: { size: 13 } });
      });
      return {
        ...layout, annotations, margin: { l: 78, r: 14, t: 8, b: 42 }, hoversubplots: "axis", ...axes,
        xaxis: { ...axis, anchor: n > 1 ? `y${n}` : "y", fixedrange: false, ...(d.x.length < 10 ? { dtick: 1, range: [d.x[0] - 0.5, d.x[d.x.length - 1] + 0.5] } : {}), tickformat: ",d", nticks: narrow() ? 5 : 10, title: { text: "window", font: { size: 12, color: colour("quiet") }, standoff: 6 }, ...spike() },
      };
    };
    function read(i) {
      figure.querySelector("[data-out=window]").textContent = d.x[i].toLocaleString("en");
      d.panels.forEach((panel, p) => panel.lines.forEach((line, l) => { figure.querySelector(`[data-out=v${p}-${l}]`).textContent = shown(panel, line.y[i]); }));
      slider.setAttribute("aria-valuetext", `window ${d.x[i]}`);
    }
    const draw = () => Plotly.react(plot, traces(), layout(), CONFIG);
    slider.addEventListener("input", () => { read(Number(slider.value)); Plotly.Fx.hover(plot, { xval: d.x[Number(slider.value)] }, ["xy"]); });
    draw().then(() => {
      plot.on("plotly_hover", (event) => { const i = event.points[0].pointNumber; slider.value = i; read(i); });
      read(Number(slider.value));
      figure.dataset.drawn = "yes";
    });
    return draw;
  }

  function curve(figure, d) {
    const plot = figure.querySelector(".plot");
    const slider = figure.querySelector("input");
    const highest = Math.max(...d.lines.flatMap((line) => line.y));
    const drawn = d.limits.filter((limit) => limit.bytes <= 1.6 * highest);
    const [unit, scale] = scaleOf(highest);
    const traces = () => d.lines.map((line) => ({
      x: d.x, y: line.y.map((v) => v / scale), name: escape(line.name), mode: d.x.length > 1 ? "lines+markers" : "markers", marker: { size: 8, symbol: line.symbol, color: colour(line.colour) },
      line: { color: colour(line.colour), dash: line.dash || "solid", width: 2 }, text: line.y.map((v) => `${escape(line.name)}: ${size(v)}`), hovertemplate: "%{text}<extra></extra>",
    }));
    const layout = () => {
      const { axis, layout } = base();
      const annotations = drawn.map((limit) => ({ xref: "paper", x: 0.005, xanchor: "left", y: limit.bytes / scale, yanchor: "bottom", showarrow: false, text: `${escape(limit.name)} ${size(limit.bytes)}`, font: { color: colour("limit"), size: 12 } }));
      const shapes = drawn.map((limit) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit.bytes / scale, y1: limit.bytes / scale, line: { color: colour("limit"), width: 1, dash: "dash" } }));
      return {
        ...layout, annotations, shapes, showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { color: colour("ink") } }, margin: { l: 70, r: 14, t: 60, b: 46 },
        xaxis: { ...axis, type: d.x.length > 1 ? "log" : "linear", tickvals: d.x, tickformat: ",d", title: { text: `micro-batch, ${escape(d.unit)}`, font: { size: 12, color: colour("quiet") }, standoff: 6 }, ...spike() },
        yaxis: { ...axis, rangemode: "tozero", ticksuffix: ` ${unit}`, nticks: 7 },
      };
    };
    function read(i) {
      figure.querySelector("[data-out=micro]").textContent = `${d.x[i].toLocaleString("en")} ${d.unit}`;
      d.lines.forEach((line, l) => { figure.querySelector(`[data-out=c${l}]`).textContent = size(line.y[i]); });
      slider.setAttribute("aria-valuetext", `${d.x[i]} ${d.unit}`);
    }
    const draw = () => Plotly.react(plot, traces(), layout(), CONFIG);
    slider.addEventListener("input", () => { read(Number(slider.value)); Plotly.Fx.hover(plot, { xval: Math.log10(d.x[Number(slider.value)]) }, ["xy"]); });
    draw().then(() => {
      plot.on("plotly_hover", (event) => { const i = event.points[0].pointNumber; slider.value = i; read(i); });
      read(Number(slider.value));
      figure.dataset.drawn = "yes";
    });
    return draw;
  }

  const kinds = { timeline, windows, curve };
  const draws = data.map((d) => kinds[d.kind](document.getElementById(d.id), d));
  const redraw = () => draws.forEach((draw) => draw());
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let waiting = 0;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 200); });
})();
