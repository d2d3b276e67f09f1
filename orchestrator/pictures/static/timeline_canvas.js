// Draws the timeline of a step on a canvas: lanes of actions, the critical path, memory, a time axis. Times are ticks, of
// which the longest step has `end`. Colours of text and lines come from the page's CSS variables, light or dark. What the
// user does is in `timeline_view.js`.
"use strict";

const freshetTimelineCanvas = (() => {
  const LANE = 24, GAP = 9, STRIP = 36, STRIP_GAP = 6, HEADING = 24, AXIS = 24, RIGHT = 8;
  const FONT = "11px system-ui, sans-serif";
  const BOLD = "600 11px system-ui, sans-serif";
  const TOKEN = "10px ui-monospace, monospace";
  const TOKEN_PIXELS = 6.2;

  const colour = (name, otherwise) =>
    getComputedStyle(document.documentElement).getPropertyValue(name).trim() || otherwise;

  /** The microbatches of a lane without `indices`: those of each kind and stage count up from 0. */
  function counted(lane) {
    const seen = {};
    return [...lane.kinds].map((kind, n) => {
      const key = `${stage(lane, n)}${kind}`;
      seen[key] = (seen[key] ?? -1) + 1;
      return seen[key];
    });
  }

  /** A lane's actions with their starts and ends, from the gaps and lengths that the data holds. */
  function decoded(lane, heading) {
    const count = lane.kinds.length;
    const starts = new Float64Array(count), ends = new Float64Array(count);
    for (let n = 0, now = 0; n < count; n++) {
      starts[n] = now + lane.times[2 * n];
      ends[n] = now = starts[n] + lane.times[2 * n + 1];
    }
    const indices = lane.indices ?? counted(lane);
    return { ...lane, heading, indices, starts, ends, critical: new Set(lane.critical) };
  }

  const stage = (lane, n) => (Array.isArray(lane.stages) ? lane.stages[n] : lane.stages);
  const token = (lane, n) => `${stage(lane, n)}${lane.kinds[n]}${lane.indices[n]}`;

  /** The first action of `lane` that ends after `tick`. */
  function firstAfter(lane, tick) {
    let low = 0, high = lane.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.ends[middle] > tick) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  class TimelineCanvas {
    constructor(figure) {
      this.figure = figure;
      this.canvas = figure.querySelector("canvas");
      this.data = JSON.parse(figure.querySelector("script").text);
      this.groups = this.data.groups.map((group) => ({
        ...group,
        lanes: group.lanes.map((lane) => decoded(lane, group.name)),
      }));
      this.lanes = this.groups.flatMap((group) => group.lanes);
      [this.from, this.to] = [0, this.data.end];
      this.chosen = null;
      this.dragged = null;
      this.place();
    }

    /** Gives every lane its height on the canvas. */
    place() {
      let y = 0;
      for (const group of this.groups) {
        group.top = y;
        y += group.name ? HEADING : 4;
        for (const lane of group.lanes) {
          lane.top = y;
          y += LANE + GAP + (lane.memory ? STRIP_GAP + STRIP + GAP : 0);
        }
        group.bottom = y - GAP + 4;
      }
      this.bottom = y;
    }

    get left() {
      return this.lanes.some((lane) => lane.memory) ? 62 : 46;
    }

    x(tick) {
      return this.left + ((tick - this.from) / (this.to - this.from)) * this.span;
    }

    tick(x) {
      return this.from + ((x - this.left) / this.span) * (this.to - this.from);
    }

    draw() {
      const width = this.canvas.parentElement.clientWidth, height = this.bottom + AXIS;
      const pixel = devicePixelRatio;
      [this.width, this.span] = [width, Math.max(width - this.left - RIGHT, 1)];
      this.canvas.width = Math.round(width * pixel);
      this.canvas.height = Math.round(height * pixel);
      this.canvas.style.height = `${height}px`;
      const ctx = this.canvas.getContext("2d");
      ctx.setTransform(pixel, 0, 0, pixel, 0, 0);
      this.ink = colour("--ink", "#17202a");
      this.soft = colour("--ink-soft", "#747d89");
      ctx.textBaseline = "middle";
      this.axis(ctx);
      for (const group of this.groups) this.group(ctx, group);
      if (this.dragged) {
        ctx.fillStyle = "rgb(121 170 255 / 30%)";
        const [low, high] = [this.dragged.from, this.dragged.now].sort((a, b) => a - b);
        ctx.fillRect(low, 0, high - low, this.bottom);
      }
    }

    /** Round times, at least 90 pixels apart. */
    axis(ctx) {
      const { scale, unit } = this.data;
      if (!scale) return;
      const least = ((this.to - this.from) * scale) / Math.max(this.span / 90, 1);
      const power = 10 ** Math.floor(Math.log10(least));
      const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least * (1 - 1e-9));
      ctx.font = FONT;
      ctx.fillStyle = this.soft;
      ctx.strokeStyle = colour("--line", "#c5cad1");
      ctx.textAlign = "center";
      const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
      for (let n = Math.ceil((this.from * scale) / step - 1e-9); n * step <= this.to * scale * (1 + 1e-9); n++) {
        const x = this.x((n * step) / scale);
        ctx.beginPath();
        ctx.moveTo(x, 0);
        ctx.lineTo(x, this.bottom + 4);
        ctx.stroke();
        if (x < this.width - 14) ctx.fillText((n * step).toFixed(digits), x, this.bottom + 13);
      }
      ctx.textAlign = "left";
      ctx.fillText(unit, 2, this.bottom + 13);
    }

    group(ctx, group) {
      if (group.name) {
        ctx.font = BOLD;
        ctx.fillStyle = this.ink;
        ctx.fillText(`${group.name}, ${group.length}`, 2, group.top + HEADING / 2);
      }
      for (const lane of group.lanes) {
        ctx.font = FONT;
        ctx.fillStyle = this.soft;
        ctx.fillText(lane.name, 2, lane.top + LANE / 2);
        if (lane.memory) ctx.fillText(lane.memory.peak, 2, lane.top + LANE + STRIP_GAP + GAP / 2 + STRIP / 2);
      }
      ctx.save();
      ctx.beginPath();
      ctx.rect(this.left, group.top, this.span, group.bottom - group.top + 4);
      ctx.clip();
      for (const lane of group.lanes) {
        ctx.fillStyle = "rgb(138 147 160 / 18%)";
        ctx.fillRect(this.x(0), lane.top, this.x(group.end) - this.x(0), LANE);
        this.boxes(ctx, lane);
        if (lane.memory) this.memory(ctx, lane, group);
      }
      if (group.name) {
        ctx.strokeStyle = colour("--s1", "#c2570c");
        ctx.setLineDash([3, 2]);
        ctx.beginPath();
        ctx.moveTo(this.x(group.end), group.top + 6);
        ctx.lineTo(this.x(group.end), group.bottom);
        ctx.stroke();
      }
      ctx.restore();
    }

    boxes(ctx, lane) {
      ctx.font = TOKEN;
      ctx.textAlign = "center";
      for (let n = firstAfter(lane, this.from); n < lane.starts.length && lane.starts[n] < this.to; n++) {
        const x = this.x(lane.starts[n]), width = this.x(lane.ends[n]) - x;
        const drawn = Math.max(width - (width > 3 ? 0.6 : 0), 0.4);
        ctx.fillStyle = this.data.kinds[lane.kinds[n]].colour;
        ctx.fillRect(x, lane.top, drawn, LANE);
        const frozen = lane.frozen[n];
        if (frozen) {
          ctx.fillStyle = "rgb(255 255 255 / 55%)";
          ctx.fillRect(x, lane.top, drawn, LANE * frozen);
        }
        if (lane.critical.has(n)) {
          ctx.fillStyle = this.ink;
          ctx.fillRect(x, lane.top + LANE + 2, Math.max(drawn, 1), 3);
        }
        const left = Math.max(x, this.left), seen = Math.min(x + width, this.left + this.span) - left;
        if (seen > 9) {
          const full = token(lane, n);
          const text = full.length * TOKEN_PIXELS + 2 <= seen ? full : lane.kinds[n];
          ctx.fillStyle = "#14181d";
          ctx.fillText(text, left + seen / 2, lane.top + LANE / 2 + 1);
        }
        if (this.chosen?.lane === lane && this.chosen.n === n) {
          ctx.strokeStyle = this.ink;
          ctx.lineWidth = 2;
          ctx.strokeRect(x + 1, lane.top + 1, Math.max(drawn - 2, 1), LANE - 2);
          ctx.lineWidth = 1;
        }
      }
      ctx.textAlign = "left";
    }

    /** The uses of memory, stacked, the highest first: each reaches down to the bottom, and later ones cover it. */
    memory(ctx, lane, group) {
      const top = lane.top + LANE + STRIP_GAP + GAP / 2, bottom = top + STRIP;
      ctx.fillStyle = "rgb(138 147 160 / 10%)";
      ctx.fillRect(this.x(0), top, this.x(group.end) - this.x(0), STRIP);
      const { levels } = lane.memory;
      for (let use = this.data.uses.length; use > 0; use--) {
        ctx.fillStyle = this.data.uses[use - 1].colour;
        ctx.beginPath();
        ctx.moveTo(this.x(levels[0][0]), bottom);
        levels.forEach((level, n) => {
          const height = level.slice(1, use + 1).reduce((sum, part) => sum + part, 0);
          const y = bottom - (height / 1000) * STRIP;
          ctx.lineTo(this.x(level[0]), y);
          ctx.lineTo(this.x(levels[n + 1]?.[0] ?? group.end), y);
        });
        ctx.lineTo(this.x(group.end), bottom);
        ctx.fill();
      }
    }

    /** The lane and the number of the action at a point; null and -1 if there is none. */
    at(x, y) {
      const lane = this.lanes.find((each) => y >= each.top && y < each.top + LANE + GAP);
      if (!lane || x < this.left) return [null, -1];
      const tick = this.tick(x), n = firstAfter(lane, tick);
      return n < lane.starts.length && lane.starts[n] <= tick ? [lane, n] : [null, -1];
    }
  }

  return { TimelineCanvas, firstAfter, stage, token };
})();
