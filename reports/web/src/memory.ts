// 4. Memory: by class against the device, for every stage and for cases side by side; live bytes over the step.
import type { Report, Stage } from './data';
import { el, hideTip, showTip, svg } from './dom';
import { drawn, figure, refreshTwin, section, type Table } from './figure';
import { bytes, percent, seconds, tick } from './format';
import { labelsOf, wrapped } from './labels';
import { casePicker } from './picker';
import { byteTicks, linearTicks, scaleOf } from './scale';
import type { State } from './state';

const kCases = 24, kLines = 4, kLine = 15, kLetter = 7.9;  // pixels of a line, and of a letter, bold ones too

interface Row { label: string; title: string; memory: number[]; peak: number; measured: number; budget: number; index: number }

function rowOf(report: Report, i: number, label: string): Row {
  const classes = report.doc.classes, column = (name: string): number => report.num(i, name) || 0;
  const side = report.num(i, 'predicted_peak_bytes') > 0 ? 'predicted' : 'measured';
  return { label, title: report.title(i), memory: classes.map(c => column(`${side}_class_${c}`)), peak: report.num(i, side + '_peak_bytes'), measured: report.num(i, 'measured_peak_bytes'), budget: report.budget(i), index: i };
}

/// Bars of memory by class, one a row, with the device's line (a row's own where devices are not alike) and, where it was measured, a mark.
function bars(report: Report, rows: Row[], width: number, select: ((i: number) => void) | null, selected: number): SVGElement {
  const narrow = width < 560, gutter = narrow ? 0 : Math.min(260, width * 0.3), top = 24, right = 76;
  const labels = rows.map(row => wrapped(row.label, Math.floor((narrow ? width : gutter) / kLetter), kLines));
  const heights = labels.map(l => (narrow ? 44 + (l.length - 1) * kLine : Math.max(27, l.length * kLine + 10))), foot = heights.reduce((sum, h) => sum + h, top);
  const most = Math.max(...rows.map(r => Math.max(r.peak, r.measured || 0))), budgets = rows.map(r => r.budget).filter(b => b > 0), largest = Math.max(0, ...budgets), budget = budgets.length > 0 && largest === Math.min(...budgets) ? largest : 0;
  const end = largest > 0 && largest <= 3 * most ? Math.max(most, largest) * 1.02 : most * 1.02, x = (v: number): number => gutter + Math.min(1, v / end) * (width - gutter - right);
  const node = svg('svg', { width, height: foot + 26, role: select ? 'group' : 'img', 'aria-label': 'Memory at the peak: ' + rows.slice(0, 12).map(r => `${r.label} ${bytes(r.peak)}`).join(', ') });
  for (const t of byteTicks(end, narrow ? 3 : 6)) node.append(svg('line', { class: 'grid', x1: x(t), x2: x(t), y1: top - 4, y2: foot }), svg('text', { class: 'tick', x: x(t), y: foot + 17, 'text-anchor': t === 0 ? 'start' : 'middle' }, tick(bytes(t))));
  let next = top;
  rows.forEach((row, r) => {
    const label = labels[r]!, height = heights[r]!, y = next, barTop = narrow ? y + 18 + (label.length - 1) * kLine : y + (height - 17) / 2, first = narrow ? y + 13 : y + height / 2 + 4.5 - (label.length - 1) * kLine / 2, barHeight = narrow ? 16 : 17, g = svg('g', select ? { class: 'pick', tabindex: 0, role: 'button', onclick: () => select(row.index), onkeydown: (e: KeyboardEvent) => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); select(row.index); } } } : {});
    next += height;
    g.append(svg('text', { class: 'name' + (row.index === selected && select ? ' total' : ''), x: 0, y: first }, label.map((line, l) => svg('tspan', { x: 0, y: first + l * kLine }, line + (l + 1 < label.length ? ' ' : '')))));
    let at = 0;
    row.memory.forEach((v, k) => {
      if (v <= 0) return;
      const left = x(at), right = x(at + v);
      at += v;
      g.append(svg('rect', { x: left, y: barTop, width: Math.max(0.5, right - left - (right - left > 3 ? 0.8 : 0)), height: barHeight, style: `fill:var(--c${k % 10})`,
        onpointermove: (e: PointerEvent) => showTip([row.title, `${report.doc.classes[k]}: ${bytes(v)}, ${percent(v / row.peak)} of ${bytes(row.peak)}`], e.clientX, e.clientY), onpointerleave: hideTip }));
    });
    if (row.measured > 0 && row.peak !== row.measured) g.append(svg('line', { class: 'measured', x1: x(row.measured), x2: x(row.measured), y1: barTop - 3, y2: barTop + barHeight + 3 }));
    else if (row.measured > 0) g.append(svg('line', { class: 'measured', x1: x(row.measured), x2: x(row.measured), y1: barTop - 2, y2: barTop + barHeight + 2 }));
    if (budget === 0 && row.budget > 0 && row.budget <= end) g.append(svg('line', { class: 'budget', x1: x(row.budget), x2: x(row.budget), y1: barTop - 4, y2: barTop + barHeight + 4, onpointermove: (e: PointerEvent) => showTip([row.title, `the device has ${bytes(row.budget)}`], e.clientX, e.clientY), onpointerleave: hideTip }));
    g.append(svg('text', { class: 'value', x: Math.min(x(Math.max(row.peak, row.measured || 0)) + 7, width - right + 7), y: barTop + 13 }, (row.peak > end ? '→ ' : '') + bytes(row.peak)));
    node.append(g);
  });
  if (budget > 0 && budget <= end) {
    node.append(svg('line', { class: 'budget', x1: x(budget), x2: x(budget), y1: top - 8, y2: foot }), svg('text', { class: 'budget', x: x(budget) - 4, y: 12, 'text-anchor': 'end' }, 'device ' + tick(bytes(budget))));
  }
  return node;
}

