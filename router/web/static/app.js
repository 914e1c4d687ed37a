'use strict';
// Text of clients and nodes only ever becomes text: no markup is made from it.
const $ = id => document.getElementById(id);
const el = (tag, text, cls) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (cls) e.className = cls; return e; };
const time = ns => {
  if (ns == null) return '–';
  const a = Math.abs(ns), three = v => v.toFixed(Math.abs(v) < 9.995 ? 2 : Math.abs(v) < 99.95 ? 1 : 0);
  return a < 1e3 ? ns + ' ns' : a < 999.5e3 ? three(ns / 1e3) + ' µs' : a < 999.5e6 ? three(ns / 1e6) + ' ms' : three(ns / 1e9) + ' s';
};
const size = n => n < 1024 ? n + ' B' : n < 1048576 ? (n / 1024).toFixed(1) + ' KiB' : (n / 1048576).toFixed(1) + ' MiB';
const LIMIT = 100, COLUMNS = 40;
let roles = {}, lines = new Map(), rows = new Map(), chosen = null, whole = false, bucket = null, paused = false;

function kind(s) { // colour of a span: whose work it is
  if (s.name === 'decode') return 'decode';
  if (s.name.startsWith('kv_')) return 'kv';
  if (s.node.includes('>')) return 'net';
  return roles[s.node] || 'router';
}

async function json(url) {
  const r = await fetch(url);
  if (!r.ok) throw new Error(url + ': ' + r.status);
  return r.json();
}

async function cluster() {
  const c = await json('cluster');
  $('router').textContent = c.router + ', ' + c.schedule;
  roles = Object.fromEntries(c.nodes.map(n => [n.name, n.role]));
  $('nodes').tBodies[0].replaceChildren(...c.nodes.map(n => {
    const l = n.load, k = n.clock, tr = el('tr');
    tr.append(el('td', n.name), el('td', n.role), el('td', n.state, n.state === 'ready' ? '' : 'bad'),
      el('td', l ? l.running : '–'), el('td', l ? l.waiting : '–'), el('td', l ? l.kv_used_blocks + ' / ' + l.kv_max_blocks : '–'),
      el('td', l ? time(l.age_ns) : '–'), el('td', k.offset_ns == null ? k.state : time(k.offset_ns) + ' ± ' + time(k.bound_ns) + ' (' + k.state + ')'));
    return tr;
  }));
}

// place puts a bar for a span into its row, on a scale of total ns.
function place(bar, s, total) {
  const i = el('i', undefined, kind(s)), from = s.dur_ns < 0 ? s.start_ns + s.dur_ns : s.start_ns;
  i.style.left = 100 * from / total + '%';
  i.style.width = 100 * Math.abs(s.dur_ns) / total + '%';
  i.title = s.name + ' on ' + s.node + ': ' + time(s.dur_ns);
  bar.append(i);
  if (s.bound_ns) {
    const b = el('b'), end = s.start_ns + s.dur_ns;
    b.style.left = 100 * (end - s.bound_ns) / total + '%';
    b.style.width = 200 * s.bound_ns / total + '%';
    bar.append(b);
  }
}

function row(line) {
  const r = el('button', undefined, 'row'), bar = el('span', undefined, 'bar');
  for (const s of line.spans) if (s.dur_ns * 400 > line.e2e_ns) place(bar, { ...s, bound_ns: 0 }, line.e2e_ns || 1);
  r.append(el('span', line.client_request_id || line.request_id), el('span', line.outcome, line.outcome === 'finished' && line.complete ? 'dim' : 'bad'),
    el('span', time(line.ttft_ns)), el('span', time(line.e2e_ns)), bar);
  r.onclick = () => { location.hash = encodeURIComponent(line.request_id); };
  return r;
}

const words = line => [line.request_id, line.client_request_id, line.outcome, line.style, line.complete ? 'complete' : 'incomplete',
  ...line.attempts.map(a => a.node), ...line.spans.map(s => s.name)].join(' ').toLowerCase();

