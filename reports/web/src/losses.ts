// Loss over steps, seconds and tokens; time to a loss; energy and money a token.
import type { LossGroup, Report } from './data';
import { el, hideTip, select, showTip, svg } from './dom';
import { drawn, figure, plainTable, refreshTwin, section } from './figure';
import { count, money, seconds, tick } from './format';
import { scaleOf } from './scale';
import type { State } from './state';

const kHeight = 300, kLines = 40;
type Over = 'steps' | 'seconds' | 'tokens';

function lossFigure(report: Report, state: State, group: LossGroup): HTMLElement {
  const box = el('div', { class: 'chart' }), legend = el('ul', { class: 'legend' });
  let over: Over = 'steps';
  const losses = (i: number): number[] => (report.detail(i)?.losses ?? []) as number[];
  const scale = (i: number): number => over === 'steps' ? 1 : over === 'seconds' ? report.num(i, 'measured_step_s') : report.num(i, 'global_batch_tokens');
  const text = (v: number): string => over === 'steps' ? String(Math.round(v)) : over === 'seconds' ? tick(seconds(v)) : tick(count(v));
  const redraw = drawn(box, width => {
    const cases = group.cases.filter(i => state.mask[i] === 1 && losses(i).length > 0);
    if (cases.length === 0) { box.replaceChildren(el('p', { class: 'note' }, 'No case of this group passes the filters.')); return; }
    const shown = cases.length > kLines ? [...new Set([...cases.slice(0, kLines), ...(cases.includes(state.selected) ? [state.selected] : [])])] : cases, all = shown.flatMap(i => losses(i)).filter(v => Number.isFinite(v) && v !== null);
    const left = 52, right = 14, top = 16, bottom = 42, end = Math.max(...shown.map(i => losses(i).length * scale(i)));
    const target = report.num(shown[0]!, 'target_loss');
    const x = scaleOf(0, end, left, width - right, { zero: true, log: false, most: width < 560 ? 4 : 8 }), y = scaleOf(Math.min(...all, group.unigram ?? Infinity, target > 0 ? target : Infinity), Math.max(...all), kHeight - bottom, top, { log: false });
    const node = svg('svg', { width, height: kHeight, role: 'img', 'aria-label': `Loss over ${over} of ${shown.length} cases: from ${Math.max(...all).toFixed(3)} to ${Math.min(...all).toFixed(3)}` });
    for (const t of y.ticks) node.append(svg('line', { class: 'grid', x1: left, x2: width - right, y1: y(t), y2: y(t) }), svg('text', { class: 'tick', x: left - 8, y: y(t) + 4, 'text-anchor': 'end' }, String(+t.toFixed(4))));
    for (const t of x.ticks) node.append(svg('text', { class: 'tick', x: x(t), y: kHeight - bottom + 18, 'text-anchor': 'middle' }, text(t)));
    node.append(svg('text', { class: 'axis', x: (left + width) / 2, y: kHeight - 6, 'text-anchor': 'middle' }, over === 'seconds' ? 'seconds of training' : over), svg('text', { class: 'axis', x: 2, y: 11 }, 'loss, nats a token'));
    for (const [value, name] of [[group.unigram, 'unigram model'], [target, 'the loss asked for']] as const) if (value !== null && value > 0) node.append(svg('line', { class: 'budget', x1: left, x2: width - right, y1: y(value), y2: y(value) }), svg('text', { class: 'budget', x: width - right, y: y(value) - 5, 'text-anchor': 'end' }, name));
    shown.forEach((i, k) => {
      let d = '';
      losses(i).forEach((v, s) => { if (v !== null && Number.isFinite(v)) d += `${d === '' ? 'M' : 'L'}${x((s + (over === 'steps' ? 0 : 1)) * scale(i)).toFixed(1)} ${y(v).toFixed(1)}`; });
      const lines = [report.title(i), `last loss ${(losses(i)[losses(i).length - 1] ?? NaN).toFixed(4)} after ${text(losses(i).length * scale(i))}${over === 'steps' ? ' steps' : ''}`];
      node.append(svg('path', { class: 'line' + (i === state.selected ? ' selected' : ''), d, style: `stroke:var(--c${k % 8})`, 'stroke-dasharray': k >= 8 ? ['6 3', '2 3', '8 3 2 3'][Math.floor(k / 8 - 1) % 3] : null, onpointermove: (e: PointerEvent) => showTip(lines, e.clientX, e.clientY), onpointerleave: hideTip, onclick: () => state.select(i) }));
    });
    box.replaceChildren(node);
    legend.replaceChildren(...(shown.length <= 8 ? shown.map((i, k) => el('li', {}, swatchLine(k), report.short(i))) : [el('li', {}, `${shown.length} of ${group.cases.length} cases; point at a line for its name`)]));
    refreshTwin(box);
  });
  state.whenFiltered(redraw);
  state.whenSelected(redraw);
  const note = group.cases.length > 1 ? `${group.cases.length} cases train the same; over ${group.steps} steps their losses lie at most ${group.largest_deviation === 0 ? '0' : group.largest_deviation.toPrecision(2)} apart${group.largest_deviation === 0 ? ': equal to the bit, so their lines lie on one another.' : '.'}` : '';
  return figure({ title: group.label, label: 'Loss curves', note, controls: select('Over', [['steps', 'steps'], ['seconds', 'seconds'], ['tokens', 'tokens']], over, v => { over = v as Over; redraw(); }), chart: [box, legend],
    table: () => ({ head: ['case', 'steps', 'first loss', 'last loss', 'seconds', 'tokens', 'tokens to the loss', 'seconds to the loss'], rows: group.cases.map(i => [report.title(i), losses(i).length, (losses(i)[0] ?? NaN).toFixed(4), (losses(i)[losses(i).length - 1] ?? NaN).toFixed(4), seconds(losses(i).length * report.num(i, 'measured_step_s')), count(losses(i).length * report.num(i, 'global_batch_tokens')), cell(report.num(i, 'tokens_to_loss'), count), cell(report.num(i, 'measured_s_to_loss'), seconds)]) }) });
}
const cell = (v: number, f: (v: number) => string): string => Number.isNaN(v) ? '' : f(v);
const swatchLine = (k: number): Element => el('i', { style: `background:var(--c${k % 8});height:3px` });

