// Draws charts with uPlot. A chart is a <figure class="chart">: its data is the JSON in its script element, as
// `orchestrator/pictures/charts.py` makes it. Colours come from the page's CSS variables, light or dark.
"use strict";

const freshetCharts = (() => {
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif';
  const WHOLE = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power));
  const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });
  const DASHES = [undefined, [7, 3], [2, 3], [11, 3, 2, 3], [5, 5], [14, 5]];
  const drawn = new Map();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const text = (value) => (value == null ? "–" : short.format(value).replace("K", "k"));

  /** Draws `chart` into `figure`, in place of what stood there. */
  function draw(figure, chart) {
    drawn.get(figure)?.plot.destroy();
    const place = figure.querySelector(".plot");
    figure.classList.add("drawn");
    drawn.set(figure, { plot: new uPlot(options(chart, place.clientWidth), joined(chart), place), chart });
  }

  /** Gives the drawn `figure` the data of `chart`. Redraws it only if there are other curves; a zoom stays. */
  function update(figure, chart) {
    const known = drawn.get(figure);
    if (!known || shape(known.chart) !== shape(chart)) return draw(figure, chart);
    const { plot } = known;
    const [all, x] = [plot.data[0], plot.scales.x];
    const zoomed = all.length > 1 && (x.min > all[0] || x.max < all[all.length - 1]);
    Object.assign(known.chart, chart); // the plot's options refer to this object
    plot.setData(joined(chart), !zoomed);
    if (zoomed) plot.redraw(true, true);
  }

  const shape = (chart) =>
    JSON.stringify([chart.kind, chart.x.label, chart.y.label, chart.y.log, chart.series.map((each) => [each.name, Boolean(each.low), each.dots])]);

  function joined(chart) {
    const tables = chart.series.map((each) => (each.low ? [each.x, each.y, each.low, each.high] : [each.x, each.y]));
    return uPlot.join(tables);
  }

  function options(chart, width) {
    const ink = colour("--ink-soft");
    const axis = {
      stroke: ink,
      font: FONT,
      labelFont: FONT,
      labelSize: 18,
      labelGap: 2,
      grid: { stroke: colour("--grid"), width: 1 },
      ticks: { stroke: colour("--grid"), width: 1, size: 5 },
      values: (_, splits) => splits.map((value) => (value == null ? "" : text(value))),
    };
    const [series, bands] = curves(chart);
    return {
      width,
      height: chart.height,
      padding: [14, 14, 0, 0],
      series,
      bands,
      scales: {
        x: { time: false, range: (_, low, high) => chart.x.range ?? (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { range: () => chart.y.range, distr: chart.y.log ? 3 : 1 },
      },
      axes: [
        { ...axis, label: chart.x.label, size: 32, grid: { show: false }, ...(chart.x.whole ? { incrs: WHOLE } : {}) },
        { ...axis, label: chart.y.label, size: 50, ...(chart.kind === "bars" ? { incrs: WHOLE } : {}) },
      ],
      legend: { markers: { width: 2, dash: (plot, index) => (plot.series[index].dash ? "dashed" : "solid") } },
      cursor: { y: false, drag: { x: true, y: false } },
      hooks: {
        drawClear: [(plot) => tint(plot, chart)],
        draw: [(plot) => annotate(plot, chart)],
        setCursor: [(plot) => plot.root.classList.toggle("pointed", plot.cursor.idx != null)],
      },
    };
  }

  /** uPlot's series, and the areas between lowest and highest value of thinned curves. */
  function curves(chart) {
    const series = [{ label: chart.x.label, value: (_, value) => (value == null ? "" : exact.format(value)) }];
    const bands = [];
    chart.series.forEach((each, number) => {
      const stroke = each.colour ?? colour(`--s${number}`);
      series.push({
        label: each.name,
        stroke,
        width: chart.kind === "bars" ? 0 : 1.75,
        dash: each.colour ? undefined : DASHES[number % DASHES.length],
        fill: chart.kind === "bars" ? stroke : undefined,
        points: { show: Boolean(each.dots), size: each.labels ? 9 : 6, fill: stroke },
        paths: path(chart, each),
        value: (_, value, __, index) => (index == null ? "" : text(value)),
      });
      if (each.low) {
        const edge = { class: "edge", stroke: "transparent", width: 0, points: { show: false } };
        series.push({ ...edge, label: `${each.name}, lowest` }, { ...edge, label: `${each.name}, highest` });
        bands.push({ series: [series.length - 1, series.length - 2], fill: faint(stroke, 0.22) });
      }
    });
    return [series, bands];
  }

  function path(chart, each) {
    if (chart.kind === "bars") return uPlot.paths.bars({ size: [0.92] });
    return each.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
  }

  const faint = (stroke, share) => `color-mix(in srgb, ${stroke} ${100 * share}%, transparent)`;

  /** Bands of steps behind the curves, each from half a step before its first to half a step after its last. */
  function tint(plot, chart) {
    const { left, top, width, height } = plot.bbox;
    chart.bands.forEach(([first, last, number]) => {
      const from = Math.max(plot.valToPos(first - 0.5, "x", true), left);
      const to = Math.min(plot.valToPos(last + 0.5, "x", true), left + width);
      plot.ctx.fillStyle = faint(colour(`--b${number}`), 0.14);
      if (to > from) plot.ctx.fillRect(from, top, to - from, height);
    });
  }

  /** Dashed lines at marked steps, a triangle over each value above the axis, and the points' texts. */
  function annotate(plot, chart) {
    const { ctx, bbox } = plot;
    const pixel = devicePixelRatio;
    ctx.save();
    upright(plot, chart.marks, "--bad", [3 * pixel, 3 * pixel]);
    upright(plot, chart.changes.map((step) => step + 0.5), "--accent", [pixel, 2 * pixel]);
    const taken = [];
    chart.series.forEach((each, number) => {
      const stroke = each.colour ?? colour(`--s${number}`);
      each.x.forEach((step, index) => {
        const x = plot.valToPos(step, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) return;
        if ((each.high ?? each.y)[index] > chart.y.range[1]) triangle(ctx, stroke, x, bbox.top - 2 * pixel, pixel);
        if (each.labels) label(ctx, each.labels[index], x, plot.valToPos(each.y[index], "y", true), taken, pixel);
      });
    });
    ctx.restore();
  }

  /** Lines over the plot's whole height at `steps`. */
  function upright(plot, steps, name, dash) {
    const { ctx, bbox } = plot;
    ctx.strokeStyle = colour(name);
    ctx.setLineDash(dash);
    for (const step of steps) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
  }

  function triangle(ctx, fill, x, bottom, pixel) {
    ctx.fillStyle = fill;
    ctx.beginPath();
    ctx.moveTo(x, bottom - 7 * pixel);
    ctx.lineTo(x + 4 * pixel, bottom);
    ctx.lineTo(x - 4 * pixel, bottom);
    ctx.fill();
  }

  /** Writes `words` beside a point, at the nearest height where it covers no other text. */
  function label(ctx, words, x, y, taken, pixel) {
    ctx.font = FONT.replace("12px", `${12 * pixel}px`);
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.fillStyle = colour("--ink-soft");
    const [left, right, line] = [x, x + 8 * pixel + ctx.measureText(words).width, 15 * pixel];
    const free = (height) =>
      taken.every(([l, r, other]) => right < l || r < left || Math.abs(height - other) >= line);
    const heights = [...Array(taken.length + 1).keys()].flatMap((step) => [y + step * line, y - step * line]);
    const height = heights.find(free) ?? y;
    taken.push([left, right, height]);
    ctx.fillText(words, left + 8 * pixel, height);
  }

  const data = (figure) => JSON.parse(figure.querySelector("script").text);
  const figures = () => [...document.querySelectorAll("figure.chart")];

  /** Draws the charts that are not drawn yet, and forgets those that have left the page. */
  function drawNew() {
    for (const [figure, { plot }] of drawn) {
      if (figure.isConnected) continue;
      plot.destroy();
      drawn.delete(figure);
    }
    figures().forEach((figure) => drawn.has(figure) || draw(figure, data(figure)));
  }

  /** Draws every chart of the page, again when its width or the colours change. */
  function drawAll() {
    const redraw = () => figures().forEach((figure) => draw(figure, drawn.get(figure)?.chart ?? data(figure)));
    redraw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("resize", () => {
      drawn.forEach(({ plot }, figure) =>
        plot.setSize({ width: figure.querySelector(".plot").clientWidth, height: plot.height }),
      );
    });
  }

  return { draw, drawAll, drawNew, update, data };
})();

freshetCharts.drawAll();
