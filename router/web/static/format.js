// Numbers as people read them, and elements. Text of clients and nodes only ever becomes text: no markup is made from it.
export const $ = id => document.getElementById(id);

export function el(tag, text, cls) {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls;
  return e;
}

const SVG = 'http://www.w3.org/2000/svg';
export function svg(tag, attributes, ...children) {
  const e = document.createElementNS(SVG, tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

// time writes ns with three digits and a unit.
export function time(ns) {
  if (ns == null) return '–';
  const a = Math.abs(ns), three = v => v.toFixed(Math.abs(v) < 9.995 ? 2 : Math.abs(v) < 99.95 ? 1 : 0);
  return a < 1e3 ? Math.round(ns) + ' ns' : a < 999.5e3 ? three(ns / 1e3) + ' µs' : a < 999.5e6 ? three(ns / 1e6) + ' ms' : three(ns / 1e9) + ' s';
}

export const size = n => n < 1024 ? n + ' B' : n < 1048576 ? (n / 1024).toFixed(1) + ' KiB' : (n / 1048576).toFixed(1) + ' MiB';
export const clock = ms => new Date(ms).toLocaleTimeString();

// duration reads "50ms" as ns; NaN if it is none.
export function duration(text) {
  const m = /^([0-9.]+)(ns|us|µs|ms|s)$/.exec(text);
  return m ? Number(m[1]) * { ns: 1, us: 1e3, 'µs': 1e3, ms: 1e6, s: 1e9 }[m[2]] : NaN;
}

export const KINDS = ['router', 'context node', 'generation node', 'network', 'KV hand-over', 'decode'];

// kind says whose work a span is: an index into KINDS and into the colours.
export function kind(span, roles) {
  if (span.name.startsWith('decode')) return 5;
  if (span.name.startsWith('kv_')) return 4;
  if (span.node.includes('>')) return 3;
  return { ctx: 1, gen: 2 }[roles[span.node]] ?? 0;
}
