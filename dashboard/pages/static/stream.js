// Follows the events of a job, or of all jobs, while someone can see the page. A hidden page keeps no stream: over HTTP/1.1 a browser has six
// connections to one service, and a stream takes one of them for as long as it lasts. Knows nothing of sections.
"use strict";

/**
 * Opens the stream at `address`, and again whenever it breaks or a hidden page is shown.
 *
 * `page.heard(kind)` takes each event, `page.missed()` says that events have passed unseen, `page.tell(words)` takes
 * what to say of the connection, and `page.status()` resolves to the HTTP status of a section, 0 without an answer.
 */
function freshetStream(address, page) {
  const FIRST_MS = 1000;
  const LONGEST_MS = 30000;
  const RESUME_MS = 5000;
  const url = new URL(address, location.href);
  const following = { lost: false };
  let stream = null;
  let timer = null;
  let delay = FIRST_MS;
  let over = false; // the job has ended, and the page has been told

  function open() {
    clearTimeout(timer);
    stream?.close();
    const opened = (stream = new EventSource(url));
    opened.onopen = () => {
      const missed = following.lost;
      following.lost = false;
      delay = FIRST_MS;
      page.tell("");
      if (missed) page.missed();
    };
    opened.onerror = () => {
      following.lost = true;
      page.tell("The connection is lost: reconnecting …");
      // The browser reconnects by itself, but not to a service that refuses the stream.
      if (opened.readyState === EventSource.CLOSED) refused(opened);
    };
    opened.addEventListener("record", (event) => {
      url.searchParams.set("after", event.lastEventId.split("-")[1]);
      if (over) page.missed();
      else page.heard(/"event": ?"(\w+)"/.exec(event.data)?.[1]);
      over = false;
    });
    for (const kind of ["summary", "gone", "trouble"]) opened.addEventListener(kind, () => page.heard(kind));
    for (const kind of ["missed", "start"]) opened.addEventListener(kind, () => page.missed());
    opened.addEventListener("end", () => {
      opened.close();
      if (!over) page.missed();
      over = true;
      timer = setTimeout(open, RESUME_MS); // someone may resume it
    });
  }

  /** Asks why `opened` was refused, as a stream does not tell, and opens another one unless the job is gone. */
  async function refused(opened) {
    const status = await page.status();
    if (stream !== opened) return;
    if (status === 404) {
      document.removeEventListener("visibilitychange", shownOrHidden);
      return page.tell("The service does not know this job any more. This is the last that the page has seen of it.");
    }
    timer = setTimeout(open, delay);
    delay = Math.min(2 * delay, LONGEST_MS);
  }

  function shownOrHidden() {
    if (!document.hidden) return open();
    clearTimeout(timer);
    stream?.close();
    stream = null;
    following.lost = true;
  }

  document.addEventListener("visibilitychange", shownOrHidden);
  shownOrHidden();
  return following;
}
