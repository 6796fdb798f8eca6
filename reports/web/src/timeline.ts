// 5. The timeline: streams and ops of every rank, predicted above measured.
import type { Intervals, Lane, Report, Timeline } from './data';
import { el, hideTip, select, showTip } from './dom';
import { drawn, figure, kFont, section, sized } from './figure';
import { bytes, count, seconds, signed, tick, whole } from './format';
import { gridFigure, hatch } from './pipeline';
import { linearTicks } from './scale';
import { css, inkOn, type Rgb } from './theme';
import type { State } from './state';

const kGroups: [string, RegExp, string][] = [
  ['matrix multiplication', /^linear/, '--c0'], ['attention', /^(attention|rope)/, '--c5'], ['norm, activation, residual', /^(norm|activation|residual|dropout|add|fill)/, '--c4'],
  ['embedding, loss', /^(embed|positions|cross_entropy|load_batch|sum_scalars|squared_norm)/, '--c3'], ['optimizer', /^(adamw|sgd)/, '--c2'],
  ['collective', /^(all_reduce|reduce_scatter|all_gather|broadcast|all_to_all)/, '--c1'], ['send, receive', /^(send|recv)/, '--c7'], ['other', /./, '--c6'],
];
const groupOf = (kind: string): number => { const k = kGroups.findIndex(g => g[1].test(kind)); return k < 0 ? kGroups.length - 1 : k; };
const rgb = (hex: string): Rgb => [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16)) as Rgb;
type Side = 'predicted' | 'measured';

