// Charts over time: where the time to the first token goes, percentiles of one span, and clocks.
import { $, el, svg, time, clock } from './format.js';

const H = 110, LEFT = 52, BOTTOM = 14, KEPT = 360;
let W = 600; // px of a chart; its height is H
const windows = new Map(); // begin in unix ms -> window
let selected = 'ttft', colours = new Map();

export function take(list, seen) {
  for (const [at, w] of windows) if (!w.n) windows.delete(at); // it only told the time
  for (const w of list) windows.set(w.at_ms, w);
  while (windows.size > KEPT) windows.delete(Math.min(...windows.keys()));
  if (seen) draw();
}

const palette = i => 'hsl(' + (i * 137 + 210) % 360 + ' 55% 52%)';

// parts lists the spans that make up the time to the first token with their share of it, the largest first.
function parts(list) {
  const sums = new Map();
  let whole = 0;
  for (const w of list) {
    for (const [name, [n, mean, , , , before]] of Object.entries(w.span_ns)) {
      if (name === 'ttft') whole += n * mean;
      else if (name !== 'e2e' && before > 0) sums.set(name, (sums.get(name) || 0) + before * mean);
    }
  }
  return [...sums].map(([name, sum]) => ({ name, share: whole ? sum / whole : 0 })).sort((a, b) => b.share - a.share);
}

function draw() {
  const list = [...windows.values()].sort((a, b) => a.at_ms - b.at_ms);
  if (!list.length) return;
  W = Math.max(200, $('stack').clientWidth);
  const all = parts(list), newest = list[list.length - 1], n = list.reduce((s, w) => s + (w.at_ms > newest.at_ms - 60e3 ? w.n : 0), 0);
  all.forEach(p => { if (!colours.has(p.name)) colours.set(p.name, palette(colours.size)); });
  $('rate').textContent = (n / (50 + newest.ms / 1e3)).toFixed(1) + ' requests/s in the last minute';
  table(all, list);
  stack(list, all.slice(0, 8));
  quantiles(list);
}

function table(all, list) {
  const last = [...list].reverse(), number = name => last.find(w => w.span_ns[name])?.span_ns[name];
  const named = [{ name: 'ttft' }, ...all, { name: 'e2e' }], body = $('spans').tBodies[0];
  for (const w of list) for (const name of Object.keys(w.span_ns)) if (!named.some(p => p.name === name)) named.push({ name });
  body.replaceChildren(...named.filter(p => number(p.name)).map(p => {
    const tr = el('tr'), cell = el('td'), q = number(p.name), dot = el('i'), b = el('span', { ttft: 'time to first token', e2e: 'whole request' }[p.name] || p.name);
    dot.style.background = p.share === undefined ? 'transparent' : colours.get(p.name);
    cell.append(dot, b);
    tr.append(cell, el('td', p.share === undefined ? '' : (100 * p.share).toFixed(1) + ' %', 'n'), el('td', time(q[2]), 'n'), el('td', time(q[3]), 'n'), el('td', time(q[4]), 'n'));
    tr.tabIndex = 0;
    tr.setAttribute('aria-selected', p.name === selected);
    tr.onclick = () => { selected = p.name; draw(); };
    tr.onkeydown = e => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); tr.click(); [...body.rows].find(r => r.getAttribute('aria-selected') === 'true')?.focus(); } };
    return tr;
  }));
}

// axis gives x for a time, and the frame of a chart.
function frame(list, label, top, title) {
  const from = Math.min(list[0].at_ms, list[list.length - 1].at_ms - 110e3), to = list[list.length - 1].at_ms + 10e3;
  const root = svg('svg', { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: 'xMinYMin meet', role: 'img', 'aria-label': title });
  const text = (x, y, s, anchor) => { const t = svg('text', { x, y, 'text-anchor': anchor }); t.textContent = s; root.append(t); };
  text(LEFT - 4, 10, time(top), 'end');
  text(LEFT - 4, H - BOTTOM, label, 'end');
  text(LEFT, H - 2, clock(from), 'start');
  text(W, H - 2, clock(to), 'end');
  root.append(svg('path', { d: `M${LEFT} 0V${H - BOTTOM}H${W}`, fill: 'none', stroke: 'var(--line)' }));
  return { root, x: ms => LEFT + (W - LEFT) * (ms - from) / (to - from) };
}

