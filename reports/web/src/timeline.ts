// 5. The timeline: streams and ops of every rank, predicted above measured. A step that was not measured is drawn by calls of segments
// where the window shows more ops than it has room for.
import { Calls, Shapes, type Mark } from './calls';
import type { Intervals, Lane, Report, Timeline } from './data';
import { el, hideTip, select, showTip } from './dom';
import { drawn, figure, kFont, kTwinRows, refreshTwin, section, sized, type Table } from './figure';
import { bytes, count, percent, seconds, signed, tick, whole } from './format';
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
const kWaiting = kGroups.length;  // after the groups of ops: waits
/// A lane as it is drawn. `calls`: where the step was not measured.
interface Drawing { lane: Lane; calls: Calls | null }
interface Style { colours: string[]; inks: string[]; hatch: CanvasPattern }
/// What is under the pointer: an op or wait of a list or of a call, or a call as a whole.
interface Hit { at: number; side: Side; drawing: Drawing; mark: { op: number; t: number; d: number; peer: number; wait: boolean } | null }

function streamsFigure(report: Report, state: State, timelines: Timeline[]): HTMLElement {
  const row = 17, gap = 10, top = 26, canvas = el('canvas', { tabindex: 0, role: 'img' }), box = el('div', { class: 'chart' }, canvas), range = el('span', { class: 'note', role: 'status' }), note = el('p', { class: 'note' }), legend = el('ul', { class: 'legend' });
  let t = timelines.find(u => u.index === state.selected) ?? timelines[0]!, shown = 'stages', lanes: Lane[] = [], sides: Side[] = [], end = 1, from = 0, to = 1;
  let groups: number[] = [], sums: Map<number, number>[][] = [], drawings: Drawing[] = [], shapes: Shapes, byCalls = false;
  const decoded = new Map<Lane, Calls>();
  let twinTimer = 0;
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
    groups = t.ops.map(op => groupOf(op[1]));
    if (shapes === undefined || !decoded.has(t.lanes[0]!)) {
      shapes = new Shapes(t, groups, kWaiting);
      decoded.clear();
      for (const l of t.lanes) if (l.calls.shape.length > 0) decoded.set(l, new Calls(shapes, l.calls));
    }
    drawings = lanes.map(lane => ({ lane, calls: decoded.get(lane) ?? null }));
    sides = decoded.size > 0 ? ['predicted'] : (['predicted', 'measured'] as Side[]).filter(s => t.lanes.some(l => l[s].t.length > 0));
    end = Math.max(1e-3, ...[...decoded.values()].map(c => c.ends[c.n - 1]!), ...t.lanes.flatMap(l => sides.map(s => { let e = 0; const i = l[s]; for (let k = 0; k < i.t.length; ++k) e = Math.max(e, i.t[k]! + i.d[k]!); return e; })));
    sums = lanes.map(l => (['predicted', 'measured'] as Side[]).map(s => {
      const m = new Map<number, number>(), i = l[s];
      for (let k = 0; k < i.t.length; ++k) if (i.wait[k] === 0) m.set(i.op[k]!, (m.get(i.op[k]!) ?? 0) + i.d[k]! - i.peer[k]!);
      return m;
    }));
    const parts = [t.simulated ? 'Simulated for this page: the run kept no traces.' : '', t.step >= 0 ? `Measured is step ${t.step}, whose duration is the median.` : '',
      t.lanes.some(l => l.alike > 1) ? 'Of the ranks of a stage that do the same at the same nanosecond one is shown.' : '',
      t.left_out > 0 ? `${whole(t.left_out)} ops and waits ${t.shown_s > 0 ? 'from ' + seconds(t.shown_s) + ' on and of further ranks' : 'of further ranks'} are left out` + (t.simulated ? '.' : '; the trace in the case’s folder has them.') : ''];
    note.textContent = parts.filter(p => p !== '').join(' ');
    controls.replaceChildren(select('Case', timelines.map((u, i): [string, string] => [String(i), nameOf(u)]), String(timelines.indexOf(t)), v => { t = timelines[+v]!; shown = 'stages'; fit(); }),
      select('Ranks', [['stages', 'one of each stage'], ...(ranks.length > firsts.size ? [['all', `all ${ranks.length}`] as [string, string]] : []), ...ranks.map((r): [string, string] => { const alike = t.lanes.find(l => l.rank === r)!.alike; return [String(r), 'rank ' + r + (alike > 1 ? ` and ${alike - 1} alike` : '')]; })], shown, v => { shown = v; choose(); paint(); }),
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
  /// Draws ops and waits in order of time, as one after the other is handed to it.
  function marks(g: CanvasRenderingContext2D, y: number, style: Style): Mark {
    const right = box.clientWidth, left = gutter();
    let lastPixel = -1;
    return (number, t0, d, peer, wait) => {
      const a = Math.max(left, x(t0)), b = Math.min(right, x(t0 + d));
      if (d <= 0 || b < left || a > right || (b - a < 0.5 && Math.floor(a) === lastPixel)) return;  // more than one op a pixel: one stands for them
      lastPixel = Math.floor(a);
      const w = Math.max(b - a, 0.7), inner = Math.max(0.7, w > 3 ? w - 0.6 : w), group = groups[number] ?? kGroups.length - 1, op = t.ops[number];
      g.fillStyle = wait ? style.hatch : style.colours[group]!;
      if (wait) g.globalAlpha = 0.5;
      g.fillRect(a, y, inner, row - 2);
      g.globalAlpha = 1;
      const p = !wait && peer > 0 ? Math.max(a, Math.min(b, x(t0 + peer))) : a;
      if (p > a) {
        if (p - a > 1) { g.fillStyle = css('--page'); g.fillRect(a, y, p - a, row - 2); g.fillStyle = style.hatch; g.fillRect(a, y, p - a, row - 2); }
      }
      if (!wait && b - p > 46 && op !== undefined) write(g, op[0].split(' ').slice(-2).join(' '), p, y, inner - (p - a), style.inks[group]!);
    };
  }
  function write(g: CanvasRenderingContext2D, text: string, at: number, y: number, width: number, ink: string): void {
    g.save(); g.beginPath(); g.rect(at, y, width, row - 2); g.clip();
    g.fillStyle = ink; g.font = `11px ${kFont}`;
    g.fillText(text, at + 4, y + row - 6);
    g.restore();
  }
  function drawLane(g: CanvasRenderingContext2D, i: Intervals, y: number, style: Style): void {
    const mark = marks(g, y, style);
    for (let k = first(i, from); k < i.t.length && i.t[k]! < to; ++k) mark(i.op[k]!, i.t[k]!, i.d[k]!, i.peer[k]!, i.wait[k] === 1);
  }
  /// The ops of calls. A call whose ops have no place is a box without them.
  function drawOps(g: CanvasRenderingContext2D, c: Calls, y: number, style: Style): void {
    const mark = marks(g, y, style);
    for (let k = c.at(from); k < c.n && c.enters[k]! < to; ++k)
      if (shapes.placed(c.shape(k))) c.each(k, mark); else stack(g, c, k, y, style);
  }
  /// A call as a box: each kind of op takes its share of the time as its share of the height, and waits above them. What stays empty is
  /// time in which the stream ran nothing.
  function stack(g: CanvasRenderingContext2D, c: Calls, k: number, y: number, style: Style): void {
    const a = Math.max(gutter(), x(c.begins[k]!)), b = Math.min(box.clientWidth, x(c.ends[k]!)), lasts = c.ends[k]! - c.begins[k]!;
    const shares = shapes.shares[c.shape(k)]!, waited = Math.max(gutter(), x(c.enters[k]!)), w = Math.max(0.7, b - a - (b - a > 3 ? 0.6 : 0));
    if (c.wait(k) > 0 && a - waited > 0.5) { g.fillStyle = style.hatch; g.globalAlpha = 0.5; g.fillRect(waited, y, a - waited, row - 2); g.globalAlpha = 1; }
    if (lasts <= 0 || b < gutter() || a > box.clientWidth) return;
    pile(g, a, w, y, group => (shares[group]! + (group === kWaiting ? c.peer(k) : 0)) / lasts, style);
    const most = shares.subarray(0, kWaiting).reduce((best, v, i) => (v > shares[best]! ? i : best), 0);
    if (w > 46 && shares[most]! > 0.97 * lasts) write(g, c.name(k), a, y, w, style.inks[most]!);
  }
  function pile(g: CanvasRenderingContext2D, a: number, w: number, y: number, share: (group: number) => number, style: Style): void {
    let top = y + row - 2;
    for (let group = 0; group <= kWaiting; ++group) {
      const h = Math.min(1, share(group)) * (row - 2);
      if (h <= 0) continue;
      g.fillStyle = group === kWaiting ? style.hatch : style.colours[group]!;
      g.globalAlpha = group === kWaiting ? 0.5 : 1;
      g.fillRect(a, top - h, w, h);
      top -= h;
    }
    g.globalAlpha = 1;
  }
  /// Calls of a lane: wide ones each as a box, of narrow ones each pixel what passes in it.
  function drawCalls(g: CanvasRenderingContext2D, c: Calls, y: number, style: Style): void {
    const left = gutter(), pixels = Math.max(1, Math.ceil(box.clientWidth - left)), time = (to - from) / (box.clientWidth - left), n = kWaiting + 1;
    const columns = new Float64Array(pixels * n);
    const spread = (begin: number, end: number, shares: (group: number) => number): void => {
      const lasts = end - begin;
      for (let p = Math.max(0, Math.floor((begin - from) / time)); p < pixels && from + p * time < end; ++p) {
        const part = (Math.min(end, from + (p + 1) * time) - Math.max(begin, from + p * time)) / lasts;
        for (let group = 0; group < n; ++group) columns[p * n + group]! += part * shares(group);
      }
    };
    for (let k = c.at(from); k < c.n && c.enters[k]! < to; ++k) {
      const begin = c.begins[k]!, end = c.ends[k]!, wait = c.wait(k), waited = c.enters[k]! + wait;
      if (end - begin >= 3 * time || wait >= 3 * time) { stack(g, c, k, y, style); continue; }
      const shares = shapes.shares[c.shape(k)]!, peer = c.peer(k);
      if (end > begin) spread(begin, end, group => shares[group]! + (group === kWaiting ? peer : 0));
      if (wait > 0) spread(c.enters[k]!, waited, group => (group === kWaiting ? wait : 0));
    }
    for (let p = 0; p < pixels; ++p) pile(g, left + p, 1, y, group => columns[p * n + group]! / time, style);
  }
  /// Whether some lane has more ops in the window than it has room for: calls are drawn then.
  function crowded(): boolean {
    const room = (box.clientWidth - gutter()) / 1.5;
    return drawings.some(d => d.calls !== null && d.calls.opsWithin(from, to) > room);
  }
  function paint(): void {
    const width = box.clientWidth;
    if (width === 0) return;
    byCalls = crowded();
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
      const calls = drawings[k]!.calls;
      if (calls !== null) (byCalls ? drawCalls : drawOps)(g, calls, rowTop(k, 0), style);
      else sides.forEach((s, n) => drawLane(g, lane[s], rowTop(k, n), style));
    });
    range.textContent = `${seconds(Math.max(0, from) * 1e-6)} to ${seconds(Math.min(end, to) * 1e-6)} of ${t.shown_s > 0 ? 'the first ' : ''}${seconds(end * 1e-6)}${decoded.size === 0 ? '' : byCalls ? ', by calls of segments: zoom in for ops' : ', by ops'}`;
    canvas.setAttribute('aria-label', `Timeline of ${nameOf(t)}: ${lanes.length} streams, ${sides.join(' above ')}, ${seconds(end * 1e-6)}. Arrow keys move, plus and minus zoom, 0 shows all.`);
    const used = new Set(groups);
    legend.replaceChildren(...kGroups.filter((_, k) => used.has(k)).map(g => el('li', {}, el('i', { style: `background:var(${g[2]})` }), g[0])), el('li', {}, el('i', { class: 'hatch' }), 'waiting'), sides.length === 2 ? el('li', {}, 'predicted above, measured below') : '', byCalls ? el('li', {}, 'height: share of the time of a call') : '');
    clearTimeout(twinTimer);
    twinTimer = window.setTimeout(() => refreshTwin(box), 200);
  }
  function hit(px: number, py: number): Hit | null {
    const k = Math.floor((py - top) / (sides.length * row + gap)), s = Math.floor((py - rowTop(k, 0)) / row);
    if (k < 0 || k >= lanes.length || px < gutter() || s < 0 || s >= sides.length) return null;
    const drawing = drawings[k]!, side = sides[s]!, us = from + (px - gutter()) / (box.clientWidth - gutter()) * (to - from), slack = 1.5 * (to - from) / box.clientWidth;
    let best: Hit | null = null;
    const mark = (at: number): Mark => (op, t0, d, peer, wait) => {
      if (d > 0 && t0 <= us + slack && t0 + d >= us - slack && (best === null || !wait || best.mark?.wait === true)) best = { at, side, drawing, mark: { op, t: t0, d, peer, wait } };
    };
    if (drawing.calls !== null) {
      const c = drawing.calls;
      for (let i = Math.max(0, c.at(us - slack)); i < c.n && c.enters[i]! <= us + slack; ++i)
        if (byCalls || !shapes.placed(c.shape(i))) best = { at: i, side, drawing, mark: null };
        else c.each(i, mark(i));
      return best;
    }
    const list = drawing.lane[side];
    for (let i = first(list, us - slack); i < list.t.length && list.t[i]! <= us + slack; ++i) mark(i)(list.op[i]!, list.t[i]!, list.d[i]!, list.peer[i]!, list.wait[i] === 1);
    return best;
  }
  /// What passes in a call, the longest first.
  function describeCall(c: Calls, k: number, lane: Lane): string[] {
    const s = c.shape(k), lasts = c.ends[k]! - c.begins[k]!, shares = shapes.shares[s]!, waits = shares[kWaiting]! + c.peer(k);
    const parts = [...kGroups.keys()].filter(g => shares[g]! > 0).sort((a, b) => shares[b]! - shares[a]!).map(g => `${shapes.placed(s) ? kGroups[g]![0] : 'ops'} ${seconds(shares[g]! * 1e-6)} (${percent(shares[g]! / lasts)})`);
    return [c.name(k) || 'outside of calls', `rank ${lane.rank}, ${lane.stream}, predicted at ${seconds(c.begins[k]! * 1e-6)}`, `${whole(shapes.count(s))} ${shapes.count(s) === 1 ? 'op' : 'ops'} in ${seconds(lasts * 1e-6)}`, ...parts,
      ...(waits > 0 ? [`waiting ${seconds(waits * 1e-6)}`] : []), ...(c.wait(k) > 0 ? [`after waiting ${seconds(c.wait(k) * 1e-6)}`] : []),
      ...(shapes.placed(s) ? [] : ['Its ops have times of their own, for which this page has no room.'])];
  }
  /// The op under the pointer, with its seconds on both sides.
  function describe(h: Hit): string[] {
    const { lane, calls } = h.drawing;
    if (h.mark === null) return describeCall(calls!, h.at, lane);
    const { op: number, t: begin, d, peer, wait } = h.mark, op = t.ops[number], name = [calls?.name(h.at) ?? '', op !== undefined ? op[0] : 'no op'].filter(w => w !== '').join(' ');
    const lines = [(wait ? 'waits for: ' : '') + name, `rank ${lane.rank}, ${lane.stream}, ${h.side} at ${seconds(begin * 1e-6)}`];
    if (wait) return [...lines, 'waiting ' + seconds(d * 1e-6)];
    if (op !== undefined) lines.push(`${op[1]}: ${count(op[2])} flop, ${bytes(op[3] || 0)} memory${op[4] > 0 ? ', ' + bytes(op[4]) + ' payload' : ''}`);
    if (calls !== null) lines.push('predicted ' + seconds((d - peer) * 1e-6));
    else {
      const k = drawings.indexOf(h.drawing), p = sums[k]![0]!.get(number), m = sums[k]![1]!.get(number);
      lines.push(`predicted ${p === undefined ? 'none' : seconds(p * 1e-6)}, measured ${m === undefined ? 'none' : seconds(m * 1e-6)}`);
      if (m !== undefined && p !== undefined && p > 0) lines.push(`residual ${seconds((m - p) * 1e-6)} (${signed(100 * (m - p) / p)})`);
    }
    if (peer > 0) lines.push(`and ${seconds(peer * 1e-6)} waiting for a peer`);
    return lines;
  }
  /// The calls or ops in the window, as they are drawn.
  function twinTable(): Table {
    const rows: (string | number)[][] = [], visible = (begin: number, end: number): boolean => end >= from && begin < to;
    let more = 0;
    const add = (make: () => (string | number)[]): void => { if (rows.length < kTwinRows) rows.push(make()); else ++more; };
    for (const { lane, calls: c } of drawings) {
      if (c === null) {
        for (const s of sides) for (let i = lane[s], k = first(i, from); k < i.t.length && i.t[k]! < to; ++k)
          if (i.wait[k] !== 1 && visible(i.t[k]!, i.t[k]! + i.d[k]!)) add(() => [lane.rank, lane.stream, s, t.ops[i.op[k]!]?.[0] ?? '', seconds(i.t[k]! * 1e-6), seconds(i.d[k]! * 1e-6), i.peer[k]! > 0 ? seconds(i.peer[k]! * 1e-6) : '']);
        continue;
      }
      for (let k = c.at(from); k < c.n && c.enters[k]! < to; ++k) {
        const s = c.shape(k), waits = shapes.shares[s]![kWaiting]! + c.peer(k);
        if (byCalls || !shapes.placed(s)) { if (shapes.count(s) > 0 && visible(c.begins[k]!, c.ends[k]!)) add(() => [lane.rank, lane.stream, 'predicted', c.name(k), ...(byCalls ? [shapes.count(s)] : []), seconds(c.begins[k]! * 1e-6), seconds((c.ends[k]! - c.begins[k]!) * 1e-6), waits > 0 ? seconds(waits * 1e-6) : '']); continue; }
        c.each(k, (op, begin, d, peer, wait) => { if (!wait && visible(begin, begin + d)) add(() => [lane.rank, lane.stream, 'predicted', c.name(k) + ' ' + t.ops[op]![0], seconds(begin * 1e-6), seconds(d * 1e-6), peer > 0 ? seconds(peer * 1e-6) : '']); });
      }
    }
    return { head: ['rank', 'stream', 'side', byCalls ? 'call' : 'op', ...(byCalls ? ['ops'] : []), 'begins', 'lasts', 'of it waiting'], rows, more: more > 0 ? `The first ${kTwinRows} of ${whole(rows.length + more)} in the window: zoom in for the rest.` : '' };
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
    table: twinTable });
}

export function timelineSection(report: Report, state: State): void {
  const timelines = report.doc.timelines.filter(t => t.lanes.length > 0);
  if (timelines.length === 0) return;
  const node = section('timeline', 'The step in time'), grid = gridFigure(report, state, timelines);
  if (grid !== null) node.append(grid);
  node.append(streamsFigure(report, state, timelines));
}