async function requests() {
  const got = (await json('timelines?limit=' + LIMIT)).timelines;
  const fresh = new Map();
  for (const line of got) if (!fresh.has(line.request_id)) fresh.set(line.request_id, line);
  for (const [id, line] of fresh) if (!rows.has(id) || lines.get(id).complete !== line.complete) rows.set(id, row(line));
  for (const id of rows.keys()) if (!fresh.has(id)) rows.delete(id);
  lines = fresh;
  histogram();
  list();
  if (!chosen && !location.hash && lines.size) show([...lines.values()][0]);
}

const column = ns => Math.max(0, Math.min(COLUMNS - 1, Math.floor((Math.log10(ns) - 5) * COLUMNS / 5))); // 0.1 ms to 10 s

function histogram() {
  const all = [...lines.values()].map(l => l.ttft_ns).filter(v => v > 0).sort((a, b) => a - b), counts = new Array(COLUMNS).fill(0);
  for (const v of all) counts[column(v)]++;
  const top = Math.max(1, ...counts), q = f => time(all[Math.min(all.length - 1, Math.floor(f * all.length))]);
  $('percentiles').textContent = all.length ? 'of ' + all.length + ': p50 ' + q(.5) + ', p90 ' + q(.9) + ', p99 ' + q(.99) : '';
  const box = $('histogram');
  while (box.children.length < COLUMNS) {
    const b = el('button'), n = box.children.length;
    b.append(el('i'));
    b.onclick = () => { bucket = bucket === n ? null : n; histogram(); list(); };
    box.append(b);
  }
  counts.forEach((n, i) => {
    const b = box.children[i];
    b.firstChild.style.height = n ? Math.max(4, 100 * n / top) + '%' : '0';
    b.title = n + ' from ' + time(Math.round(10 ** (5 + i * 5 / COLUMNS))) + ' to ' + time(Math.round(10 ** (5 + (i + 1) * 5 / COLUMNS)));
    b.setAttribute('aria-label', b.title);
    b.setAttribute('aria-pressed', bucket === i);
    b.disabled = n === 0 && bucket !== i;
  });
}

function list() {
  const want = $('filter').value.trim().toLowerCase(), focused = document.activeElement;
  const shown = [...lines.values()].filter(l => (!want || words(l).includes(want)) && (bucket === null || (l.ttft_ns > 0 && column(l.ttft_ns) === bucket)));
  $('none').hidden = lines.size > 0;
  $('shown').textContent = shown.length < lines.size ? shown.length + ' of ' + lines.size : '';
  const next = shown.map(l => rows.get(l.request_id)), box = $('requests');
  for (const r of [...box.children]) if (!next.includes(r)) r.remove();
  next.forEach((r, i) => { if (box.children[i] !== r) box.insertBefore(r, box.children[i] || null); });
  if (focused && box.contains(focused) && document.activeElement !== focused) focused.focus();
  for (const [id, r] of rows) r.setAttribute('aria-current', chosen !== null && id === chosen.request_id);
}

function show(line) {
  chosen = line;
  $('detail').hidden = false;
  $('title').textContent = line.client_request_id ? line.client_request_id + ' (' + line.request_id + ')' : line.request_id;
  const t = line.tokens;
  $('facts').textContent = [line.outcome + (line.finish_reason ? ', ' + line.finish_reason : ''), line.style, line.model, 'TTFT ' + time(line.ttft_ns), 'E2E ' + time(line.e2e_ns),
    'unaccounted ' + time(line.unaccounted_ns), t.prompt + (t.cached ? ' (' + t.cached + ' cached)' : '') + ' → ' + t.output + ' tokens'].join(' · ');
  const total = (whole || !(line.ttft_ns > 0) ? line.e2e_ns : line.ttft_ns) || 1;
  $('waterfall').replaceChildren(...line.spans.filter(s => whole || s.start_ns < total).map(s => {
    const r = el('div', undefined, 'span'), bar = el('span', undefined, 'bar');
    place(bar, s, total);
    r.append(el('span', s.name), el('span', s.node, 'dim'), el('span', time(s.dur_ns) + (s.bound_ns ? ' ± ' + time(s.bound_ns) : ''), s.dur_ns < 0 ? 'bad' : ''), bar);
    return r;
  }));
  steps(line);
  more(line);
  list();
}