function streamsFigure(report: Report, state: State, timelines: Timeline[]): HTMLElement {
  const row = 17, gap = 10, top = 26, canvas = el('canvas', { tabindex: 0, role: 'img' }), box = el('div', { class: 'chart' }, canvas), range = el('span', { class: 'note', role: 'status' }), note = el('p', { class: 'note' }), legend = el('ul', { class: 'legend' });
  let t = timelines.find(u => u.index === state.selected) ?? timelines[0]!, shown = 'stages', lanes: Lane[] = [], sides: Side[] = [], end = 1, from = 0, to = 1;
  let groups: number[] = [], sums: Map<number, number>[][] = [];
  const controls = el('div', { class: 'bar' });
  /// Room for the rank and, where the window has it, for the whole name of every stream.
  const gutter = (): number => (box.clientWidth < 560 ? 66 : Math.max(132, Math.min(box.clientWidth / 4, 62 + 7 * Math.max(0, ...lanes.map(l => l.stream.length)))));
  const x = (us: number): number => gutter() + (us - from) / (to - from) * (box.clientWidth - gutter());
  const rowTop = (k: number, s: number): number => top + k * (sides.length * row + gap) + s * row;
  const nameOf = (u: Timeline): string => report.title(u.index) || u.label;

  function choose(): void {
    const ranks = [...new Set(t.lanes.map(l => l.rank))], firsts = new Set(t.rows.length > 0 ? t.rows.map(r => r.rank) : ranks.slice(0, 1));
    lanes = t.lanes.filter(l => shown === 'all' || (shown === 'stages' ? firsts.has(l.rank) : l.rank === +shown));
    if (lanes.length === 0) { shown = 'stages'; lanes = t.lanes.filter(l => firsts.has(l.rank)); }
    sides = (['predicted', 'measured'] as Side[]).filter(s => t.lanes.some(l => l[s].t.length > 0));
    end = Math.max(1e-3, ...t.lanes.flatMap(l => sides.map(s => { let e = 0; const i = l[s]; for (let k = 0; k < i.t.length; ++k) e = Math.max(e, i.t[k]! + i.d[k]!); return e; })));
    groups = t.ops.map(op => groupOf(op[1]));
    sums = lanes.map(l => (['predicted', 'measured'] as Side[]).map(s => {
      const m = new Map<number, number>(), i = l[s];
      for (let k = 0; k < i.t.length; ++k) if (i.wait[k] === 0) m.set(i.op[k]!, (m.get(i.op[k]!) ?? 0) + i.d[k]! - i.peer[k]!);
      return m;
    }));
    const parts = [t.simulated ? 'Simulated for this page: the run kept no traces.' : '', t.step >= 0 ? `Measured is step ${t.step}, whose duration is the median.` : '',
      t.left_out > 0 ? `${whole(t.left_out)} intervals ${t.shown_s > 0 ? 'from ' + seconds(t.shown_s) + ' on and of further ranks' : 'of further ranks'} are left out` + (t.simulated ? '.' : '; the trace in the case’s folder has them.') : ''];
    note.textContent = parts.filter(p => p !== '').join(' ');
    controls.replaceChildren(select('Case', timelines.map((u, i): [string, string] => [String(i), nameOf(u)]), String(timelines.indexOf(t)), v => { t = timelines[+v]!; shown = 'stages'; fit(); }),
      select('Ranks', [['stages', 'one of each stage'], ...(ranks.length > firsts.size ? [['all', `all ${ranks.length}`] as [string, string]] : []), ...ranks.map((r): [string, string] => [String(r), 'rank ' + r])], shown, v => { shown = v; choose(); paint(); }),
      button('+', 'Zoom in', () => zoom(0.5)), button('−', 'Zoom out', () => zoom(2)), button('◀', 'Earlier', () => pan(-0.25)), button('▶', 'Later', () => pan(0.25)), button(t.shown_s > 0 ? 'All that is shown' : 'Whole step', t.shown_s > 0 ? 'All that is shown' : 'Whole step', () => fit()), range);
  }
  const button = (text: string, label: string, act: () => void): HTMLElement => el('button', { type: 'button', 'aria-label': label, onclick: act }, text);
  function clamp(): void { const w = Math.max(end * 1e-5, Math.min(to - from, end * 1.02)); from = Math.max(-0.01 * end, Math.min(from, 1.01 * end - w)); to = from + w; }
  function fit(): void { choose(); from = 0; to = end * 1.01; paint(); }
  function zoom(f: number, at = (from + to) / 2): void { from = at - (at - from) * f; to = at + (to - at) * f; clamp(); paint(); }
  function pan(share: number): void { const d = share * (to - from); from += d; to += d; clamp(); paint(); }
  /// Index of the first interval that ends after `us`. Intervals of one stream are in order.
  function first(i: Intervals, us: number): number {
    let a = 0, b = i.t.length;
    while (a < b) { const m = (a + b) >> 1; if (i.t[m]! + i.d[m]! < us) a = m + 1; else b = m; }
    return Math.max(0, a - 1);
  }
  function drawLane(g: CanvasRenderingContext2D, i: Intervals, y: number, paint: { colours: string[]; inks: string[]; hatch: CanvasPattern }): void {
    const right = box.clientWidth, left = gutter();
    let lastPixel = -1;
    for (let k = first(i, from); k < i.t.length && i.t[k]! < to; ++k) {
      const a = Math.max(left, x(i.t[k]!)), b = Math.min(right, x(i.t[k]! + i.d[k]!));
      if (b < left || (b - a < 0.5 && Math.floor(a) === lastPixel)) continue;  // more than one op a pixel: one stands for them
      lastPixel = Math.floor(a);
      const wait = i.wait[k] === 1, w = Math.max(b - a, 0.7), inner = Math.max(0.7, w > 3 ? w - 0.6 : w), group = groups[i.op[k]!] ?? kGroups.length - 1;
      g.fillStyle = wait ? paint.hatch : paint.colours[group]!;
      if (wait) g.globalAlpha = 0.5;
      g.fillRect(a, y, inner, row - 2);
      g.globalAlpha = 1;
      if (!wait && i.peer[k]! > 0) {
        const p = Math.min(b, x(i.t[k]! + i.peer[k]!));
        if (p - a > 1) { g.fillStyle = css('--page'); g.fillRect(a, y, p - a, row - 2); g.fillStyle = paint.hatch; g.fillRect(a, y, p - a, row - 2); }
      }
      const op = t.ops[i.op[k]!];
      if (!wait && w > 46 && op !== undefined) {
        g.save(); g.beginPath(); g.rect(a, y, inner, row - 2); g.clip();
        g.fillStyle = paint.inks[group]!; g.font = `11px ${kFont}`;
        g.fillText(op[0].split(' ').slice(-2).join(' '), a + 4, y + row - 6);
        g.restore();
      }
    }
  }
  function paint(): void {
    const width = box.clientWidth;
    if (width === 0) return;
    const height = top + lanes.length * (sides.length * row + gap) + 4, g = sized(canvas, width, height), colours = kGroups.map(k => css(k[2]));
    const style = { colours, inks: colours.map(c => inkOn(rgb(c))), hatch: hatch(g, css('--soft')) };
    g.clearRect(0, 0, width, height);
    g.font = `12px ${kFont}`;
    for (const v of linearTicks(from, to, width > 700 ? 8 : 3)) {
      if (v < from) continue;
      g.fillStyle = css('--grid'); g.fillRect(x(v), top - 6, 1, height);
      g.fillStyle = css('--soft');
      const text = tick(seconds(Math.max(0, v) * 1e-6));
      if (x(v) + g.measureText(text).width < width) g.fillText(text, x(v) + 3, 14);
    }
    lanes.forEach((lane, k) => {
      const newRank = k === 0 || lanes[k - 1]!.rank !== lane.rank;
      if (newRank && k > 0) { g.fillStyle = css('--line'); g.fillRect(0, rowTop(k, 0) - gap / 2, width, 1); }
      g.fillStyle = css('--ink'); g.font = `12px ${kFont}`;
      if (gutter() > 100) { g.fillText(newRank ? 'rank ' + lane.rank : '', 0, rowTop(k, 0) + 12); g.fillStyle = css('--soft'); g.fillText(lane.stream, 56, rowTop(k, 0) + 12); }
      else { g.fillText(newRank ? 'r' + lane.rank : '', 0, rowTop(k, 0) + 12); g.fillStyle = css('--soft'); g.font = `11px ${kFont}`; g.fillText(lane.stream.slice(0, 7), 22, rowTop(k, 0) + 12); }
      sides.forEach((s, n) => drawLane(g, lane[s], rowTop(k, n), style));
    });
    range.textContent = `${seconds(Math.max(0, from) * 1e-6)} to ${seconds(Math.min(end, to) * 1e-6)} of ${t.shown_s > 0 ? 'the first ' : ''}${seconds(end * 1e-6)}`;
    canvas.setAttribute('aria-label', `Timeline of ${nameOf(t)}: ${lanes.length} streams, ${sides.join(' above ')}, ${seconds(end * 1e-6)}. Arrow keys move, plus and minus zoom, 0 shows all.`);
    const used = new Set(groups);
    legend.replaceChildren(...kGroups.filter((_, k) => used.has(k)).map(g => el('li', {}, el('i', { style: `background:var(${g[2]})` }), g[0])), el('li', {}, el('i', { class: 'hatch' }), 'waiting'), sides.length === 2 ? el('li', {}, 'predicted above, measured below') : '');
  }
  function hit(px: number, py: number): { lane: number; side: number; at: number; list: Intervals } | null {
    const k = Math.floor((py - top) / (sides.length * row + gap)), s = Math.floor((py - rowTop(k, 0)) / row);
    if (k < 0 || k >= lanes.length || px < gutter() || s < 0 || s >= sides.length) return null;
    const list = lanes[k]![sides[s]!], us = from + (px - gutter()) / (box.clientWidth - gutter()) * (to - from), slack = 1.5 * (to - from) / box.clientWidth;
    let best = -1;
    for (let i = first(list, us - slack); i < list.t.length && list.t[i]! <= us + slack; ++i)
      if (list.t[i]! + list.d[i]! >= us - slack && (best < 0 || list.wait[i]! <= list.wait[best]!)) best = i;
    return best < 0 ? null : { lane: k, side: s, at: best, list };
  }
  /// The op under the pointer, with its seconds on both sides.
  function describe(h: { lane: number; side: number; at: number; list: Intervals }): string[] {
    const i = h.at, op = t.ops[h.list.op[i]!], lane = lanes[h.lane]!, wait = h.list.wait[i] === 1;
    const lines = [(wait ? 'waits for: ' : '') + (op !== undefined ? op[0] : 'no op'), `rank ${lane.rank}, ${lane.stream}, ${sides[h.side]} at ${seconds(h.list.t[i]! * 1e-6)}`];
    if (wait) return [...lines, 'waiting ' + seconds(h.list.d[i]! * 1e-6)];
    const p = sums[h.lane]![0]!.get(h.list.op[i]!), m = sums[h.lane]![1]!.get(h.list.op[i]!);
    if (op !== undefined) lines.push(`${op[1]}: ${count(op[2])} flop, ${bytes(op[3] || 0)} memory${op[4] > 0 ? ', ' + bytes(op[4]) + ' payload' : ''}`);
    lines.push(`predicted ${p === undefined ? 'none' : seconds(p * 1e-6)}, measured ${m === undefined ? 'none' : seconds(m * 1e-6)}`);
    if (m !== undefined && p !== undefined && p > 0) lines.push(`residual ${seconds((m - p) * 1e-6)} (${signed(100 * (m - p) / p)})`);
    if (h.list.peer[i]! > 0) lines.push(`and ${seconds(h.list.peer[i]! * 1e-6)} waiting for a peer`);
    return lines;
  }
  let drag: { x: number; from: number; to: number } | null = null;
  canvas.addEventListener('wheel', e => { if (!e.ctrlKey && !e.metaKey) return; e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : 0.8, from + (e.offsetX - gutter()) / (box.clientWidth - gutter()) * (to - from)); }, { passive: false });
  canvas.addEventListener('pointerdown', e => { drag = { x: e.clientX, from, to }; canvas.setPointerCapture(e.pointerId); });
  for (const name of ['pointerup', 'pointercancel'] as const) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener('pointerleave', hideTip);
  canvas.addEventListener('pointermove', e => {
    if (drag !== null) { const d = (drag.x - e.clientX) / (box.clientWidth - gutter()) * (drag.to - drag.from); from = drag.from + d; to = drag.to + d; clamp(); paint(); return hideTip(); }
    const h = hit(e.offsetX, e.offsetY);
    if (h !== null) showTip(describe(h), e.clientX, e.clientY); else hideTip();
  });
  canvas.addEventListener('keydown', e => {
    const act: Record<string, () => void> = { ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), a: () => pan(-0.1), d: () => pan(0.1), '+': () => zoom(0.7), '=': () => zoom(0.7), w: () => zoom(0.7), '-': () => zoom(1.4), s: () => zoom(1.4), 0: fit, Home: fit };
    const found = act[e.key];
    if (found !== undefined && !e.ctrlKey && !e.metaKey) { e.preventDefault(); found(); }
  });
  drawn(box, () => { if (lanes.length === 0) fit(); else paint(); });
  state.whenSelected(() => { const u = timelines.find(v => v.index === state.selected); if (u !== undefined && u !== t) { t = u; shown = 'stages'; fit(); } });
  return figure({ title: 'Streams and ops', label: 'Timeline of one step', note: 'Drag to move, Ctrl and wheel (or + and −) to zoom, arrow keys to move, 0 to see all.', chart: [controls, box, legend, note],
    table: () => ({ head: ['rank', 'stream', 'side', 'op', 'begins', 'lasts', 'of it waiting'], rows: lanes.flatMap(l => sides.flatMap(s => l[s].t.map((v, k): (string | number)[] | null => l[s].wait[k] === 1 ? null : [l.rank, l.stream, s, t.ops[l[s].op[k]!]?.[0] ?? '', seconds(v * 1e-6), seconds(l[s].d[k]! * 1e-6), l[s].peer[k]! > 0 ? seconds(l[s].peer[k]! * 1e-6) : '']).filter((r): r is (string | number)[] => r !== null))) }) });
}

export function timelineSection(report: Report, state: State): void {
  const timelines = report.doc.timelines.filter(t => t.lanes.length > 0);
  if (timelines.length === 0) return;
  const node = section('timeline', 'The step in time'), grid = gridFigure(report, state, timelines);
  if (grid !== null) node.append(grid);
  node.append(streamsFigure(report, state, timelines));
}
