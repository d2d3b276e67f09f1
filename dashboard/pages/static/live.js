// Keeps a page's sections fresh. A section names where it is fetched from (data-from) and either the kinds of events
// that make it old (data-kinds, heard on the page's stream), or how often it is fetched (data-poll, in ms), where
// there is nothing to hear. The stream itself is in stream.js.
"use strict";

(() => {
  const RETRY_MS = 1000;
  let stream = null;
  const sections = [...document.querySelectorAll("section[data-from]")].map((element) => ({
    element,
    kinds: new Set((element.dataset.kinds ?? "").split(" ")),
    every: Number(element.dataset.every ?? 1000),
    text: null, // as fetched last
    fetchedAt: -Infinity,
    old: false,
    busy: false,
    timer: null,
  }));

  /** Fetches a section if it is old and was not fetched a moment ago. */
  async function refresh(section) {
    const wait = section.fetchedAt + section.every - performance.now();
    if (!section.old || section.busy || document.hidden || stream?.lost) return;
    if (wait > 0) return later(section, wait);
    if (held(section.element)) return later(section, 1000);
    section.busy = true;
    section.old = false;
    section.fetchedAt = performance.now();
    let trouble = "The service does not answer: reconnecting …";
    try {
      const answer = await ask(section);
      if (!answer.ok) throw new Error((trouble = wrong(answer.status)));
      const text = await answer.text();
      if (text !== section.text) {
        const before = announced(section.element);
        swap(section.element, text);
        announce(announced(section.element).filter((words) => !before.includes(words)));
      }
      section.text = text;
      section.element.dataset.loaded = "yes";
      const link = document.querySelector(`.contents a[href="#${section.element.id}"]`);
      if (link && section.element.id) link.hidden = !section.element.firstElementChild;
      if (section.element.dataset.poll) tell("");
    } catch {
      section.old = true;
      if (section.element.dataset.poll) tell(trouble);
      section.fetchedAt = performance.now() + RETRY_MS;
    } finally {
      section.busy = false;
    }
    refresh(section);
  }

  /** Refreshes a section after `wait` ms, once, however many events ask for it until then. */
  function later(section, wait) {
    section.timer ??= setTimeout(() => {
      section.timer = null;
      refresh(section);
    }, wait);
  }

  /** The answer to a request for a section. An expired session ends the page: it is loaded again, by way of the login. */
  async function ask(section) {
    const answer = await fetch(section.element.dataset.from, { headers: { Accept: "text/html" } });
    if (!answer.redirected && answer.status !== 401) return answer;
    location.reload();
    return new Promise(() => {});
  }

  /** What to say of an answer that is an error. */
  function wrong(status) {
    if (status === 503) return "The cluster does not answer: asking again …";
    return `The service answers with an error (${status}): asking again …`;
  }

  function makeOld(section) {
    section.old = true;
    refresh(section);
  }

  /** Puts `text` into `element`. What a reader has opened, scrolled, zoomed, filled in or focused stays so. */
  function swap(element, text) {
    const fresh = new DOMParser().parseFromString(text, "text/html").body;
    keepCharts(element, fresh);
    const open = new Map([...element.querySelectorAll("details")].map((each, n) => [key(each, n), each.open]));
    fresh.querySelectorAll("details").forEach((each, n) => {
      if (open.has(key(each, n))) each.open = open.get(key(each, n));
    });
    const filled = new Map([...element.querySelectorAll("input[id], select[id]")].map((each) => [each.id, each.value]));
    const scrolled = [...element.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    const outputs = [...element.querySelectorAll(".output")].map((each) => (atEnd(each) ? Infinity : each.scrollTop));
    const focused = element.contains(document.activeElement) ? place(element, document.activeElement) : null;
    const put = () => {
      element.replaceChildren(...fresh.childNodes);
      for (const field of element.querySelectorAll("input[id], select[id]")) {
        const value = filled.get(field.id);
        if (value && (field.tagName !== "SELECT" || [...field.options].some((each) => each.value === value))) field.value = value;
      }
      element.querySelectorAll(".scroll").forEach((each, n) => (each.scrollLeft = scrolled[n] ?? 0));
      element.querySelectorAll(".output").forEach((each, n) => (each.scrollTop = Math.min(outputs[n] ?? Infinity, each.scrollHeight)));
      if (focused) find(element, focused)?.focus({ preventScroll: true });
      if (typeof freshetCharts !== "undefined") freshetCharts.drawNew();
      if (typeof freshetTimelines !== "undefined") freshetTimelines.drawAll(element);
    };
    if (moved(element, fresh)) document.startViewTransition(put);
    else put();
  }

  /** Whether the newest lines of an output are seen: then those that follow are seen too. */
  const atEnd = (output) => output.scrollTop + output.clientHeight >= output.scrollHeight - 4;

  const announced = (element) => [...element.querySelectorAll("[data-announced]")].map((each) => each.textContent.replace(/\s+/g, " ").trim());

  /** Tells a screen reader what is new, such as what has come of a control. */
  function announce(words) {
    const status = document.getElementById("announced");
    if (status && words.length) status.textContent = words.reverse().join(". ");
  }

  /** Whether someone reads a part of a timeline in `element`, or fills in a form there: it stays until they are done. */
  function held(element) {
    if (element.contains(document.activeElement) && document.activeElement.matches("input, select")) return true;
    const figure = element.querySelector("figure.timeline-view");
    if (!figure || typeof freshetTimelines === "undefined") return false;
    const view = freshetTimelines.of(figure);
    return figure.contains(document.activeElement) || view.from > 0 || view.to < view.data.end;
  }

  const key = (details, number) => details.dataset.key ?? number;

  /** Charts that are drawn stay where they are and get the new data. */
  function keepCharts(element, fresh) {
    if (typeof freshetCharts === "undefined") return;
    const title = (figure) => figure.querySelector("h3").textContent;
    const drawn = new Map([...element.querySelectorAll("figure.chart.drawn")].map((each) => [title(each), each]));
    for (const newer of fresh.querySelectorAll("figure.chart")) {
      const kept = drawn.get(title(newer));
      if (!kept) continue;
      const chart = freshetCharts.data(newer);
      const words = newer.querySelector(".words").textContent;
      kept.querySelector("figcaption").replaceWith(newer.querySelector("figcaption"));
      kept.querySelector(".words").textContent = words;
      kept.querySelector(".plot").setAttribute("aria-label", words);
      kept.querySelector("details.values table").replaceWith(newer.querySelector("details.values table"));
      kept.querySelector("script").textContent = newer.querySelector("script").textContent;
      newer.replaceWith(kept);
      requestAnimationFrame(() => freshetCharts.update(kept, chart));
    }
  }

  /** Whether layers are elsewhere than before: then each is led to its new place. */
  function moved(element, fresh) {
    if (!document.startViewTransition || matchMedia("(prefers-reduced-motion: reduce)").matches) return false;
    const rank = (box) => box.closest(".rank")?.querySelector("h4")?.textContent + box.className;
    const where = (root) => new Map([...root.querySelectorAll("[data-layer]:not(.arriving)")].map((box) => [box.dataset.layer, box]));
    const [before, after] = [where(element), where(fresh)];
    let any = false;
    for (const [layer, box] of after) {
      const old = before.get(layer);
      if (!old || rank(old) === rank(box)) continue;
      old.style.viewTransitionName = box.style.viewTransitionName = `layer-${layer}`;
      any = true;
    }
    return any;
  }

  /** The way from `element` down to `inside`, as numbers of children. */
  function place(element, inside) {
    const way = [];
    for (let node = inside; node !== element; node = node.parentElement) way.unshift([...node.parentElement.children].indexOf(node));
    return way;
  }
  const find = (element, way) => way.reduce((node, number) => node?.children[number], element);

  function tell(words) {
    const status = document.querySelector(".connection");
    if (!status || status.textContent === words) return;
    status.textContent = words;
    status.hidden = !words;
  }

  const address = document.querySelector("[data-stream]")?.dataset.stream;
  if (address)
    stream = freshetStream(address, {
      heard: (kind) => sections.filter((section) => section.kinds.has(kind)).forEach(makeOld),
      missed: () => sections.forEach(makeOld),
      tell,
      status: () => ask(sections[0]).then(({ status }) => status, () => 0),
    });
  for (const section of sections) {
    if ("late" in section.element.dataset) makeOld(section);
    const poll = Number(section.element.dataset.poll ?? 0);
    if (poll) {
      section.every = poll;
      setInterval(makeOld, poll, section);
    }
  }
  document.querySelectorAll(".output").forEach((each) => (each.scrollTop = each.scrollHeight));
  document.addEventListener("visibilitychange", () => sections.forEach(refresh));
  const reload = document.querySelector("[data-reload]");
  if (reload) setInterval(() => location.reload(), Number(reload.dataset.reload));
})();
