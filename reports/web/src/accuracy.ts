// 6. Predicted against measured: every case, every op, and by kind of op how far off.
import type { OpRow, Report } from './data';
import { el, hideTip, select, showTip, svg } from './dom';
import { drawn, figure, refreshTwin, section } from './figure';
import { percent, seconds, signed, tick } from './format';
import { scaleOf } from './scale';
import type { State } from './state';

const kHeight = 360;

function scatter(report: Report, state: State, cases: number[]): HTMLElement {
  const box = el('div', { class: 'chart' });
  const redraw = drawn(box, width => {
    const p = (i: number): number => report.num(i, 'predicted_step_s'), m = (i: number): number => report.num(i, 'measured_step_s'), spread = (i: number): number => report.num(i, 'step_spread') || 0;
    const all = cases.flatMap(i => [p(i), m(i)]), low = Math.min(...all), high = Math.max(...all), left = 66, top = 12, bottom = 44, size = Math.min(width, 620);
    const x = scaleOf(low, high, left, size - 14, { log: high / low > 4, most: size < 500 ? 3 : 5 }), y = scaleOf(low, high, kHeight - bottom, top, { log: high / low > 4, most: 5 });
    const node = svg('svg', { width: size, height: kHeight, role: 'group', 'aria-label': `Predicted against measured step time of ${cases.length} cases` });
    const clip = svg('clipPath', { id: 'plot' }, svg('rect', { x: left, y: top, width: size - 14 - left, height: kHeight - bottom - top }));
    node.append(svg('defs', {}, clip));
    for (const t of y.ticks) node.append(svg('line', { class: 'grid', x1: left, x2: size - 14, y1: y(t), y2: y(t) }), svg('text', { class: 'tick', x: left - 8, y: y(t) + 4, 'text-anchor': 'end' }, tick(seconds(t))));
    for (const t of x.ticks) node.append(svg('text', { class: 'tick', x: x(t), y: kHeight - bottom + 18, 'text-anchor': 'middle' }, tick(seconds(t))));
    const a = x.invert(left), b = x.invert(size - 14), band = (f: number): string => Array.from({ length: 25 }, (_, k) => { const v = a + (b - a) * k / 24; return `${x(v).toFixed(1)} ${y(Math.max(v * f, 1e-12)).toFixed(1)}`; }).join('L');
    node.append(svg('path', { class: 'band', d: `M${band(0.9)}L${band(1.1).split('L').reverse().join('L')}Z`, 'clip-path': 'url(#plot)' }), svg('path', { class: 'ideal', d: 'M' + band(1), 'clip-path': 'url(#plot)', style: 'stroke:var(--soft)' }));
    node.append(svg('text', { class: 'axis', x: (left + size) / 2, y: kHeight - 6, 'text-anchor': 'middle' }, 'measured step'), svg('text', { class: 'axis', x: 2, y: 10 }, 'predicted step'));
    for (const i of cases) {
      if (state.mask[i] === 0) continue;
      const error = report.num(i, 'step_error_pct'), lines = [report.title(i), `measured ${seconds(m(i))}, predicted ${seconds(p(i))}`, `error ${signed(error)}, spread ${percent(spread(i))}`];
      if (spread(i) > 0) node.append(svg('line', { class: 'spread', x1: x(m(i) * (1 - spread(i) / 2)), x2: x(m(i) * (1 + spread(i) / 2)), y1: y(p(i)), y2: y(p(i)) }));
      node.append(svg('circle', { class: 'dot' + (i === state.selected ? ' selected' : ''), cx: x(m(i)), cy: y(p(i)), r: 5.5, tabindex: cases.length <= 60 ? 0 : null, role: 'button', 'aria-label': lines.join(', '), style: `fill:var(${Math.abs(error) <= 10 ? '--c0' : '--c1'})`,
        onclick: () => state.select(i), onkeydown: (e: KeyboardEvent) => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); state.select(i); } }, onpointermove: (e: PointerEvent) => showTip(lines, e.clientX, e.clientY), onpointerleave: hideTip }));
    }
    box.replaceChildren(node);
    refreshTwin(box);
  });
  state.whenFiltered(redraw);
  state.whenSelected(redraw);
  return figure({ title: 'Every case', label: 'Predicted against measured', chart: [box, el('ul', { class: 'legend' }, el('li', {}, el('i', { style: 'background:var(--c0)' }), 'within 10 %'), el('li', {}, el('i', { style: 'background:var(--c1)' }), 'further off'), el('li', {}, el('i', { class: 'whisker' }), 'spread of the steps, p10 to p90'))],
    note: 'On the dashed line prediction and measurement agree; the band is 10 %.',
    table: () => ({ head: ['case', 'measured', 'predicted', 'error', 'spread', 'repeats', 'samples'], rows: cases.map(i => [report.title(i), seconds(m2(report, i)), seconds(report.num(i, 'predicted_step_s')), signed(report.num(i, 'step_error_pct')), percent(report.num(i, 'step_spread') || 0), report.text(i, 'repeats'), report.text(i, 'samples')]) }) });
}
const m2 = (report: Report, i: number): number => report.num(i, 'measured_step_s');