function legendOf(report: Report, rows: Row[]): HTMLElement[] {
  return [...report.doc.classes.map((name, k) => [name, k] as const).filter(([, k]) => rows.some(r => r.memory[k]! > 0)).map(([name, k]) => el('li', {}, el('i', { style: `background:var(--c${k % 10})` }), name)),
    ...(rows.some(r => r.measured > 0) ? [el('li', {}, el('i', { class: 'mark' }), 'measured peak')] : [])];
}

function memoryTable(report: Report, rows: Row[], what: string): Table {
  const classes = report.doc.classes.map((name, k) => [name, k] as const).filter(([, k]) => rows.some(r => r.memory[k]! > 0)), measured = rows.some(r => r.measured > 0);
  return { head: [what, ...classes.map(([name]) => name), 'peak', ...(measured ? ['measured'] : []), 'of the device'],
    rows: rows.map(r => [r.title, ...classes.map(([, k]) => bytes(r.memory[k]!)), bytes(r.peak), ...(measured ? [r.measured > 0 ? bytes(r.measured) : ''] : []), r.budget > 0 ? percent(r.peak / r.budget) : '']) };
}

/// The stages of the selected case, or null.
function stageFigure(report: Report, state: State): HTMLElement | null {
  if (!Object.values(report.doc.details).some(d => (d.stages?.length ?? 0) > 0)) return null;
  const box = el('div', { class: 'chart' }), legend = el('ul', { class: 'legend' }), note = el('p', { class: 'note' });
  let rows: Row[] = [];
  const redraw = drawn(box, width => {
    const stages: Stage[] = report.detail(state.selected)?.stages ?? [];
    rows = stages.map(s => ({ label: stages.length === 1 ? 'every rank' : `stage ${s.stage}${s.device !== undefined ? ` on ${s.device}, ${s.layers} layers` : s.ranks > 1 ? `, ${s.ranks} ranks` : ''}`, title: `stage ${s.stage}`, memory: s.memory, peak: s.peak, measured: s.measured ?? NaN, budget: s.budget ?? report.budget(state.selected), index: state.selected }));
    box.replaceChildren(rows.length === 0 ? el('p', { class: 'note' }, 'This page has the stages of some cases only: the fastest, the smallest and those with a timeline.') : bars(report, rows, width, null, -1));
    legend.replaceChildren(...legendOf(report, rows));
    const worst = stages.reduce<Stage | null>((a, s) => (a === null || s.peak > a.peak ? s : a), null);
    note.textContent = worst !== null && worst.moment !== '' ? `The fullest is stage ${worst.stage}; its peak comes with ${worst.moment}.` : '';
    refreshTwin(box);
  });
  state.whenSelected(redraw);
  return figure({ title: 'Each stage of the selected case', label: 'Memory by stage', note: 'Live bytes of a rank of each stage at its own peak, by class, against the memory of a device.', chart: [box, legend, note], table: () => memoryTable(report, rows, 'stage') });
}

