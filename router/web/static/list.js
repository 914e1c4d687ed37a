// The list of requests: ten thousand rows are held, and only those in sight are drawn.
import { $, el, time, duration } from './format.js';

export const KEEP = 10000; // rows
const ROW = 26, COLUMNS = 48, FROM = 5, DECADES = 5; // the histogram goes from 10^5 ns = 0.1 ms to 10 s
const byID = new Map(); // request id -> row; in the order of age
let shown = [], drawn = new Map(), bucket = null, chosen = null, open = () => {}, stale = false;

export function init(onOpen) {
  open = onOpen;
  $('list').addEventListener('scroll', draw, { passive: true });
  new ResizeObserver(draw).observe($('list'));
  $('filter').oninput = refresh;
  $('clear').onclick = () => { bucket = null; refresh(); };
  $('list').onkeydown = e => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity }[e.key];
    if (step === undefined || !shown.length) return;
    e.preventDefault();
    const at = shown.findIndex(r => r.id === chosen);
    const to = Math.max(0, Math.min(shown.length - 1, at < 0 ? 0 : at + step));
    reveal(to);
    open(shown[to].id);
  };
}

export function choose(id) {
  chosen = id;
  for (const [i, e] of drawn) e.setAttribute('aria-selected', i === id);
  $('list').setAttribute('aria-activedescendant', drawn.has(id) ? 'r-' + id : '');
}

export const count = () => byID.size;
export const newest = () => { let last = null; for (const r of byID.values()) last = r; return last; };

export function add(rows) {
  for (const r of rows) {
    if (!byID.delete(r.id)) { // an amendment takes the place of what it amends
      while (byID.size >= KEEP) byID.delete(byID.keys().next().value);
    }
    byID.set(r.id, prepare(r));
  }
  soon();
}

export function lost() {
  byID.clear();
  soon();
}

function soon() {
  if (stale) return;
  stale = true;
  requestAnimationFrame(() => { stale = false; refresh(); });
}

function prepare(r) {
  r.words = [r.id, r.client_id || '', r.outcome, r.style, r.model, ...r.nodes].join(' ').toLowerCase();
  return r;
}

// compile makes one test of a filter's words.
function compile(text) {
  const tests = text.trim().toLowerCase().split(/\s+/).filter(Boolean).map(word => {
    const limit = /^(ttft|e2e)([<>])(.+)$/.exec(word);
    if (limit && !isNaN(duration(limit[3]))) {
      const ns = duration(limit[3]), field = limit[1] + '_ns';
      return r => r[field] != null && (limit[2] === '<' ? r[field] < ns : r[field] > ns);
    }
    const [name, ...rest] = word.split(':'), value = rest.join(':');
    switch (rest.length ? name : '') {
      case 'node': return r => r.nodes.some(n => n.toLowerCase() === value);
      case 'outcome': return r => r.outcome.toLowerCase().startsWith(value);
      case 'span': return r => (r.dominant || '').startsWith(value);
      case 'model': return r => r.model.toLowerCase().includes(value);
      case 'style': return r => r.style.startsWith(value);
      case 'complete': return r => r.complete === !value.startsWith('n');
      case 'odd': return r => (r.odd > 0) === !value.startsWith('n');
    }
    return r => r.words.includes(word);
  });
  return r => tests.every(t => t(r));
}

const column = ns => Math.max(0, Math.min(COLUMNS - 1, Math.floor((Math.log10(ns) - FROM) * COLUMNS / DECADES)));
const edge = n => 10 ** (FROM + n * DECADES / COLUMNS);

function refresh() {
  const want = compile($('filter').value), counts = new Array(COLUMNS).fill(0), list = $('list');
  const before = shown[Math.floor(list.scrollTop / ROW)], within = list.scrollTop % ROW, top = list.scrollTop < ROW;
  shown = [];
  for (const r of byID.values()) {
    if (!want(r)) continue;
    const c = r.ttft_ns > 0 ? column(r.ttft_ns) : null;
    if (c !== null) counts[c]++;
    if (bucket === null || c === bucket) shown.push(r);
  }
  shown.reverse();
  histogram(counts);
  $('none').hidden = byID.size > 0;
  $('clear').hidden = bucket === null;
  $('shown').textContent = byID.size ? (shown.length < byID.size ? shown.length + ' of ' : '') + byID.size : '';
  $('space').style.height = shown.length * ROW + 'px';
  if (!top && before) { // what is being read stays where it is
    const at = shown.indexOf(before);
    if (at >= 0) list.scrollTop = at * ROW + within;
  }
  draw();
}

function draw() {
  const list = $('list'), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
  const part = shown.slice(first, first + Math.ceil(list.clientHeight / ROW) + 8), keep = new Map();
  part.forEach((r, i) => {
    let e = drawn.get(r.id);
    if (!e || e.seq !== r.seq) {
      if (e) e.remove();
      e = row(r);
    }
    e.style.top = (first + i) * ROW + 'px';
    e.setAttribute('aria-posinset', first + i + 1);
    e.setAttribute('aria-setsize', shown.length);
    e.setAttribute('aria-selected', r.id === chosen);
    if (!e.isConnected) list.append(e);
    keep.set(r.id, e);
  });
  for (const [id, e] of drawn) if (keep.get(id) !== e) e.remove();
  drawn = keep;
}

function row(r) {
  const e = el('div', undefined, 'row'), bar = el('span', undefined, 'bar'), fine = r.outcome === 'finished' && r.complete && !r.odd;
  e.seq = r.seq;
  e.id = 'r-' + r.id;
  e.setAttribute('role', 'option');
  for (let i = 0; i < r.bar.length; i += 3) {
    const part = el('i', undefined, 'k' + r.bar[i]);
    part.style.left = r.bar[i + 1] / 10 + '%';
    part.style.width = r.bar[i + 2] / 10 + '%';
    bar.append(part);
  }
  e.append(el('span', r.client_id || r.id), el('span', r.outcome + (r.complete ? '' : ', parts missing') + (r.odd ? ' !' : ''), fine ? 'dim' : 'bad'),
    el('span', time(r.ttft_ns), 'n'), el('span', time(r.e2e_ns), 'n'), bar);
  e.title = (r.wall_ns ? new Date(r.wall_ns / 1e6).toISOString() + ', ' : '') + r.nodes.join(' + ') + ', ' + (r.prompt ?? '?') + ' → ' + r.output + ' tokens' + (r.dominant ? ', longest: ' + r.dominant : '');
  e.onclick = () => { $('list').focus({ preventScroll: true }); open(r.id); };
  return e;
}

function reveal(i) {
  const list = $('list'), top = i * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  draw();
}

function histogram(counts) {
  const box = $('histogram'), top = Math.max(1, ...counts);
  while (box.children.length < COLUMNS) {
    const b = el('button'), n = box.children.length;
    b.append(el('i'));
    b.onclick = () => { bucket = bucket === n ? null : n; refresh(); };
    box.append(b);
  }
  counts.forEach((n, i) => {
    // the first and the last column take what lies before and behind them, too
    const from = i > 0 ? ' after ' + time(edge(i)) : '', to = i < COLUMNS - 1 ? ' within ' + time(edge(i + 1)) : '';
    const b = box.children[i], text = n + ' with a first token' + from + (from && to ? ',' : '') + to;
    b.firstChild.style.height = n ? Math.max(4, 100 * n / top) + '%' : '0';
    if (b.title !== text) {
      b.title = text;
      b.setAttribute('aria-label', text);
    }
    b.setAttribute('aria-pressed', bucket === i);
    b.disabled = n === 0 && bucket !== i;
  });
}
