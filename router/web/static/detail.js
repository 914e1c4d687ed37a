// One request in depth: its spans with the whiskers of their bounds, its steps, and what is known beside.
import { $, el, svg, time, size, kind, KINDS } from './format.js';
import { parts } from './kv.js';

let line = null, whole = false, roles = {};

export function init() {
  $('scale').onclick = () => {
    whole = !whole;
    $('scale').setAttribute('aria-pressed', whole);
    if (line) waterfall();
  };
  $('legend').append(...KINDS.map((name, i) => { const s = el('span'); s.append(el('i', undefined, 'k' + i), name); return s; }), el('span', '── bound of the two clocks'));
}

// tiles turns the columns of a line's spans into objects: the node by its name, the start by the gaps before it. Gaps end with the
// last one that is not 0; only spans between two nodes have bounds, but for lines of before, where each has.
function tiles(l) {
  const { name, node, gap_ns: gap, dur_ns: dur, bound_ns: bound } = l.spans, named = n => typeof n === 'string' ? n : n === 0 ? l.router : l.attempts[n - 1].node;
  let end = 0, ways = 0;
  return name.map((name, i) => {
    const start_ns = end + (gap[i] || 0), at = [node[i]].flat().map(named).join('>');
    end = start_ns + dur[i];
    return { name, node: at, start_ns, dur_ns: dur[i], bound_ns: bound.length === dur.length ? bound[i] : at.includes('>') ? bound[ways++] : 0 };
  });
}

export function show(l) {
  line = { ...l, spans: tiles(l) };
  roles = Object.fromEntries(l.attempts.map(a => [a.node, a.role]));
  $('title').textContent = l.client_request_id ? l.client_request_id + ' (' + l.request_id + ')' : l.request_id;
  const t = l.tokens;
  $('facts').textContent = [l.outcome + (l.finish_reason ? ', ' + l.finish_reason : ''), l.style, l.model, 'TTFT ' + time(l.ttft_ns), 'E2E ' + time(l.e2e_ns),
    'unaccounted ' + time(l.unaccounted_ns), (t.prompt ?? '?') + (t.cached ? ' (' + t.cached + ' cached)' : '') + ' → ' + t.output + ' tokens'].join(' · ');
  $('scales').hidden = false;
  reuse();
  waterfall();
  steps();
  more();
}

export function missing(id) {
  line = null;
  $('title').textContent = 'No request ' + id + ' is known';
  $('facts').textContent = '';
  $('scales').hidden = true;
  for (const part of ['reuse', 'waterfall', 'steps', 'more']) $(part).replaceChildren();
}

// reuse says where the KV of the prompt came from: the cache of the node that did prefill, a peer's, or compute; and what of it then moved.
function reuse() {
  const { prompt, cached } = line.tokens, h = line.handover, sum = f => line.phases.reduce((s, p) => s + f(p), 0);
  const fetched = Math.min(cached, sum(p => p.fetched_tokens || 0)), computed = sum(p => (p.chunks?.[1] || p.chunks?.tokens || []).reduce((a, b) => a + b, 0)), fresh = prompt - cached, again = Math.max(0, computed - fresh);
  const text = [cached - fetched + ' reused', fetched + ' moved from a peer', fresh + ' computed'].filter(t => !t.startsWith('0 '));
  if (again) text.push(again + ' recomputed');
  if (h) text.push(h.tokens + ' moved to the generation node' + (h.tokens_held ? ', which had ' + h.tokens_held : ''));
  $('reuse').replaceChildren(...prompt > 0 && cached != null ? [parts([[cached - fetched, 'k0', 'reused'], [fetched, 'k4', 'moved from a peer'], [fresh, 'k3', 'computed'], [again, 'k1', 'recomputed']], 'prompt tokens'), el('span', text.join(' · '))] : []);
}