/// Live bytes over the step of a rank of one stage.
function liveFigure(report: Report, state: State): HTMLElement | null {
  if (!report.doc.timelines.some(t => t.live.length > 0)) return null;
  const box = el('div', { class: 'chart' }), items = el('div', {}), bar = el('div', { class: 'bar' });
  let stage = 0, shownCase = -2;
  const kHeight = 250;
  const current = () => report.doc.timelines.find(t => t.index === state.selected && t.live.length > 0);
  const redraw = drawn(box, width => {
    const timeline = current(), curve = timeline?.live[Math.min(stage, (timeline?.live.length ?? 1) - 1)];
    if (timeline === undefined || curve === undefined) { bar.replaceChildren(); items.replaceChildren(); box.replaceChildren(el('p', { class: 'note' }, 'Cases with a timeline have this curve; the selected one has none.')); return; }
    if (shownCase !== state.selected) {
      shownCase = state.selected;
      stage = 0;
      bar.replaceChildren(...(timeline.live.length > 1 ? [el('label', {}, el('span', {}, 'Stage'), (() => { const s = el('select', { onchange: () => { stage = +s.value; redraw(); } }, timeline.live.map((l, k) => el('option', { value: k }, `${l.stage} (rank ${l.rank})`))); return s; })())] : []));
    }
    const left = 64, right = 12, top = 22, bottom = 34, n = curve.t.length, end = Math.max(curve.t[n - 1]! * 1.01, 1e-3);
    const totals = curve.t.map((_, k) => curve.bytes.reduce((sum, b) => sum + b[k]!, 0)), peak = Math.max(...totals), budget = report.budget(state.selected), high = budget > 0 && budget < 2 * peak ? Math.max(budget, peak) : peak;
    const x = (us: number): number => left + us / end * (width - left - right), sy = scaleOf(0, high, kHeight - bottom, top, { zero: true, log: false });
    const node = svg('svg', { width, height: kHeight, role: 'img', 'aria-label': `Live bytes over the step, stage ${curve.stage}: from ${bytes(totals[0]!)} to a peak of ${bytes(peak)}` });
    for (const t of byteTicks(high * 1.02, 4)) node.append(svg('line', { class: 'grid', x1: left, x2: width - right, y1: sy(t), y2: sy(t) }), svg('text', { class: 'tick', x: left - 8, y: sy(t) + 4, 'text-anchor': 'end' }, tick(bytes(t))));
    for (const t of linearTicks(0, end, width < 560 ? 3 : 7)) node.append(svg('text', { class: 'tick', x: x(t), y: kHeight - bottom + 18, 'text-anchor': t === 0 ? 'start' : 'middle' }, tick(seconds(t * 1e-6))));
    const base = totals.map(() => 0);
    curve.bytes.forEach((list, c) => {
      if (!list.some(v => v > 0)) return;
      let up = '', down = '';
      for (let k = 0; k < n; ++k) {
        const from = base[k]!, to = from + list[k]!, x0 = x(curve.t[k]!).toFixed(1), x1 = x(k + 1 < n ? curve.t[k + 1]! : end).toFixed(1);
        up += `${k === 0 ? 'M' : 'L'}${x0} ${sy(to).toFixed(1)}L${x1} ${sy(to).toFixed(1)}`;
        down = `L${x1} ${sy(from).toFixed(1)}L${x0} ${sy(from).toFixed(1)}` + down;
        base[k] = to;
      }
      node.append(svg('path', { d: up + down + 'Z', style: `fill:var(--c${c % 10})` }, svg('title', {}, report.doc.classes[c]!)));
    });
    const at = totals.indexOf(peak);
    node.append(svg('line', { class: 'measured', x1: x(curve.t[at]!), x2: x(curve.t[at]!), y1: sy(peak) - 4, y2: kHeight - bottom }), svg('text', { class: 'label', x: Math.max(left + 40, Math.min(x(curve.t[at]!), width - 90)), y: sy(peak) - 8, 'text-anchor': 'middle' }, `peak ${bytes(peak)}`));
    if (budget > 0 && budget <= high) node.append(svg('line', { class: 'budget', x1: left, x2: width - right, y1: sy(budget), y2: sy(budget) }));
    box.replaceChildren(node);
    const shown = curve.items.slice(0, 8);
    items.replaceChildren(el('p', { class: 'note' }, 'At the peak live: ' + shown.map(([name, , b]) => `${name} ${bytes(b)}`).join(', ') + (curve.items.length > shown.length ? ' and more.' : '.')));
    refreshTwin(box);
  });
  state.whenSelected(redraw);
  return figure({ title: 'Live bytes over the step', label: 'Live bytes over the step', note: 'What is allocated at each moment of the step, by class; the upright line is the peak.', controls: bar, chart: [box, items],
    table: () => { const curve = current()?.live[stage]; return curve === undefined ? { head: ['buffer'], rows: [] } : { head: ['buffer at the peak', 'class', 'bytes'], rows: curve.items.map(([name, cls, b]) => [name, cls, bytes(b)]) }; } });
}

