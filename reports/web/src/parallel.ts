// Parallel coordinates: a line a case over settings and figures. A brush on an axis filters every chart and the table.
import { axisText, type Column, type Report } from './data';
import { el, svg } from './dom';
import { drawn, figure, kFont, sized } from './figure';
import { human, tick, whole, type Value } from './format';
import { byteTicks, linearTicks, type Scale } from './scale';
import { css, cssOf, sequential } from './theme';
import type { State } from './state';

interface Axis { id: string; name: string; values: Float64Array; ticks: { at: number; text: string }[]; discrete: boolean; low: number; high: number; scale: Scale | null }
const kHeight = 330, kTop = 44, kBottom = 16, kBins = 8, kSteps = 160;

export function parallelFigure(report: Report, state: State): HTMLElement | null {
  const cases: number[] = [];
  for (let i = 0; i < report.count; ++i) if (report.ok(i) && report.rate(i) > 0) cases.push(i);
  // Values that only refused cases have get no place on an axis.
  const ran = new Map(report.axes().map(c => [c, new Set(c.among(cases))])), valuesOf = (c: Column): Value[] => c.distinct().filter(v => ran.get(c)!.has(v));
  const settings = [...ran].filter(([, values]) => values.size > 1 && values.size <= 24).map(([c]) => c);
  if (settings.length < 2 || cases.length < 4) return null;
  const order = ['model', 'world_size', 'dp', 'tp', 'pp', 'cp', 'ep', 'zero', 'schedule', 'recompute', 'micro_batch', 'sequence_parallel', 'seq_len'];
  const rank = (name: string): number => { const k = order.indexOf(name); return k < 0 ? 99 : k; };
  const chosen = [...settings].sort((a, b) => rank(a.name) - rank(b.name)).slice(0, 8);
  const figures: Axis[] = [];
  for (const id of ['peak', 'rate']) {
    const m = report.measure(id);
    if (m.id !== id) continue;
    const values = Float64Array.from({ length: report.count }, (_, i) => m.of(i));
    let low = Infinity, high = -Infinity;
    for (const i of cases) { low = Math.min(low, values[i]!); high = Math.max(high, values[i]!); }
    figures.push({ id, name: m.id === 'rate' ? 'tokens/s' : 'memory', values, discrete: false, low, high, scale: null, ticks: (m.unit === 'B' ? byteTicks(high, 4).filter(v => v >= low) : linearTicks(low, high, 4)).map(v => ({ at: v, text: tick(human(v, m.unit).replace(' tok/s', '')) })) });
  }
  const axes: Axis[] = [...chosen.map((c): Axis => {
    const values = valuesOf(c), place = new Map(values.map((v, k) => [v, k]));
    return { id: c.name, name: c.heading.replaceAll('_', ' '), values: Float64Array.from({ length: report.count }, (_, i) => place.get(c.at(i)) ?? -1), discrete: true, low: 0, high: values.length - 1, scale: null, ticks: values.map((v, k) => ({ at: k, text: axisText(c, v) })) };
  }), ...figures];
  const colour = figures.find(a => a.id === 'rate') ?? figures[0]!;
  const brushes = new Map<string, [number, number]>();
  const scroller = el('div', { class: 'scroll bare', tabindex: 0, role: 'region', 'aria-label': 'Parallel coordinates' }), box = el('div', { class: 'chart', style: `height:${kHeight}px;min-width:${Math.max(320, axes.length * 74)}px` }), canvas = el('canvas', { role: 'img' });
  const over = svg('svg', { focusable: 'false' }), sliders = el('div', { class: 'sliders' }), says = el('p', { class: 'note', role: 'status' });
  box.append(canvas, over);
  scroller.append(box);
  let x: (k: number) => number = () => 0;
  const bin = (i: number): number => { const t = (Math.log(colour.values[i]!) - Math.log(colour.low)) / (Math.log(colour.high) - Math.log(colour.low) || 1); return Math.max(0, Math.min(kBins - 1, Math.floor(t * kBins))); };
  const bins = Uint8Array.from({ length: report.count }, (_, i) => bin(i));

  /// Lines between two neighbouring axes, each once however many cases share it: by end, end and colour.
  function segments(g: CanvasRenderingContext2D, k: number, inside: boolean, alpha: number): void {
    const a = axes[k]!, b = axes[k + 1]!, step = (axis: Axis, i: number): number => Math.round(axis.discrete ? axis.values[i]! : (axis.values[i]! - axis.low) / (axis.high - axis.low || 1) * kSteps);
    const seen = new Map<number, number>();
    if (!inside && state.shown === report.count) return;
    for (const i of cases) {
      if ((state.mask[i] === 1) !== inside) continue;
      const key = ((inside ? bins[i]! : 0) * 1024 + step(a, i)) * 1024 + step(b, i);
      seen.set(key, (seen.get(key) ?? 0) + 1);
    }
    const y = (axis: Axis, s: number): number => axis.scale!(axis.discrete ? s : axis.low + s / kSteps * (axis.high - axis.low || 0));
    const most = Math.max(1, ...seen.values()), byColour = new Map<number, number[]>();
    for (const key of seen.keys()) {
      const c = Math.floor(key / 1048576), keys = byColour.get(c);
      if (keys === undefined) byColour.set(c, [key]); else keys.push(key);
    }
    for (const [c, keys] of [...byColour].sort((p, q) => p[0] - q[0])) {
      g.strokeStyle = inside ? cssOf(sequential(0.25 + 0.75 * c / (kBins - 1))) : css('--line');
      for (const key of keys) {
        const n = seen.get(key)!, from = y(a, Math.floor(key / 1024) % 1024), to = y(b, key % 1024), middle = (x(k) + x(k + 1)) / 2;
        g.globalAlpha = alpha * (0.35 + 0.65 * Math.sqrt(n / most));
        g.lineWidth = 0.8 + 2.2 * Math.sqrt(n / most);
        g.beginPath(); g.moveTo(x(k), from); g.bezierCurveTo(middle, from, middle, to, x(k + 1), to); g.stroke();
      }
    }
    g.globalAlpha = 1;
  }
  function draw(width: number): void {
    x = k => 34 + k / (axes.length - 1) * (width - 82);
    for (const axis of axes) {
      const low = axis.low, high = axis.high > axis.low ? axis.high : axis.low + 1;
      axis.scale = Object.assign((v: number) => kHeight - kBottom - (v - low) / (high - low) * (kHeight - kTop - kBottom), { invert: (p: number) => low + (kHeight - kBottom - p) / (kHeight - kTop - kBottom) * (high - low), ticks: [] as number[], log: false });
    }
    const g = sized(canvas, width, kHeight);
    g.clearRect(0, 0, width, kHeight);
    for (let k = 0; k + 1 < axes.length; ++k) segments(g, k, false, 0.5);
    for (let k = 0; k + 1 < axes.length; ++k) segments(g, k, true, 0.9);
    const i = state.selected;
    if (report.ok(i)) {
      g.strokeStyle = css('--ink'); g.lineWidth = 2.4; g.beginPath();
      axes.forEach((axis, k) => { const y = axis.scale!(axis.values[i]!); if (k === 0) return g.moveTo(x(0), y); const m = (x(k - 1) + x(k)) / 2; g.bezierCurveTo(m, axes[k - 1]!.scale!(axes[k - 1]!.values[i]!), m, y, x(k), y); });
      g.stroke();
    }
    g.font = `600 12px ${kFont}`;
    axes.forEach((axis, k) => {
      g.fillStyle = css('--ink'); g.textAlign = k === 0 ? 'left' : k === axes.length - 1 ? 'right' : 'center';
      g.font = `600 12px ${kFont}`;
      g.fillText(axis.name, k === 0 ? 2 : k === axes.length - 1 ? Math.min(width - 2, x(k) + 40) : x(k), 16);
      g.strokeStyle = css('--soft'); g.lineWidth = 1; g.beginPath(); g.moveTo(Math.round(x(k)) + 0.5, kTop); g.lineTo(Math.round(x(k)) + 0.5, kHeight - kBottom); g.stroke();
      g.font = `12px ${kFont}`; g.textAlign = 'left';
      let last = Infinity;
      for (const t of axis.ticks) {
        const y = axis.scale!(t.at);
        if (last - y < 13 && last !== Infinity) continue;
        last = y;
        const text = t.text.length > 12 ? t.text.slice(0, 11) + '…' : t.text, w = g.measureText(text).width;
        g.globalAlpha = 0.82; g.fillStyle = css('--page'); g.fillRect(x(k) + 4, y - 8, w + 4, 15); g.globalAlpha = 1;
        g.fillStyle = css('--soft'); g.fillText(text, x(k) + 6, y + 4);
      }
    });
    canvas.setAttribute('aria-label', `Parallel coordinates of ${cases.length} cases over ${axes.map(a => a.name).join(', ')}`);
    handles(width);
    says.textContent = state.shown === report.count ? `${whole(cases.length)} cases; a line is deeper the more tokens per second its cases have, and wider the more cases share it.` : `${whole(state.shown)} of ${whole(report.count)} cases pass the filters.`;
  }
  function handles(width: number): void {
    over.setAttribute('viewBox', `0 0 ${width} ${kHeight}`);
    over.replaceChildren(...axes.map((axis, k) => {
      const range = brushes.get(axis.id), zone = svg('rect', { class: 'zone', x: x(k) - 16, y: kTop - 10, width: 32, height: kHeight - kTop - kBottom + 20 });
      let from: number | null = null;
      zone.addEventListener('pointerdown', e => { from = e.offsetY; zone.setPointerCapture(e.pointerId); });
      zone.addEventListener('pointermove', e => {
        if (from === null) return;
        const [a, b] = [axis.scale!.invert(Math.max(from, e.offsetY)), axis.scale!.invert(Math.min(from, e.offsetY))];
        mark.setAttribute('y', String(axis.scale!(b)));
        mark.setAttribute('height', String(Math.max(2, axis.scale!(a) - axis.scale!(b))));
      });
      zone.addEventListener('pointerup', e => {
        if (from === null) return;
        const [a, b] = [axis.scale!.invert(Math.max(from, e.offsetY)), axis.scale!.invert(Math.min(from, e.offsetY))], short = Math.abs(from - e.offsetY) < 4;
        from = null;
        if (short && brushes.has(axis.id)) setBrush(axis, null);
        else if (short && axis.discrete) setBrush(axis, [Math.round(a), Math.round(a)]);
        else if (!short) setBrush(axis, axis.discrete ? [Math.ceil(a - 0.35), Math.floor(b + 0.35)] : [a, b]);
      });
      const pad = axis.discrete ? 7 : 0, mark = svg('rect', { class: 'brushed', x: x(k) - 5, width: 10, y: range ? axis.scale!(range[1]) - pad : 0, height: range ? Math.max(3, axis.scale!(range[0]) - axis.scale!(range[1]) + 2 * pad) : 0 });
      return svg('g', {}, zone, mark);
    }));
  }
  function setBrush(axis: Axis, range: [number, number] | null): void {
    if (range !== null && range[1] < range[0]) range = null;
    if (range === null) brushes.delete(axis.id); else brushes.set(axis.id, range);
    const says = (v: number): string => axis.discrete ? axis.ticks[Math.max(0, Math.min(axis.ticks.length - 1, v))]!.text : tick(human(v, axis.id === 'peak' ? 'B' : 'count'));
    state.filter('axis-' + axis.id, range === null ? '' : `${axis.name} ${range[0] === range[1] ? says(range[0]) : says(range[0]) + ' to ' + says(range[1])}`, range === null ? null : i => axis.values[i]! >= range![0] && axis.values[i]! <= range![1]);
  }
  /// The brushes by keyboard.
  for (const axis of axes.filter(a => a.discrete)) {
    const option = (v: string): HTMLOptionElement => el('option', { value: v }, v === '' ? 'all' : axis.ticks[+v]!.text);
    const box = el('select', { onchange: () => setBrush(axis, box.value === '' ? null : [+box.value, +box.value]) }, option(''), axis.ticks.map((_, k) => option(String(k))));
    sliders.append(el('label', {}, el('span', {}, axis.name), box));
    state.whenFiltered(() => { const r = brushes.get(axis.id); box.value = r !== undefined && r[0] === r[1] ? String(r[0]) : ''; });
  }
  const redraw = drawn(box, draw);
  state.whenFiltered(() => {
    const left = new Set(state.filterWords().map(([key]) => key));
    for (const key of [...brushes.keys()]) if (!left.has('axis-' + key)) brushes.delete(key);
    redraw();
  });
  state.whenSelected(redraw);
  return figure({
    title: 'All settings at once', label: 'Parallel coordinates', chart: [scroller, says, el('details', { class: 'twin' }, el('summary', {}, 'Choose by value'), sliders)],
    note: 'Drag along an axis, or press one of its values, to keep only those cases; press the mark again to let go. The dark line is the selected case.',
  });
}