function stack(list, top) {
  const mean = (w, name) => { const s = w.span_ns[name], t = w.span_ns.ttft; return s && t ? s[1] * s[5] / t[0] : 0; };
  const high = Math.max(1, ...list.map(w => w.span_ns.ttft?.[1] || 0)), { root, x } = frame(list, '0', high, 'mean time to first token by span');
  for (const w of list) {
    if (!w.span_ns.ttft) continue;
    let y = H - BOTTOM, left = x(w.at_ms), width = Math.max(1, x(w.at_ms + 10e3) - left - .7), rest = w.span_ns.ttft[1];
    const put = (v, fill, name) => {
      const h = Math.max(0, v) * (H - BOTTOM) / high, r = svg('rect', { x: left, y: y - h, width, height: h, fill }), t = svg('title', {});
      t.textContent = name + ': ' + time(v) + ' of ' + time(w.span_ns.ttft[1]) + ', ' + w.span_ns.ttft[0] + ' requests from ' + clock(w.at_ms);
      r.append(t);
      root.append(r);
      y -= h;
      rest -= v;
    };
    for (const p of top) put(mean(w, p.name), colours.get(p.name), p.name);
    if (rest > 0) put(rest, 'var(--k3)', 'others');
  }
  $('stack').replaceChildren(root);
}

// apart moves labels, the highest first, so that each can be read.
function apart(ys) {
  const each = 10, low = H - BOTTOM - 2;
  let above = -1;
  ys = ys.map(y => above = Math.max(y, above + each));
  let below = low + each;
  return ys.reverse().map(y => below = Math.min(y, below - each)).reverse();
}

function quantiles(list) {
  const have = list.filter(w => w.span_ns[selected]);
  if (!have.length) return $('quantiles').replaceChildren();
  const values = have.flatMap(w => w.span_ns[selected].slice(2, 5)), high = Math.max(1, ...values), low = Math.max(1, Math.min(high / 10, ...values.filter(v => v > 0)));
  const { root, x } = frame(list, time(low), high, 'percentiles of ' + selected), y = v => (H - BOTTOM) * (1 - Math.max(0, Math.log(Math.max(v, low) / low)) / Math.log(high / low));
  const last = have[have.length - 1], labels = apart([4, 3, 2].map(i => y(last.span_ns[selected][i]) - 2));
  [[2, '.45', 'p50'], [3, '.7', 'p90'], [4, '1', 'p99']].forEach(([i, opacity, name]) => {
    const at = w => x(w.at_ms + 5e3).toFixed(1) + ' ' + y(w.span_ns[selected][i]).toFixed(1);
    root.append(svg('path', { d: 'M' + have.map(at).join('L') + (have.length === 1 ? 'h6' : ''), fill: 'none', stroke: 'var(--k0)', 'stroke-width': 1.6, 'stroke-opacity': opacity, 'vector-effect': 'non-scaling-stroke' }));
    const right = x(last.at_ms + 5e3) + 4, t = svg('text', { x: Math.min(right, W - 22), y: labels[4 - i] });
    t.textContent = name;
    root.append(t);
  });
  const head = svg('text', { x: LEFT + 6, y: 10 });
  head.textContent = { ttft: 'time to first token', e2e: 'whole request' }[selected] || selected;
  root.append(head);
  $('quantiles').replaceChildren(root);
}

// spark draws a node's clock: how the offset moved against its median, as a line, within its bound, as a band.
export function spark(samples) {
  const known = samples.filter(s => s[1] != null && s[2] != null);
  if (known.length < 2) return el('span', '', 'dim');
  const w = 76, h = 20, middle = known.map(s => s[1]).sort((a, b) => a - b)[known.length >> 1];
  const reach = Math.max(...known.map(s => Math.abs(s[1] - middle) + s[2]), 1), first = known[0][0], span = Math.max(known[known.length - 1][0] - first, 60e3);
  const x = s => (w * (s[0] - first) / span).toFixed(1), y = v => (h / 2 - (h / 2 - 1) * (v - middle) / reach).toFixed(1);
  const band = 'M' + known.map(s => x(s) + ' ' + y(s[1] + s[2])).join('L') + 'L' + [...known].reverse().map(s => x(s) + ' ' + y(s[1] - s[2])).join('L') + 'Z';
  const root = svg('svg', { width: w, height: h, viewBox: `0 0 ${w} ${h}`, role: 'img', 'aria-label': 'clock offset within ± ' + time(reach) });
  const t = svg('title', {});
  t.textContent = 'offset around ' + time(middle) + '; the height is ± ' + time(reach);
  root.append(t, svg('path', { d: band, fill: 'var(--k5)', 'fill-opacity': .25 }), svg('path', { d: 'M' + known.map(s => x(s) + ' ' + y(s[1])).join('L'), fill: 'none', stroke: 'var(--k5)' }));
  return root;
}
