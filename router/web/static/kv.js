// What nodes keep of KV: blocks of each pool on each tier, where prompts found theirs, and what moved, over the last minute.
import { $, el, size } from './format.js';

const OVER = 60e3; // ms that counts are taken over
const history = new Map(); // node -> [[ms, sums]…]

const plus = (a, b) => { // adds numbers, and what holds them, of two answers of one shape; null: not known, or not there
  if (a == null || b == null) return a ?? b;
  if (typeof a === 'number') return a + b;
  return Object.fromEntries(Object.keys(a).map(k => [k, plus(a[k], b[k])]));
};
const minus = (a, b) => typeof a === 'number' ? a - (b ?? 0) : a && Object.fromEntries(Object.keys(a).map(k => [k, minus(a[k], b?.[k])]));

// parts draws shares of a whole side by side: [amount, class, name]…
export function parts(list, unit) {
  const box = el('span', undefined, 'parts'), whole = list.reduce((s, [n]) => s + n, 0);
  const text = list.filter(([n]) => n > 0).map(([n, , name]) => n + ' ' + name).join(', ');
  box.setAttribute('role', 'img');
  box.setAttribute('aria-label', (text || 'none') + ' ' + unit);
  box.title = text + ' ' + unit;
  for (const [n, cls] of list) {
    if (!(n > 0)) continue;
    const i = el('i', undefined, cls);
    i.style.width = 100 * n / whole + '%';
    box.append(i);
  }
  return box;
}

function tier(t) {
  const td = el('td');
  if (!t) { td.textContent = '–'; return td; }
  const held = t.evictable_blocks == null ? t.used_blocks : t.used_blocks - t.evictable_blocks;
  td.append(parts([[held, 'k0', t.evictable_blocks == null ? 'kept' : 'needed'], [t.evictable_blocks || 0, 'k5', 'evictable'], [t.max_blocks - t.used_blocks, 'free', 'free']], 'blocks'), ' ' + t.used_blocks + ' / ' + t.max_blocks);
  return td;
}

// counts are the numbers of all ranks that only rise.
const counts = ({ prompt_tokens, hit_tokens, full_blocks, partial_blocks, missed_blocks, moved }) => ({ prompt_tokens, hit_tokens, full_blocks, partial_blocks, missed_blocks, moved });

function recent(name, now, sums) {
  let h = history.get(name) || [];
  if (h.length && sums.prompt_tokens < h[h.length - 1][1].prompt_tokens) h = []; // another process
  h.push([now, sums]);
  while (h.length > 2 && now - h[1][0] >= OVER) h.shift();
  history.set(name, h);
  return { ms: now - h[0][0], d: minus(sums, h[0][1]) };
}

function rows(name, answer, now) {
  const ranks = answer.ranks, one = ranks.reduce((a, r) => plus(a, counts(r)), null), { ms, d } = recent(name, now, one);
  const groups = ranks[0].groups ? ranks.map(r => r.groups || []).reduce((a, b) => a.map((g, i) => ({ ...plus(g, b[i] || null), window_tokens: g.window_tokens, block_bytes: g.block_bytes }))) : [null];
  const disk = ranks.map(r => r.disk).reduce((a, b) => plus(a, b));
  return groups.map((g, i) => {
    const tr = el('tr'), first = i === 0, hits = el('td'), moved = el('td', undefined, 'dim');
    if (first) {
      const idle = d.prompt_tokens === 0, of = idle ? one : d, { device, host, disk } = of.hit_tokens, cached = device + (host || 0) + (disk || 0), m = d.moved;
      if (of.prompt_tokens > 0) {
        hits.append(parts([[device, 'k0', 'device'], [host || 0, 'k1', 'host'], [disk || 0, 'k2', 'disk'], [Math.max(0, of.prompt_tokens - cached), 'k3', 'computed']], 'prompt tokens'),
          ' ' + Math.round(100 * cached / of.prompt_tokens) + ' % of ' + of.prompt_tokens, el('small', ' ' + of.full_blocks + ' / ' + of.partial_blocks + ' / ' + of.missed_blocks + (idle ? ', since its start' : '')));
      } else hits.textContent = '–';
      moved.textContent = [[m.onboard_bytes, n => size(n) + ' from host'], [m.offload_bytes, n => size(n) + ' to host'], [m.host_dropped_blocks, n => n + ' dropped by host'], [m.disk_loaded_blocks, n => n + ' from disk'],
        [m.disk_stored_blocks, n => n + ' to disk'], [m.disk_dropped_blocks, n => n + ' dropped by disk'], [m.disk_broken_blocks, n => n + ' broken'], [m.copied_bytes, n => size(n) + ' copied']]
        .filter(([n]) => n > 0).map(([n, text]) => text(n)).join(', ') || '–';
      if (m.host_dropped_blocks > 0 || m.disk_broken_blocks > 0) moved.className = 'bad';
      tr.title = 'counts of the last ' + Math.round(ms / 1e3) + ' s';
    }
    tr.append(el('td', first ? name : ''), el('td', !g ? 'not told yet' : g.window_tokens == null ? 'all tokens' : 'last ' + g.window_tokens, 'dim'), tier(g), tier(g?.host), first ? tier(disk) : el('td'), hits, moved);
    return tr;
  });
}

// known are the rows of a node; none where its answer is not what we know, as another version's: the page goes on without.
function known(name, answer, now) {
  try {
    return rows(name, answer, now);
  } catch {
    return [];
  }
}

export function take(nodes) {
  const now = Date.now(), names = Object.keys(nodes).sort(), all = names.filter(n => nodes[n]?.ranks?.length);
  for (const name of history.keys()) if (!nodes[name]) history.delete(name);
  $('kv').tBodies[0].replaceChildren(...all.flatMap(name => known(name, nodes[name], now)));
  $('kvcount').textContent = all.length ? '' : names.length ? 'the nodes count nothing: --iter-stats-interval is 0' : 'no node has told';
}