function waterfall() {
  const total = (whole || !(line.ttft_ns > 0) ? line.e2e_ns : line.ttft_ns) || 1;
  $('waterfall').replaceChildren(...line.spans.filter(s => whole || s.start_ns < total).map(s => {
    const r = el('div', undefined, 'span'), bar = el('span', undefined, 'bar'), i = el('i', undefined, 'k' + kind(s, roles));
    const from = Math.min(s.start_ns, s.start_ns + s.dur_ns), end = s.start_ns + s.dur_ns, percent = v => 100 * v / total + '%';
    i.style.left = percent(from);
    i.style.width = percent(Math.min(Math.abs(s.dur_ns), Math.max(0, total - from)));
    bar.append(i);
    if (s.bound_ns) {
      const b = el('b');
      b.style.left = percent(Math.max(0, end - s.bound_ns));
      b.style.width = percent(2 * s.bound_ns);
      bar.append(b);
    }
    bar.title = s.name + ' on ' + s.node + ', from ' + time(s.start_ns) + ': ' + time(s.dur_ns) + (s.bound_ns ? ' ± ' + time(s.bound_ns) : '');
    r.append(el('span', s.name, s.name === line.critical_span ? 'critical' : ''), el('span', s.node, 'dim'), el('span', time(s.dur_ns) + (s.bound_ns ? ' ± ' + time(s.bound_ns) : ''), s.dur_ns < 0 ? 'bad' : ''), bar);
    return r;
  }));
}

// steps draws what each decode step took on the device, under the time from step to step.
function steps() {
  const box = $('steps'), phase = line.phases.find(p => p.steps && (p.steps.sample_end_ns || []).length > 1);
  box.replaceChildren();
  if (!phase) return;
  const s = phase.steps, n = s.sample_end_ns.length, most = 600, every = Math.ceil(n / most), gaps = [], busy = [];
  for (let i = 1; i < n; i++) {
    gaps.push(s.sample_end_ns[i] - s.sample_end_ns[i - 1]);
    busy.push(s.sample_end_ns[i] - s.forward_start_ns[i]);
  }
  const sorted = [...gaps].sort((a, b) => a - b), q = f => sorted[Math.min(sorted.length - 1, Math.floor(f * sorted.length))], top = Math.max(1, q(1));
  const column = (values, fill) => {
    let d = '';
    for (let i = 0; i < values.length; i += every) d += 'M' + i + ' 100V' + (100 - 100 * Math.max(0, Math.max(...values.slice(i, i + every))) / top).toFixed(1) + 'H' + (i + every * .85) + 'V100Z';
    return svg('path', { d, fill });
  };
  const root = svg('svg', { viewBox: '0 0 ' + gaps.length + ' 100', preserveAspectRatio: 'none', role: 'img', 'aria-label': 'time from step to step, and what of it the device worked' });
  root.append(column(gaps, 'var(--k3)'), column(busy, 'var(--k5)'));
  box.append(el('small', 'step to step on ' + phase.node + ': p50 ' + time(q(.5)) + ', p99 ' + time(q(.99)) + ', longest ' + time(top) + '; coloured: the device worked'), root);
}

// CANDIDATES is the order of the columns of a decision's candidates; in lines of before each has its name.
const CANDIDATES = ['node', 'score', 'running', 'waiting', 'load_age_ns', 'queued_tokens', 'reserved', 'matched_tokens'];

function candidates(c = []) {
  return Array.isArray(c) ? Object.fromEntries(c.map((values, i) => [CANDIDATES[i], values])) : c;
}

// clockOf reads the row of a phase's clock; lines of before have an object.
function clockOf(c) {
  return Array.isArray(c) ? { state: c[1], bound_ns: c[2], offset_ns: c[3] } : c;
}

