// Scaling: how the best rate grows with ranks, sequence length or batch, against what would be ideal.
import { axisText, type Column, type Report } from './data';
import { el, hideTip, select, showTip, svg } from './dom';
import { drawn, figure, refreshTwin } from './figure';
import { count, human, percent, tick, type Value } from './format';
import { scaleOf } from './scale';
import { swatch } from './scatter';
import type { State } from './state';

interface Point { x: number; best: number; rate: number; ideal: number }
const kHeight = 340;

export function scalingFigure(report: Report, state: State): HTMLElement | null {
  const over = ['world_size', 'seq_len', 'global_batch_tokens', 'micro_batch', 'parameters'].map(n => report.column(n)).filter(c => c.distinct().filter(v => typeof v === 'number').length > 1);
  if (over.length === 0) return null;
  let x: Column = over[0]!, by: Column | null = report.column('model').distinct().length > 1 && report.column('model').distinct().length <= 8 && x.name !== 'parameters' ? report.column('model') : null;
  const box = el('div', { class: 'chart' }), legend = el('ul', { class: 'legend' });
  let series: { name: string; points: Point[] }[] = [];

  function collect(): void {
    const groups: Value[] = by === null ? [null] : by.distinct();
    series = groups.map(value => {
      const best = new Map<number, number>();
      for (let i = 0; i < report.count; ++i) {
        if (state.mask[i] === 0 || !report.ok(i) || !(report.rate(i) > 0) || (by !== null && by.at(i) !== value)) continue;
        const v = x.num(i), old = best.get(v);
        if (v > 0 && (old === undefined || report.rate(i) > report.rate(old))) best.set(v, i);
      }
      const sorted = [...best].sort((a, b) => a[0] - b[0]);
      const first = sorted[0];
      // More ranks: as many times the rate. Anything else: the rate that the first value has.
      const points = sorted.map(([v, i]): Point => ({ x: v, best: i, rate: report.rate(i), ideal: first === undefined ? 0 : report.rate(first[1]) * (x.name === 'world_size' ? v / first[0] : x.name === 'parameters' ? first[0] / v : 1) }));
      return { name: by === null ? 'best case' : `${axisText(by, value)}`, points };
    }).filter(s => s.points.length > 0);
  }
  function draw(width: number): void {
    collect();
    const all = series.flatMap(s => s.points), left = 64, right = 16, top = 18, bottom = 44;
    if (all.length === 0) { box.replaceChildren(el('p', { class: 'note' }, 'No case that ran passes the filters.')); return; }
    const xs = all.map(p => p.x), ys = all.flatMap(p => [p.rate, p.ideal]);
    const sx = scaleOf(Math.min(...xs), Math.max(...xs), left + 14, width - right - 14, { log: Math.max(...xs) / Math.min(...xs) > 3 }), sy = scaleOf(Math.min(...ys), Math.max(...ys), kHeight - bottom, top, { zero: true, log: Math.max(...ys) / Math.min(...ys) > 6 });
    const node = svg('svg', { width, height: kHeight, role: 'img', 'aria-label': `Tokens per second over ${x.heading}, ${series.length} lines` });
    for (const t of sy.ticks) node.append(svg('line', { class: 'grid', x1: left, x2: width - right, y1: sy(t), y2: sy(t) }), svg('text', { class: 'tick', x: left - 8, y: sy(t) + 4, 'text-anchor': 'end' }, tick(count(t))));
    let lastLabel = -Infinity;
    for (const v of [...new Set(xs)].sort((a, b) => a - b)) {
      if (sx(v) - lastLabel < 44) continue;
      lastLabel = sx(v);
      node.append(svg('text', { class: 'tick', x: sx(v), y: kHeight - bottom + 20, 'text-anchor': 'middle' }, v >= 10000 ? tick(count(v)) : String(v)));
    }
    node.append(svg('text', { class: 'axis', x: 4, y: 12 }, 'tokens per second'), svg('text', { class: 'axis', x: (left + width - right) / 2, y: kHeight - 6, 'text-anchor': 'middle' }, x.heading === 'ranks' ? 'ranks' : x.heading));
    series.forEach((s, k) => {
      const path = (f: (p: Point) => number): string => s.points.map((p, n) => `${n === 0 ? 'M' : 'L'}${sx(p.x).toFixed(1)} ${sy(f(p)).toFixed(1)}`).join('');
      node.append(svg('path', { class: 'ideal', d: path(p => p.ideal), style: `stroke:var(--c${k % 8})` }), svg('path', { class: 'line', d: path(p => p.rate), style: `stroke:var(--c${k % 8})` }));
      s.points.forEach((p, n) => {
        const dot = svg('circle', { class: 'dot' + (p.best === state.selected ? ' selected' : ''), cx: sx(p.x), cy: sy(p.rate), r: 5, style: `fill:var(--c${k % 8})`, onclick: () => state.select(p.best), onpointerleave: hideTip,
          onpointermove: (e: PointerEvent) => showTip([`${x.heading} ${p.x}: ${count(p.rate)} tokens per second`, report.title(p.best), `${percent(p.rate / p.ideal)} of the ideal`], e.clientX, e.clientY) });
        node.append(dot);
        if (n > 0 && (series.length <= 3 || n === s.points.length - 1)) node.append(svg('text', { class: 'label', x: sx(p.x), y: sy(p.rate) + 19, 'text-anchor': 'middle' }, percent(p.rate / p.ideal)));
      });
    });
    box.replaceChildren(node);
    legend.replaceChildren(...(series.length > 1 ? series.map((s, k) => el('li', {}, swatch(k), s.name)) : []), el('li', {}, el('i', { class: 'dash' }), x.name === 'world_size' ? 'ideal: as many times the rate as ranks' : x.name === 'parameters' ? 'ideal: the same flops' : 'ideal: the same rate'));
    refreshTwin(box);
  }
  const redraw = drawn(box, draw);
  state.whenFiltered(redraw);
  state.whenSelected(redraw);
  const few = report.axes().filter(c => c.distinct().length <= 8);
  return figure({
    title: 'How it scales', label: 'Scaling curves', chart: [box, legend],
    note: 'The best case for each value, with the part of the ideal rate that it reaches.',
    controls: [select('Over', over.map(c => [c.name, c.heading]), x.name, v => { x = report.column(v); redraw(); }),
      select('A line for each', [['', 'nothing'], ...few.map((c): [string, string] => [c.name, c.heading])], by?.name ?? '', v => { by = v === '' ? null : report.column(v); redraw(); })],
    table: () => ({ head: ['line', x.heading, 'tokens per second', 'of the ideal', 'case'], rows: series.flatMap(s => s.points.map(p => [s.name, human(p.x, x.unit), count(p.rate), percent(p.rate / p.ideal), report.title(p.best)])) }),
  });
}