// steps draws the time from token to token as a line of bars.
function steps(line) {
  const box = $('steps'), phase = line.phases.find(p => p.steps && p.steps.token_ns && p.steps.token_ns.length > 1);
  box.replaceChildren();
  if (!phase) return;
  const at = phase.steps.token_ns, gaps = at.slice(1).map((v, i) => v - at[i]), top = Math.max(...gaps, 1), n = gaps.length, ns = 'http://www.w3.org/2000/svg';
  const svg = document.createElementNS(ns, 'svg');
  svg.setAttribute('viewBox', '0 0 ' + n + ' 100');
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', 'time from token to token');
  const path = document.createElementNS(ns, 'path');
  path.setAttribute('d', gaps.map((g, i) => 'M' + i + ' 100V' + (100 - 100 * Math.max(g, 0) / top) + 'H' + (i + .85) + 'V100Z').join(''));
  path.setAttribute('fill', 'var(--decode)');
  svg.append(path);
  const sorted = [...gaps].sort((a, b) => a - b), q = f => time(sorted[Math.min(n - 1, Math.floor(f * n))]);
  box.append(svg, el('small', 'token to token on ' + phase.node + ': p50 ' + q(.5) + ', p99 ' + q(.99) + ', longest ' + q(1)));
}

function more(line) {
  const facts = [], h = line.handover;
  if (line.error) facts.push(['error', line.error.stage + ': ' + line.error.message, 'bad']);
  if (h) facts.push(['KV hand-over', size(h.bytes) + ' in ' + h.frames + ' frames, ' + h.tokens + ' tokens, ' + time(h.dur_ns) + (h.hidden_ns != null && h.dur_ns > 0 ? ', ' + Math.round(100 * h.hidden_ns / h.dur_ns) + ' % of it behind prefill' : '')]);
  for (const a of line.attempts) facts.push(['leg', a.role + ' ' + a.node + (a.attempt ? ', try ' + (a.attempt + 1) : '') + ': ' + a.outcome + (a.error ? ' (' + a.error.message + ')' : ''), a.outcome === 'finished' ? '' : 'bad']);
  for (const m of line.missing || []) facts.push(['missing', m, 'bad']);
  for (const v of line.violations) facts.push(['causality', v.event + ' lies ' + time(v.cause_ns - v.event_ns) + ' before its cause ' + v.cause + ', ' + time(v.excess_ns) + ' beyond the bound', 'bad']);
  if (line.decision) facts.push(['placement', line.decision.policy + ': ' + line.decision.reason]);
  for (const p of line.phases.slice(1)) facts.push(['clock of ' + p.node, p.clock.offset_ns == null ? 'not aligned' : 'offset ' + time(p.clock.offset_ns) + ' ± ' + time(p.clock.bound_ns) + ', ' + p.clock.state]);
  $('more').replaceChildren(...facts.flatMap(([name, text, cls]) => [el('dt', name), el('dd', text, cls || '')]));
}

async function follow() { // the part of the address after # names a request
  const id = decodeURIComponent(location.hash.slice(1));
  if (!id) return;
  try { show(lines.get(id) || await json('timelines/' + encodeURIComponent(id))); } catch { $('shown').textContent = 'no request ' + id; }
}

$('filter').oninput = list;
$('pause').onclick = e => { paused = !paused; e.target.setAttribute('aria-pressed', paused); };
$('scale').onclick = e => { whole = !whole; e.target.setAttribute('aria-pressed', whole); if (chosen) show(chosen); };
$('requests').onkeydown = e => {
  const to = e.key === 'ArrowDown' ? e.target.nextElementSibling : e.key === 'ArrowUp' ? e.target.previousElementSibling : null;
  if (to) { to.focus(); to.click(); e.preventDefault(); }
};
addEventListener('hashchange', follow);

async function loop() {
  try {
    if (!paused && !document.hidden) { await cluster(); await requests(); }
  } catch (e) { $('router').textContent = 'not reachable: ' + e.message; }
  setTimeout(loop, 1000);
}
loop().then(follow);