function more() {
  const facts = [], h = line.handover, d = line.decision, l = line;
  if (l.error) facts.push(['error', l.error.stage + ': ' + l.error.message, 'bad']);
  if (l.wall_ns) facts.push(['began', new Date(l.wall_ns / 1e6).toISOString()]);
  if (h) facts.push(['KV hand-over', size(h.bytes) + ' in ' + h.frames + ' frames, ' + h.tokens + ' tokens' + (h.tokens_held ? ' (' + h.tokens_held + ' were there already)' : '') + ', ' + time(h.dur_ns) + (h.hidden_ns != null && h.dur_ns > 0 ? ', ' + Math.round(100 * h.hidden_ns / h.dur_ns) + ' % of it behind prefill' : '')]);
  for (const a of l.attempts) facts.push(['leg', a.role + ' ' + a.node + (a.attempt ? ', try ' + (a.attempt + 1) : '') + ': ' + a.outcome + (a.error ? ' (' + a.error.message + ')' : ''), a.outcome === 'finished' ? '' : 'bad']);
  for (const m of l.missing || []) facts.push(['missing', m, 'bad']);
  for (const v of l.violations || []) facts.push(['causality', v.event + ' lies ' + time(v.cause_ns - v.event_ns) + ' before its cause ' + v.cause + ', ' + time(v.excess_ns) + ' beyond the bound', 'bad']);
  if (d) {
    facts.push(['placement', d.policy + ': ' + d.reason + (d.matched_tokens != null ? ', ' + d.matched_tokens + ' prompt tokens in its cache' : '')
      + (d.local_ns != null ? '; prefill on ' + d.gen + ' would take ' + time(d.local_ns) + (d.remote_ns != null ? ', apart and handed over ' + time(d.remote_ns) : '') : '')]);
    const { node = [], ...columns } = candidates(d.candidates);
    for (const [i, name] of node.entries()) facts.push(['candidate', [name, ...Object.entries(columns).map(([k, v]) => [k, v[i]]).filter(([, v]) => v != null).map(([k, v]) => k.endsWith('_ns') ? k.slice(0, -3).replaceAll('_', ' ') + ' ' + time(v) : k.replaceAll('_', ' ') + ' ' + v)].join(', ')]);
  }
  if (l.decode) facts.push(['decode', l.decode.steps + ' steps: ' + time(l.decode.compute_ns) + ' forward, ' + time(l.decode.sample_ns) + ' sampling, ' + time(l.decode.wait_ns) + ' waiting' + (l.decode.preempted_ns ? ' (' + time(l.decode.preempted_ns) + ' preempted)' : '')]);
  for (const r of l.resumes || []) facts.push(['seam', 'the stream was cut after ' + r.tokens + ' tokens; try ' + (r.attempt + 1) + ' went on', 'bad']);
  for (const p of l.phases) {
    if (p.dp_rank != null) facts.push(['rank on ' + p.node, p.dp_rank]);
    if (p.kv_blocks) {
      const [, fresh, reused, partial, missed] = p.kv_blocks;
      const [host, disk] = p.kv_tier_blocks || [0, 0];
      facts.push(['KV of ' + p.node, fresh + ' blocks new, ' + reused + ' reused' + (host + disk ? ' (' + host + ' from host memory, ' + disk + ' from disk)' : '') + ', ' + partial + ' partly, ' + missed + ' missed']);
    }
    if (p.preemptions) facts.push(['preempted', p.preemptions + ' times on ' + p.node + ', for ' + time(p.preempted_ns), 'bad']);
    if (p.energy_j != null) facts.push(['energy on ' + p.node, p.energy_j.toPrecision(3) + ' J']);
  }
  for (const p of l.phases) {
    if (!p.clock) continue;
    const c = clockOf(p.clock);
    facts.push(['clock of ' + p.node, c.offset_ns == null ? 'not aligned' : 'offset ' + time(c.offset_ns) + ' ± ' + time(c.bound_ns) + ', ' + c.state]);
  }
  $('more').replaceChildren(...facts.flatMap(([name, text, cls]) => [el('dt', name), el('dd', text, cls || '')]));
}
