// 5. The pipeline as a grid: a row a stage, time across; F, B, I and W with the micro-batch's number, bubbles hatched.
import type { PipelineRow, Report, Slots, Timeline } from './data';
import { el, hideTip, select, showTip } from './dom';
import { drawn, figure, kFont, refreshTwin, sized } from './figure';
import { percent, seconds, tick } from './format';
import { linearTicks } from './scale';
import { css, inkOn, type Rgb } from './theme';
import type { State } from './state';

const kPhases: Record<string, { name: string; colour: string }> = {
  F: { name: 'F: forward', colour: '--phase-f' }, B: { name: 'B: backward', colour: '--phase-b' }, I: { name: 'I: gradient of the input', colour: '--phase-i' },
  W: { name: 'W: gradient of the weights', colour: '--phase-w' }, U: { name: 'update', colour: '--phase-u' },
};
export const colourOf = (phase: string): string => css(kPhases[phase]?.colour ?? '--c6');
const rgb = (hex: string): Rgb => [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16)) as Rgb;

export function hatch(g: CanvasRenderingContext2D, colour: string): CanvasPattern {
  const tile = document.createElement('canvas'), ratio = 1;
  tile.width = tile.height = 6 * ratio;
  const h = tile.getContext('2d')!;
  h.strokeStyle = colour;
  h.lineWidth = 1.1;
  h.beginPath();
  for (const d of [-6, 0, 6]) { h.moveTo(d, 6); h.lineTo(d + 6, 0); }
  h.stroke();
  return g.createPattern(tile, 'repeat')!;
}

/// The part of the row's time until `end` in which it computes nothing.
export function idleShare(slots: Slots, end: number): number {
  let busy = 0;
  for (let k = 0; k < slots.t.length; ++k) busy += slots.d[k]!;
  return end > 0 ? 1 - busy / end : 0;
}
export const endOf = (rows: PipelineRow[], side: 'measured' | 'predicted'): number => Math.max(0, ...rows.flatMap(r => r[side].t.length > 0 ? [r[side].t[r[side].t.length - 1]! + r[side].d[r[side].t.length - 1]!] : []));

