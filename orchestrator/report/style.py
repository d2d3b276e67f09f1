"""The stylesheet of `report.html`: light, dark, desk, phone, paper. A string, so no data file is packaged."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f6f8; --card: #ffffff; --ink: #17202a; --soft: #52606d; --line: #dfe4ea; --grid: #e8ecf0;
  --s0: #1d5fd1; --s1: #c2570c; --accent: #0f766e;
  --b1: #1d5fd1; --b2: #7c3aed; --b3: #d39b00; --b4: #0b8a55;
  --good: #0b6b45; --warn: #8a4b00; --bad: #a8201a;
  --good-back: #dff5ea; --warn-back: #fff3dc; --bad-back: #fde8e6;
  --code: #f7f9fb;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --card: #151b23; --ink: #e8edf3; --soft: #9aa7b5; --line: #2a3440; --grid: #222b36;
    --s0: #79aaff; --s1: #f4a35c; --accent: #5ccfbf;
    --b1: #79aaff; --b2: #b794f6; --b3: #f3c275; --b4: #7fdcb0;
    --good: #7fdcb0; --warn: #f3c275; --bad: #ff9a92;
    --good-back: #10301f; --warn-back: #33260d; --bad-back: #3a1715;
    --code: #10161d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 1160px; margin: 0 auto; padding: 36px 24px 48px; }
h1 { margin: 0; font-size: 32px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 {
  display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 10px;
  margin: 36px 0 12px; font-size: 18px; letter-spacing: -.01em;
}
h2 small { font-size: 13px; font-weight: 400; letter-spacing: 0; color: var(--soft); }
h3 { margin: 0; font-size: 14px; }
p { margin: 0; }
code, pre, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
.eyebrow {
  color: var(--accent); font-size: 12px; font-weight: 650; letter-spacing: .1em; text-transform: uppercase;
}
.title { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 14px; margin: 4px 0 8px; }
.lede { color: var(--soft); }
.pill { padding: 2px 11px; border-radius: 99px; font-size: 13px; font-weight: 600; }
.tag {
  margin-left: 8px; padding: 1px 7px; border-radius: 4px; font-size: 11px; font-weight: 600;
  color: var(--warn); background: var(--warn-back);
}
h2 .tag { margin-left: 0; letter-spacing: 0; }
.good { color: var(--good); background: var(--good-back); }
.warn { color: var(--warn); background: var(--warn-back); }
.bad { color: var(--bad); background: var(--bad-back); }
.notes { margin: 20px 0 0; padding: 0; list-style: none; display: grid; gap: 8px; }
.notes li { padding: 10px 14px; border-radius: 8px; overflow-wrap: anywhere; }
.notes b { margin-right: 6px; }

.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(146px, 1fr)); gap: 12px; margin: 24px 0 0;
}
.tiles > div, .card {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
}
.tiles > div { display: flex; flex-direction: column; padding: 13px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; }
.tiles .figure {
  font-size: 25px; font-weight: 620; letter-spacing: -.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums;
}
.tiles .figure small {
  margin-left: 4px; font-size: 14px; font-weight: 450; color: var(--soft); letter-spacing: 0;
}
.tiles .detail { color: var(--soft); font-size: 12.5px; }

.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
.charts figure { margin: 0; padding: 14px 14px 8px; }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 16px; margin: 0 4px 6px; }
.legend { margin-left: auto; display: flex; gap: 14px; font-size: 12.5px; color: var(--soft); }
.legend span::before {
  content: ""; display: inline-block; width: 14px; height: 3px; margin-right: 6px; border-radius: 2px;
  vertical-align: middle; background: var(--s0);
}
.legend .s1::before { background: var(--s1); }
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart .band { fill-opacity: .13; }
.chart .b0 { fill: var(--soft); }
.chart .b1 { fill: var(--b1); }
.chart .b2 { fill: var(--b2); }
.chart .b3 { fill: var(--b3); }
.chart .b4 { fill: var(--b4); }
.bands { display: flex; flex-wrap: wrap; gap: 2px 14px; width: 100%; font-size: 12.5px; color: var(--soft); }
.bands span::before {
  content: ""; display: inline-block; width: 12px; height: 12px; margin-right: 5px; border-radius: 2px;
  vertical-align: -1px; opacity: .4; background: var(--soft);
}
.bands .b1::before { background: var(--b1); }
.bands .b2::before { background: var(--b2); }
.bands .b3::before { background: var(--b3); }
.bands .b4::before { background: var(--b4); }
.chart .bar { fill: var(--s0); }
.chart .grid { stroke: var(--grid); }
.chart .axis, .chart .tick { stroke: var(--soft); }
.chart polyline { fill: none; stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round; }
.chart .s0 { stroke: var(--s0); fill: var(--s0); }
.chart .s1 { stroke: var(--s1); fill: var(--s1); }
.chart polygon { stroke: none; fill-opacity: .22; }
.chart circle { stroke: none; }
.chart .above { fill: var(--warn); }
.chart .mark line { stroke: var(--bad); stroke-dasharray: 3 3; }
.chart .readouts g > * { visibility: hidden; pointer-events: none; }
.chart .readouts rect { visibility: visible; fill: none; pointer-events: all; }
.chart .readouts line { stroke: var(--soft); stroke-dasharray: 2 2; }
.chart .readouts circle { fill: var(--ink); }
.chart .readouts text { fill: var(--ink); font-weight: 600; }
.chart .readouts g:hover > * { visibility: visible; }

.scroll { overflow-x: auto; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--s0); outline-offset: 2px; }
.picture { padding: 12px 14px; }
.picture svg { display: block; min-width: 100%; height: auto; }
.picture .timeline text { fill: var(--soft); }
.picture .timeline .title { fill: var(--ink); }
.picture .timeline .token { fill: #14181d; }
.picture .heat text { fill: var(--soft); }
.picture .heat .title { fill: var(--ink); }
.picture .heat .weak { fill: #14181d; }
.picture .heat .strong { fill: #ffffff; }
.picture .heat { min-width: 0; }
.after { margin-top: 12px; }
.caption { margin-top: 8px; color: var(--soft); font-size: 13px; }
.columns {
  display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; align-items: start;
  margin-top: 36px;
}
.columns > section > h2 { margin-top: 0; }
.facts { margin: 0; padding: 6px 18px; }
.facts > div { display: grid; grid-template-columns: 112px minmax(0, 1fr); gap: 12px; padding: 8px 0; }
.facts > div + div { border-top: 1px solid var(--line); }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 14px; text-align: left; vertical-align: top; }
th { color: var(--soft); font-size: 13px; font-weight: 500; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; }
.mono { font-size: 13px; }
td.text { overflow-wrap: anywhere; min-width: 160px; font-size: 13px; }
td .pill { white-space: nowrap; }
pre { margin: 0; padding: 16px 18px; font-size: 13px; line-height: 1.55; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
.sample mark {
  padding: 0 2px; border-radius: 3px; color: inherit;
  background: color-mix(in srgb, var(--s0) 20%, transparent);
}
details { margin-top: 36px; }
summary { padding: 12px 18px; font-weight: 600; cursor: pointer; }
details pre {
  border-top: 1px solid var(--line); border-radius: 0 0 12px 12px; background: var(--code); overflow-x: auto;
}
footer { margin-top: 28px; color: var(--soft); font-size: 13px; }

@media (max-width: 1000px) {
  .columns { grid-template-columns: minmax(0, 1fr); }
  .columns > section + section { margin-top: 24px; }
  .chart text { font-size: 14px; }
}
@media (max-width: 760px) {
  main { padding: 22px 14px 32px; }
  h1 { font-size: 26px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; }
  .tiles .figure { font-size: 21px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .chart text { font-size: 16px; }
  .facts > div { grid-template-columns: 88px minmax(0, 1fr); }
}
@media print {
  body { background: none; }
  .card, .tiles > div { break-inside: avoid; }
}
"""