/// What a token costs, where energy was counted or a price is known.
function costFigure(report: Report, state: State): HTMLElement | null {
  const energy = report.column('energy_j').used, any = energy || report.price > 0 || report.column('world_size').distinct().some(v => typeof v === 'number' && v > 1);
  if (!any || report.count === 0) return null;
  const box = el('div', {}), price = el('input', { type: 'number', min: 0, step: 0.01, value: report.price > 0 ? report.price : '', placeholder: '0', 'aria-label': 'USD for a device-hour' });
  const draw = (): void => {
    const cases = report.ranking().filter(i => state.mask[i] === 1 && report.rate(i) > 0).sort((a, b) => report.deviceHours(a) - report.deviceHours(b) || a - b);
    box.replaceChildren(plainTable({ head: ['case', 'device-hours', ...(report.price > 0 ? ['money'] : []), ...(energy ? ['energy of a token', 'energy'] : [])],
      rows: cases.slice(0, 12).map(i => { const joules = report.num(i, 'energy_j') / report.num(i, 'global_batch_tokens'); return [report.title(i), count(report.deviceHours(i)), ...(report.price > 0 ? [money(report.deviceHours(i) * report.price)] : []), ...(energy ? [Number.isNaN(joules) ? '' : joules.toPrecision(3) + ' J', Number.isNaN(joules) ? '' : (joules * 1e9 / 3.6e6).toPrecision(3) + ' kWh'] : [])]; }) }, 'What a billion tokens cost'));
  };
  price.addEventListener('change', () => { report.price = Math.max(0, +price.value || 0); state.priced(); draw(); });
  state.whenFiltered(draw);
  draw();
  return figure({ title: 'What a billion tokens cost', label: 'Cost of a billion tokens', note: report.doc.price.note !== '' ? `The cheapest cases, at ${report.doc.price.note}.` : 'The cheapest cases. Give the price of a device-hour to have money beside time, here and in every chart.', controls: el('label', {}, el('span', {}, 'USD for a device-hour'), price), chart: box });
}

export function lossSection(report: Report, state: State): void {
  const groups = report.doc.summary.losses.filter(g => g.steps > 1 && g.cases.some(i => (report.detail(i)?.losses?.length ?? 0) > 1));
  if (groups.length > 0) section('losses', 'Loss').append(...groups.slice(0, 8).map(g => lossFigure(report, state, g)));
  const cost = costFigure(report, state);
  if (cost !== null) section('cost', 'Time, energy and money').append(cost);
}
