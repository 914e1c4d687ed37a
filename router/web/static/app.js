'use strict';
const $ = id => document.getElementById(id);
const el = (tag, text, cls) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (cls) e.className = cls; return e; };
const time = ns => ns == null ? '–' : Math.abs(ns) >= 1e9 ? (ns / 1e9).toFixed(2) + ' s' : Math.abs(ns) >= 1e6 ? (ns / 1e6).toFixed(2) + ' ms' : (ns / 1e3).toFixed(1) + ' µs';
let roles = {}, chosen = null;

function kind(node) { // colour of a span: whose work it is
  if (node.includes('>')) return 'net';
  return roles[node] || 'router';
}

async function cluster() {
  const c = await (await fetch('cluster')).json();
  $('router').textContent = c.router + ', ' + c.schedule;
  roles = Object.fromEntries(c.nodes.map(n => [n.name, n.role]));
  const body = $('nodes').tBodies[0];
  body.replaceChildren(...c.nodes.map(n => {
    const l = n.load, k = n.clock, tr = el('tr');
    tr.append(el('td', n.name), el('td', n.role), el('td', n.state, n.state === 'ready' ? '' : 'bad'),
      el('td', l ? l.running : '–'), el('td', l ? l.waiting : '–'), el('td', l ? l.kv_used_blocks + ' / ' + l.kv_max_blocks : '–'),
      el('td', l ? time(l.age_ns) : '–'), el('td', k.offset_ns == null ? k.state : time(k.offset_ns) + ' ± ' + time(k.bound_ns) + ' (' + k.state + ')'));
    return tr;
  }));
}

function bars(line) {
  const bar = el('span', undefined, 'bar');
  for (const s of line.spans) {
    const i = el('i', undefined, kind(s.node));
    i.style.left = 100 * s.start_ns / line.e2e_ns + '%';
    i.style.width = 100 * Math.max(s.dur_ns, 0) / line.e2e_ns + '%';
    i.title = s.name + ' ' + time(s.dur_ns);
    bar.append(i);
  }
  return bar;
}

async function requests() {
  const lines = (await (await fetch('timelines?limit=30')).json()).timelines;
  $('none').hidden = lines.length > 0;
  $('requests').replaceChildren(...lines.map(line => {
    const row = el('button', undefined, 'row');
    row.append(el('span', line.client_request_id || line.request_id), el('span', line.outcome, line.outcome === 'finished' ? 'dim' : 'bad'),
      el('span', time(line.ttft_ns)), el('span', time(line.e2e_ns)), bars(line));
    row.onclick = () => { chosen = line; waterfall(); };
    return row;
  }));
  if (!chosen && lines.length) { chosen = lines[0]; waterfall(); }
}

function waterfall() {
  const line = chosen;
  $('title').hidden = false;
  $('title').textContent = line.request_id + ': ' + line.style + ', ' + (line.complete ? 'complete' : 'incomplete') + ', bound ± ' + time(line.max_bound_ns);
  $('waterfall').replaceChildren(...line.spans.map(s => {
    const row = el('div', undefined, 'span'), bar = el('span', undefined, 'bar'), i = el('i', undefined, kind(s.node));
    i.style.left = 100 * s.start_ns / line.e2e_ns + '%';
    i.style.width = 100 * Math.max(s.dur_ns, 0) / line.e2e_ns + '%';
    bar.append(i);
    row.append(el('span', s.name), el('span', s.node, 'dim'), el('span', time(s.dur_ns) + (s.bound_ns ? ' ± ' + time(s.bound_ns) : ''), s.dur_ns < 0 ? 'bad' : ''), bar);
    return row;
  }));
}

async function loop() {
  try { await cluster(); await requests(); } catch (e) { $('router').textContent = 'not reachable'; }
  setTimeout(loop, 1000);
}
loop();