export function gridFigure(report: Report, state: State, timelines: Timeline[]): HTMLElement | null {
  const usable = timelines.filter(t => t.rows.some(r => r.predicted.t.length + r.measured.t.length > 0));
  if (usable.length === 0) return null;
  const staged = usable.filter(t => t.rows.length > 1);
  let first = staged.find(t => t.index === state.selected) ?? staged[0] ?? usable[0]!;
  let second: Timeline | null = staged.find(t => t !== first && report.at(t.index, 'schedule') !== report.at(first.index, 'schedule') && t.rows.length === first.rows.length) ?? null;
  const box = el('div', { class: 'chart' }), legend = el('ul', { class: 'legend' }), says = el('p', { class: 'note', role: 'status' });
  interface Panel { t: Timeline; side: 'measured' | 'predicted'; canvas: HTMLCanvasElement }
  let panels: Panel[] = [], end = 1, from = 0, to = 1;
  const row = 26, gap = 4, top = 26;
  const gutter = (w: number): number => (w < 560 ? 34 : 74);
  const nameOf = (t: Timeline): string => report.title(t.index) || t.label;
  const x = (us: number, w: number): number => gutter(w) + (us - from) / (to - from) * (w - gutter(w) - 4);

  function choose(): void {
    const sides = (t: Timeline): ('measured' | 'predicted')[] => { const m = t.rows.some(r => r.measured.t.length > 0), p = t.rows.some(r => r.predicted.t.length > 0); return [...(p ? ['predicted' as const] : []), ...(m ? ['measured' as const] : [])]; };
    const list = second === null ? sides(first).map(side => ({ t: first, side })) : [first, second].map(t => ({ t, side: sides(t).at(-1) ?? 'predicted' as const }));
    panels = list.map(({ t, side }) => ({ t, side, canvas: canvasOf() }));
    end = Math.max(1e-3, ...panels.map(p => endOf(p.t.rows, p.side)));
    from = 0;
    to = end * 1.005;
    box.replaceChildren(...panels.flatMap(p => [el('p', { class: 'panel' }, el('b', {}, nameOf(p.t)), ` ${p.side}, ${seconds(endOf(p.t.rows, p.side) * 1e-6)}; stages are idle for ${percent(p.t.rows.reduce((s, r) => s + idleShare(r[p.side], endOf(p.t.rows, p.side)), 0) / p.t.rows.length)} of it`), p.canvas]));
  }
  function canvasOf(): HTMLCanvasElement {
    const canvas = el('canvas', { tabindex: 0, role: 'img' });
    const panel = (): Panel => panels.find(p => p.canvas === canvas)!;
    let drag: { x: number; from: number; to: number } | null = null;
    canvas.addEventListener('pointerdown', e => { drag = { x: e.clientX, from, to }; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener('pointerup', () => { drag = null; });
    canvas.addEventListener('pointercancel', () => { drag = null; });
    canvas.addEventListener('pointerleave', hideTip);
    canvas.addEventListener('wheel', e => { if (!e.ctrlKey && !e.metaKey) return; e.preventDefault(); const w = canvas.clientWidth; zoom(e.deltaY > 0 ? 1.25 : 0.8, from + (e.offsetX - gutter(w)) / (w - gutter(w)) * (to - from)); }, { passive: false });
    canvas.addEventListener('pointermove', e => {
      const w = canvas.clientWidth;
      if (drag !== null) { const d = (drag.x - e.clientX) / (w - gutter(w)) * (drag.to - drag.from); from = drag.from + d; to = drag.to + d; clamp(); return paint(); }
      const { t, side } = panel(), r = t.rows[Math.floor((e.offsetY - top) / (row + gap))], us = from + (e.offsetX - gutter(w)) / (w - gutter(w) - 4) * (to - from);
      if (r === undefined || e.offsetX < gutter(w) || us > end) return hideTip();
      const s = r[side], k = find(s, us);
      if (k >= 0 && us <= s.t[k]! + s.d[k]!) showTip([`${kPhases[s.phase[k]!]?.name ?? ''}${s.m[k]! >= 0 ? `, micro-batch ${s.m[k]}` : ''}`, `stage ${r.stage}, rank ${r.rank}${s.layer[k]! >= 0 ? `, from layer ${s.layer[k]}` : ''}`, `${seconds(s.d[k]! * 1e-6)} from ${seconds(s.t[k]! * 1e-6)}`], e.clientX, e.clientY);
      else { const a = k >= 0 ? s.t[k]! + s.d[k]! : 0, b = k + 1 < s.t.length ? s.t[k + 1]! : end; showTip(['bubble', `stage ${r.stage} waits ${seconds((b - a) * 1e-6)}`], e.clientX, e.clientY); }
    });
    canvas.addEventListener('keydown', e => {
      const act: Record<string, () => void> = { ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), '+': () => zoom(0.7), '=': () => zoom(0.7), '-': () => zoom(1.4), 0: fit, Home: fit };
      const found = act[e.key];
      if (found !== undefined && !e.ctrlKey && !e.metaKey) { e.preventDefault(); found(); }
    });
    return canvas;
  }
  /// The last slot that begins at or before `us`, or -1.
  function find(s: Slots, us: number): number {
    let a = 0, b = s.t.length;
    while (a < b) { const m = (a + b) >> 1; if (s.t[m]! <= us) a = m + 1; else b = m; }
    return a - 1;
  }
  function clamp(): void {
    const w = Math.max(end * 1e-4, Math.min(to - from, end * 1.02));
    from = Math.max(-0.005 * end, Math.min(from, 1.01 * end - w));
    to = from + w;
  }
  function zoom(f: number, at = (from + to) / 2): void { from = at - (at - from) * f; to = at + (to - at) * f; clamp(); paint(); }
  function pan(share: number): void { const d = share * (to - from); from += d; to += d; clamp(); paint(); }
  function fit(): void { from = 0; to = end * 1.005; paint(); }
  function paint(): void { for (const p of panels) paintOne(p); }
  function paintOne({ t, side, canvas }: Panel): void {
    const width = box.clientWidth, left = gutter(width), height = top + t.rows.length * (row + gap) + 2, g = sized(canvas, width, height), pattern = hatch(g, css('--soft'));
    g.clearRect(0, 0, width, height);
    g.font = `12px ${kFont}`;
    const mine = endOf(t.rows, side);
    for (const v of linearTicks(Math.max(0, from), to, width > 700 ? 8 : 3)) {
      const p = x(v, width);
      if (p < left - 1) continue;
      g.fillStyle = css('--grid'); g.fillRect(p, top - 6, 1, height);
      g.fillStyle = css('--soft');
      const text = tick(seconds(v * 1e-6));
      if (p + g.measureText(text).width < width) g.fillText(text, p + 3, 13);
    }
    t.rows.forEach((r, k) => {
      const y = top + k * (row + gap), s = r[side];
      g.fillStyle = css('--ink');
      g.textAlign = 'left';
      g.font = `12px ${kFont}`;
      g.fillText(width < 560 ? 's' + r.stage : 'stage ' + r.stage, 0, y + 17);
      const a0 = Math.max(left, x(0, width)), b0 = Math.min(width, x(mine, width));
      g.save();
      g.globalAlpha = 0.4;
      g.fillStyle = pattern;
      g.fillRect(a0, y, Math.max(0, b0 - a0), row);
      g.restore();
      // Narrow slots are merged, so that any number of them is painted at once.
      let blur = -1, lastPhase = '';
      for (let i = Math.max(0, find(s, from)); i < s.t.length && s.t[i]! < to; ++i) {
        const a = Math.max(left, x(s.t[i]!, width)), b = Math.min(width, x(s.t[i]! + s.d[i]!, width)), phase = s.phase[i]!;
        if (b < left) continue;
        if (b - a < 0.6 && Math.floor(a) === blur && phase === lastPhase) continue;
        blur = Math.floor(a);
        lastPhase = phase;
        const colour = colourOf(phase), w = Math.max(0.8, b - a - (b - a > 3 ? 1 : 0));
        g.fillStyle = colour;
        g.fillRect(a, y, w, row);
        if (w < 14) continue;
        g.fillStyle = inkOn(rgb(colour));
        g.textAlign = 'center';
        const m = s.m[i]!, text = m < 0 ? (w > 50 ? 'update' : '') : w > 34 ? phase + m : String(m);
        g.font = `${w > 34 ? 12 : 11}px ${kFont}`;
        if (g.measureText(text).width < w - 2) g.fillText(text, a + w / 2, y + 17);
      }
    });
    canvas.setAttribute('aria-label', `Pipeline of ${nameOf(t)}, ${side}: ${t.rows.length} stages, ${seconds(mine * 1e-6)}. Arrow keys move, plus and minus zoom, 0 shows all.`);
    const used = new Set(panels.flatMap(p => p.t.rows.flatMap(r => r[p.side].phase)));
    legend.replaceChildren(...Object.entries(kPhases).filter(([p]) => used.has(p)).map(([, p]) => el('li', {}, el('i', { style: `background:var(${p.colour})` }), p.name)), el('li', {}, el('i', { class: 'hatch' }), 'bubble: the stage computes nothing'));
    says.textContent = `${seconds(Math.max(0, from) * 1e-6)} to ${seconds(Math.min(end, to) * 1e-6)} of ${seconds(end * 1e-6)}`;
  }
  const redraw = drawn(box, () => { if (panels.length === 0) choose(); paint(); refreshTwin(box); });
  const again = (): void => { choose(); redraw(); };
  state.whenSelected(() => { const t = usable.find(u => u.index === state.selected); if (t !== undefined && t !== first) { first = t; if (second === t) second = null; again(); fill(); } });
  const controls = el('div', { class: 'bar' }), button = (text: string, label: string, act: () => void): HTMLElement => el('button', { type: 'button', 'aria-label': label, onclick: act }, text);
  function fill(): void {
    const options = usable.map((t, i): [string, string] => [String(i), nameOf(t)]);
    controls.replaceChildren(select('Case', options, String(usable.indexOf(first)), v => { first = usable[+v]!; again(); }), select('above', [['-1', 'itself, predicted and measured'], ...options], second === null ? '-1' : String(usable.indexOf(second)), v => { second = +v < 0 ? null : usable[+v]!; again(); }),
      button('+', 'Zoom in', () => zoom(0.5)), button('−', 'Zoom out', () => zoom(2)), button('◀', 'Earlier', () => pan(-0.25)), button('▶', 'Later', () => pan(0.25)), button('Whole step', 'Whole step', fit), says);
  }
  fill();
  return figure({ title: 'The pipeline, stage by stage', label: 'Pipeline grid', note: 'A row a stage, one of its ranks each; time runs to the right. Two schedules stand over one another on the same scale.', chart: [controls, box, legend],
    table: () => ({ head: ['case', 'stage', 'rank', 'phase', 'micro-batch', 'begins', 'lasts'], rows: panels.flatMap(p => p.t.rows.flatMap(r => r[p.side].t.map((t, k): (string | number)[] => [nameOf(p.t), r.stage, r.rank, r[p.side].phase[k]!, r[p.side].m[k]! < 0 ? '' : r[p.side].m[k]!, seconds(t * 1e-6), seconds(r[p.side].d[k]! * 1e-6)]))) }) });
}
