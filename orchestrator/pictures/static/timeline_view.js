// Timelines to zoom into: keys, buttons, wheel and drag. A timeline is a <figure class="timeline-view">: its data is the
// JSON in its script element, as `orchestrator/pictures/timeline_view.py` makes it; `timeline_canvas.js` draws it.
"use strict";

const freshetTimelines = (() => {
  const { TimelineCanvas, firstAfter, stage, token } = freshetTimelineCanvas;
  const CLOSEST = 50;
  const SMALLER = { s: "ms", ms: "µs" };
  const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const views = new WeakMap();
  const KEYS = {
    "+": "in", "=": "in", ArrowUp: "in", "-": "out", ArrowDown: "out", ArrowLeft: "left", ArrowRight: "right",
    Home: "whole", 0: "whole", n: "next", p: "previous", PageDown: "below", PageUp: "above",
  };

  class TimelineView extends TimelineCanvas {
    constructor(figure) {
      super(figure);
      this.output = figure.querySelector("output");
      figure.classList.add("drawn");
      this.draw();
      this.listen();
    }

    /** Draws soon, once however often it is called. */
    redraw() {
      this.asked ??= requestAnimationFrame(() => {
        this.asked = undefined;
        this.draw();
      });
    }

    /** Shows the ticks from `from` to `to`, as far as there are any. */
    show(from, to) {
      const size = clamp(to - from, CLOSEST, this.data.end);
      this.from = clamp((from + to - size) / 2, 0, this.data.end - size);
      this.to = this.from + size;
      this.redraw();
    }

    zoom(factor, around) {
      const middle = around ?? this.middle();
      this.show(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor);
    }

    pan(share) {
      const by = clamp((this.to - this.from) * share, -this.from, this.data.end - this.to);
      this.show(this.from + by, this.to + by);
    }

    /** The middle of the chosen action if it shows, else of the picture. */
    middle() {
      const { lane, n } = this.chosen ?? {};
      const middle = lane ? (lane.starts[n] + lane.ends[n]) / 2 : -1;
      return middle > this.from && middle < this.to ? middle : (this.from + this.to) / 2;
    }

    choose(lane, n) {
      this.chosen = lane && n >= 0 && n < lane.starts.length ? { lane, n } : null;
      this.output.textContent = this.chosen ? this.told(lane, n) : "";
      if (this.chosen && (lane.ends[n] < this.from || lane.starts[n] > this.to)) {
        const half = (this.to - this.from) / 2, middle = (lane.starts[n] + lane.ends[n]) / 2;
        this.show(middle - half, middle + half);
      }
      this.redraw();
    }

    /** The action in words. */
    told(lane, n) {
      const { scale, unit, kinds } = this.data;
      const time = (ticks) => number.format(ticks * scale);
      const length = (lane.ends[n] - lane.starts[n]) * scale;
      const takes = length < 0.1 && SMALLER[unit] ? [length * 1000, SMALLER[unit]] : [length, unit];
      const parts = [
        `${lane.heading ? `${lane.heading}, ` : ""}${lane.name}`,
        `${token(lane, n)}: ${kinds[lane.kinds[n]].name} of microbatch ${lane.indices[n]} on stage ${stage(lane, n)}`,
        `${time(lane.starts[n])} to ${time(lane.ends[n])} ${unit}, takes ${number.format(takes[0])} ${takes[1]}`,
      ];
      if (lane.frozen[n]) parts.push(`${Math.round(100 * lane.frozen[n])} % frozen`);
      if (lane.critical.has(n)) parts.push("on the critical path");
      return parts.join(" · ");
    }

    /** Chooses the action `by` further in its lane, or `lanes` lanes further at about the same time. */
    step(by, lanes) {
      const { lane, n } = this.chosen ?? { lane: this.lanes[0], n: firstAfter(this.lanes[0], this.from) - by };
      if (!lanes) {
        this.choose(lane, clamp(n + by, 0, lane.starts.length - 1));
        return;
      }
      const next = this.lanes[clamp(this.lanes.indexOf(lane) + lanes, 0, this.lanes.length - 1)];
      this.choose(next, Math.min(firstAfter(next, lane.starts[n] ?? this.from), next.starts.length - 1));
    }

    act(what) {
      const acts = {
        in: () => this.zoom(0.5),
        out: () => this.zoom(2),
        left: () => this.pan(-0.25),
        right: () => this.pan(0.25),
        whole: () => this.show(0, this.data.end),
        next: () => this.step(1, 0),
        previous: () => this.step(-1, 0),
        below: () => this.step(0, 1),
        above: () => this.step(0, -1),
      };
      acts[what]?.();
    }

    listen() {
      const { canvas } = this;
      this.figure.addEventListener("click", (event) => this.act(event.target.closest?.("button")?.dataset.act));
      canvas.addEventListener("keydown", (event) => {
        const act = KEYS[event.key];
        if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        this.act(act);
      });
      // The page scrolls by the wheel unless the timeline has the focus.
      const wheel = (event) => {
        if (!event.ctrlKey && document.activeElement !== canvas) return;
        event.preventDefault();
        if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.span);
        else this.zoom(2 ** clamp(event.deltaY / 200, -1, 1), this.tick(event.offsetX));
      };
      canvas.addEventListener("wheel", wheel, { passive: false });
      canvas.addEventListener("dblclick", () => this.act("whole"));
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        canvas.setPointerCapture(event.pointerId);
        this.dragged = { from: event.offsetX, now: event.offsetX };
      });
      canvas.addEventListener("pointermove", (event) => {
        if (this.dragged) {
          this.dragged.now = event.offsetX;
          this.redraw();
        } else if (event.pointerType === "mouse") this.choose(...this.at(event.offsetX, event.offsetY));
      });
      canvas.addEventListener("pointerup", (event) => this.drop(event));
      canvas.addEventListener("pointercancel", () => {
        this.dragged = null;
        this.redraw();
      });
      this.observer = new ResizeObserver(() => {
        if (canvas.parentElement.clientWidth !== this.width) this.redraw();
      });
      this.observer.observe(canvas.parentElement);
    }

    /** Ends a drag: shows what it covers; without a way, chooses what lies there. */
    drop(event) {
      const ends = this.dragged && [this.dragged.from, event.offsetX].sort((a, b) => a - b);
      this.dragged = null;
      if (!ends) return;
      if (ends[1] - ends[0] > 5) this.show(this.tick(ends[0]), this.tick(ends[1]));
      else this.choose(...this.at(event.offsetX, event.offsetY));
      this.redraw();
    }
  }

  /** Draws every timeline in `root` that is not drawn yet. */
  function drawAll(root = document) {
    const start = performance.now();
    for (const figure of root.querySelectorAll("figure.timeline-view:not(.drawn)")) {
      views.set(figure, new TimelineView(figure));
    }
    performance.measure("draw timelines", { start });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const figure of document.querySelectorAll("figure.timeline-view")) views.get(figure)?.redraw();
  });

  return { drawAll, of: (figure) => views.get(figure) };
})();

freshetTimelines.drawAll();