export function memorySection(report: Report, state: State): void {
  const withMemory: number[] = [];
  for (let i = 0; i < report.count; ++i) if (report.num(i, 'predicted_peak_bytes') > 0 || report.num(i, 'measured_peak_bytes') > 0) withMemory.push(i);
  if (withMemory.length === 0) return;
  const node = section('memory', 'Memory'), box = el('div', { class: 'chart' }), legend = el('ul', { class: 'legend' }), alike = el('p', { class: 'note' });
  node.append(casePicker(report, state, false), ...[stageFigure(report, state), liveFigure(report, state)].filter((f): f is HTMLElement => f !== null));
  let rows: Row[] = [];
  function chosen(): number[] {
    const inside = withMemory.filter(i => state.mask[i] === 1);
    if (inside.length <= kCases) return inside;
    const sorted = inside.filter(i => report.ok(i)).sort((a, b) => (report.rate(b) || 0) - (report.rate(a) || 0)), nofit = inside.filter(i => !report.ok(i)).sort((a, b) => report.peak(a) - report.peak(b));
    const list = [...sorted.slice(0, kCases - 5), ...nofit.slice(0, 4)];
    for (const i of [report.doc.summary.smallest, state.selected]) if (i >= 0 && state.mask[i] === 1 && withMemory.includes(i) && !list.includes(i)) list.push(i);
    return list;
  }
  const redraw = drawn(box, width => {
    const cases = chosen(), labels = labelsOf(report, cases);
    rows = cases.map((i, k) => rowOf(report, i, labels.of[k]!));
    alike.textContent = labels.common !== '' ? 'In all of them: ' + labels.common + '.' : '';
    box.replaceChildren(rows.length === 0 ? el('p', { class: 'note' }, 'No case passes the filters.') : bars(report, rows, width, i => state.select(i), state.selected));
    legend.replaceChildren(...legendOf(report, rows));
    refreshTwin(box);
  });
  state.whenSelected(redraw);
  state.whenFiltered(redraw);
  node.append(figure({ title: 'Cases side by side', label: 'Memory of cases', chart: [box, legend, alike],
    note: withMemory.length > kCases ? 'Live bytes of the fullest rank at its peak: the fastest cases, the smallest, and those that miss the device by least.' : 'Live bytes of the fullest rank at its peak, by class. Predicted; the upright mark is measured.',
    table: () => memoryTable(report, rows, 'case') }));
}