// ---- Errors by kind of op ------------------------------------------------------------------------------------------------------

interface Kind { kind: string; predicted: number; measured: number; logs: { log: number; weight: number }[] }

function kindsOf(rows: OpRow[][]): Kind[] {
  const kinds = new Map<string, Kind>();
  for (const list of rows) for (const op of list) {
    const [predicted, measured] = [op[7], op[8]];
    if (!(predicted > 0) || !(measured > 0)) continue;
    const kind = kinds.get(op[2]) ?? { kind: op[2], predicted: 0, measured: 0, logs: [] };
    kind.predicted += predicted;
    kind.measured += measured;
    kind.logs.push({ log: Math.log2(predicted / measured), weight: measured });
    kinds.set(op[2], kind);
  }
  return [...kinds.values()].sort((a, b) => b.measured - a.measured);
}

function histogram(report: Report, state: State): HTMLElement | null {
  const cases = Object.keys(report.doc.details).map(Number).filter(i => report.detail(i)?.ops?.some(op => op[7] > 0 && op[8] > 0));
  if (cases.length === 0) return null;
  const box = el('div', { class: 'chart' });
  let which = 'all', kinds: Kind[] = [];
  const kBins = 24, kRange = 2;  // from four times too fast to four times too slow
  const redraw = drawn(box, width => {
    const chosen = which === 'all' ? cases.filter(i => state.mask[i] === 1) : cases.includes(state.selected) ? [state.selected] : [];
    kinds = kindsOf(chosen.map(i => report.detail(i)!.ops!)).slice(0, 14);
    if (kinds.length === 0) { box.replaceChildren(el('p', { class: 'note' }, 'No op of these cases has both a prediction and a measurement.')); return; }
    const narrow = width < 560, gutter = narrow ? 108 : 150, right = narrow ? 64 : 190, row = 34, top = 26, x = (log: number): number => gutter + (Math.max(-kRange, Math.min(kRange, log)) + kRange) / (2 * kRange) * (width - gutter - right);
    const node = svg('svg', { width, height: top + kinds.length * row + 30, role: 'img', 'aria-label': 'Error by kind of op: ' + kinds.map(k => `${k.kind} ${percent(k.predicted / k.measured - 1)}`).join(', ') });
    for (const [log, text] of [[-2, '¼'], [-1, '½'], [0, 'exact'], [1, '2 times'], [2, '4 times']] as const) node.append(svg('line', { class: log === 0 ? 'rule' : 'grid', x1: x(log), x2: x(log), y1: top - 8, y2: top + kinds.length * row }), svg('text', { class: 'tick', x: x(log), y: top + kinds.length * row + 18, 'text-anchor': 'middle' }, text));
    node.append(svg('text', { class: 'tick', x: gutter, y: 12 }, '← predicted too fast'), svg('text', { class: 'tick', x: width - right, y: 12, 'text-anchor': 'end' }, 'too slow →'));
    kinds.forEach((kind, r) => {
      const y = top + r * row, bins = new Array<number>(kBins).fill(0);
      for (const { log, weight } of kind.logs) { const b = Math.max(0, Math.min(kBins - 1, Math.floor((log + kRange) / (2 * kRange) * kBins))); bins[b] = bins[b]! + weight; }
      const most = Math.max(...bins), step = (width - gutter - right) / kBins;
      node.append(svg('text', { class: 'name', x: 0, y: y + 22 }, kind.kind));
      bins.forEach((v, b) => { if (v > 0) node.append(svg('rect', { x: gutter + b * step, y: y + row - 6 - v / most * (row - 10), width: Math.max(1, step - 1), height: v / most * (row - 10), style: `fill:var(${Math.abs((b + 0.5) / kBins * 2 * kRange - kRange) <= 0.17 ? '--c0' : '--c1'})` })); });
      node.append(svg('text', { class: 'value', x: width - right + 10, y: y + 22 }, narrow ? signed(100 * (kind.predicted / kind.measured - 1)).replace(/\.\d+/, '') : `${signed(100 * (kind.predicted / kind.measured - 1))} of ${seconds(kind.measured)}`));
    });
    box.replaceChildren(node);
    refreshTwin(box);
  });
  state.whenFiltered(redraw);
  state.whenSelected(redraw);
  return figure({ title: 'Error by kind of op', label: 'Histogram of errors by kind of op', chart: box,
    note: 'For each kind, how much of its measured time lies in ops that were predicted how far off. On the right, the kind as a whole.',
    controls: select('Of', [['all', 'all cases'], ['one', 'the selected case']], which, v => { which = v; redraw(); }),
    table: () => ({ head: ['kind', 'measured', 'predicted', 'predicted / measured − 1', 'ops'], rows: kinds.map(k => [k.kind, seconds(k.measured), seconds(k.predicted), signed(100 * (k.predicted / k.measured - 1)), k.logs.length]) }) });
}

