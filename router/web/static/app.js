// The page: one stream brings rows, nodes, clocks and percentiles; a chosen request is fetched whole.
import { $, el, time } from './format.js';
import { follow, get } from './stream.js';
import * as list from './list.js';
import * as charts from './charts.js';
import * as detail from './detail.js';
import * as kv from './kv.js';

const KEPT = 600; // clock samples a node
let clocks = {}, paused = false, seen = 0, nodeRows = new Map();

function cluster(c) {
  $('router').textContent = c.router + ', ' + c.schedule;
  $('nodecount').textContent = c.nodes.length ? c.nodes.length + ', ' + c.nodes.filter(n => n.state === 'ready').length + ' ready' : 'none has joined';
  const now = Date.now(), names = new Set(c.nodes.map(n => n.name));
  for (const name of nodeRows.keys()) if (!names.has(name)) { nodeRows.get(name).remove(); nodeRows.delete(name); }
  for (const n of c.nodes) {
    const h = clocks[n.name] ||= [];
    h.push([now, n.clock.offset_ns, n.clock.bound_ns]);
    if (h.length > KEPT) h.shift();
    const rows = el('tbody'), old = nodeRows.get(n.name);
    rows.append(node(n, h), ...(n.ranks || []).map(rank));
    if (old) old.replaceWith(rows); else $('nodes').append(rows);
    nodeRows.set(n.name, rows);
  }
}

function blocks(l) {
  const kv = el('td');
  if (l && l.kv_max_blocks > 0) {
    const m = el('meter');
    m.max = l.kv_max_blocks;
    m.value = l.kv_used_blocks;
    m.setAttribute('aria-label', 'KV blocks in use');
    kv.append(m, ' ' + l.kv_used_blocks + ' / ' + l.kv_max_blocks);
  } else kv.textContent = '–';
  return kv;
}

// rank is the row of a data-parallel rank, under its node's.
function rank(r) {
  const tr = el('tr', undefined, 'rank');
  tr.append(el('td', 'rank ' + r.dp_rank), el('td'), el('td'), el('td', r.running, 'n'), el('td', r.waiting, 'n'), blocks(r), el('td'), el('td'), el('td'));
  return tr;
}

function node(n, history) {
  const l = n.load, k = n.clock, tr = el('tr'), name = el('td', n.name), picture = el('td'), ranks = n.ranks?.length || 1;
  if (ranks > 1 || n.stages > 1) name.append(el('small', ' ' + [ranks > 1 && ranks + ' ranks', n.stages > 1 && n.stages + ' stages'].filter(Boolean).join(' × ')));
  picture.append(charts.spark(history));
  tr.append(name, el('td', n.role, 'dim'), el('td', n.state, n.state === 'ready' ? 'good' : 'bad'), el('td', l ? l.running : '–', 'n'),
    el('td', l ? l.waiting : '–', 'n'), blocks(l), el('td', l ? time(l.age_ns) : '–', 'n'),
    el('td', k.offset_ns == null ? k.state : time(k.offset_ns) + ' ± ' + time(k.bound_ns) + ', ' + k.state), picture);
  tr.title = n.url + (n.model ? ', ' + n.model : '') + (n.pid ? ', process ' + n.pid : '');
  return tr;
}

const take = {
  cluster: c => { if (!paused) cluster(c); },
  clocks: c => { clocks = c; },
  kv: k => { if (!paused) kv.take(k); },
  windows: w => charts.take(w, !paused), // each comes once: those of a pause are drawn after it
  lost: () => list.lost(),
  rows: rows => {
    seen = rows[rows.length - 1].seq;
    if (!paused) list.add(rows); else held = held.concat(rows).slice(-list.KEEP);
    if (!location.hash && !paused) requestAnimationFrame(first);
  },
};
let held = [];

function first() { // something to look at before a request is chosen
  const r = list.newest();
  if (r && !location.hash) open(r.id);
}

const open = id => { history.replaceState(null, '', '#' + encodeURIComponent(id)); chosen(); };

let loading = null;
async function chosen() { // the part of the address after # names a request
  const id = decodeURIComponent(location.hash.slice(1));
  if (!id) return;
  list.choose(id);
  loading?.abort();
  loading = new AbortController();
  try {
    const r = await get('timelines/' + encodeURIComponent(id), loading.signal);
    if (!r.ok) return detail.missing(id);
    detail.show(await r.json());
  } catch (e) {
    if (e.name !== 'AbortError') detail.missing(id);
  }
}

$('pause').onclick = () => {
  paused = !paused;
  $('pause').setAttribute('aria-pressed', paused);
  if (!paused && held.length) { list.add(held); held = []; }
};
document.addEventListener('keydown', e => {
  if (e.key === '/' && document.activeElement !== $('filter')) { e.preventDefault(); $('filter').focus(); }
});
addEventListener('hashchange', chosen);

let session = null;
function start() {
  follow(() => 'live?after=' + seen, (name, data) => {
    if (name === 'cluster') { // another router at this address: its rows begin anew, also those that its files kept
      const other = session !== null && session !== data.clock_id;
      session = data.clock_id;
      if (other) { seen = 0; held = []; list.lost(); return true; }
    }
    take[name]?.(data);
  }, (text, ok) => {
    $('live').textContent = text;
    $('live').className = ok ? 'good' : 'bad';
  });
  chosen();
}
list.init(open);
detail.init();
start();