/// Ops of the selected case, the longest first.
function opsFigure(report: Report, state: State): HTMLElement | null {
  if (!Object.values(report.doc.details).some(d => (d.ops?.length ?? 0) > 0)) return null;
  const box = el('div', {});
  const draw = (): void => {
    const ops = report.detail(state.selected)?.ops ?? [], measured = ops.some(o => o[8] > 0), by = measured ? 8 : 7, total = ops.reduce((s, o) => s + o[by], 0);
    if (ops.length === 0) return box.replaceChildren(el('p', { class: 'note' }, 'This case has no record of its ops.'));
    const sorted = [...ops].sort((a, b) => b[by] - a[by]);
    box.replaceChildren(el('div', { class: 'scroll', style: 'max-height:26rem', tabindex: 0, role: 'region', 'aria-label': 'Ops of the selected case' }, el('table', {},
      el('thead', {}, el('tr', {}, ['stage', 'op', 'kind', 'count', 'predicted', 'measured', 'residual', 'share'].map((h, k) => el('th', { scope: 'col', class: k === 0 || k > 2 ? 'n' : null }, h)))),
      el('tbody', {}, sorted.slice(0, 120).map(o => el('tr', {}, el('td', { class: 'n' }, o[0]), el('td', {}, o[1]), el('td', {}, o[2]), el('td', { class: 'n' }, o[3]), el('td', { class: 'n' }, o[7] > 0 ? seconds(o[7]) : ''), el('td', { class: 'n' }, o[8] > 0 ? seconds(o[8]) : ''),
        el('td', { class: 'n ' + (o[7] > 0 && o[8] > 0 && Math.abs(o[8] / o[7] - 1) > 0.1 ? 'far' : '') }, o[7] > 0 && o[8] > 0 ? signed(100 * (o[8] - o[7]) / o[7]) : ''), el('td', { class: 'n' }, percent(o[by] / total))))))),
      ops.length > 120 ? el('p', { class: 'note' }, `The first 120 of ${ops.length} ops; shardlab explain has all.`) : '');
  };
  state.whenSelected(draw);
  draw();
  return figure({ title: 'Ops of the selected case', label: 'Ops of the selected case', note: 'Seconds over a step of one rank of the stage; residual is measured minus predicted, of predicted.', chart: box });
}

export function predictionSection(report: Report, state: State): void {
  const both: number[] = [];
  for (let i = 0; i < report.count; ++i) if (report.ok(i) && report.num(i, 'predicted_step_s') > 0 && report.num(i, 'measured_step_s') > 0) both.push(i);
  const figures = [both.length > 0 ? scatter(report, state, both) : null, histogram(report, state), opsFigure(report, state)].filter((f): f is HTMLElement => f !== null);
  if (figures.length === 0) return;
  section('prediction', both.length > 0 ? 'Predicted against measured' : 'Op by op').append(...figures);
}
