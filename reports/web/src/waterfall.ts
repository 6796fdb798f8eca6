// 3. Why is it slow: from ideal compute to the step, for one case and for two side by side.
import type { CollectiveRow, Report } from './data';
import { el, svg, type Child } from './dom';
import { drawn, figure, plainTable, refreshTwin, section } from './figure';
import { bytes, percent, seconds } from './format';
import { kGroupColour, partsOf, type Part } from './parts';
import { casePicker } from './picker';
import { scaleOf } from './scale';
import type { State } from './state';

interface Side { label: string; parts: Part[]; total: number }

function sidesOf(report: Report, state: State): Side[] {
  const sides: Side[] = [];
  const add = (i: number, measured: boolean, label: string): void => {
    const parts = partsOf(report, i, measured);
    if (parts !== null) sides.push({ label, parts, total: parts.reduce((sum, p) => sum + p.seconds, 0) });
  };
  if (state.other >= 0 && state.other !== state.selected) {
    for (const i of [state.selected, state.other]) add(i, report.measured && report.num(i, 'measured_step_s') > 0, report.short(i));
  } else {
    add(state.selected, false, 'predicted');
    add(state.selected, true, 'measured');
  }
  return sides.slice(0, 2);
}

/// The parts that some side has, in their order, with the sides' seconds.
function rowsOf(report: Report, sides: Side[]): { part: Part; values: number[] }[] {
  return report.doc.parts.map(id => ({ found: sides.map(s => s.parts.find(p => p.id === id)) }))
    .filter(r => r.found.some(p => p !== undefined))
    .map(r => ({ part: r.found.find(p => p !== undefined)!, values: r.found.map(p => p?.seconds ?? 0) }));
}

function picture(report: Report, sides: Side[], width: number): SVGElement {
  const rows = rowsOf(report, sides), two = sides.length === 2, bar = two ? 11 : 16, height = two ? 40 : 34, gutter = width < 560 ? 112 : 178, right = width < 560 ? 66 : 150;
  const most = Math.max(...sides.map(s => s.total)), x = scaleOf(0, most, gutter, width - right, { zero: true, most: width < 560 ? 2 : 6, log: false }), head = two ? 40 : 22, bottom = head + (rows.length + 1) * height;
  const node = svg('svg', { width, height: bottom + 24, role: 'img', 'aria-label': `Waterfall: ${sides.map(s => `${s.label}, ${rows.map((r, k) => r.part.name + ' ' + seconds(s.parts.find(p => p.id === rows[k]!.part.id)?.seconds ?? 0)).join(', ')}, together ${seconds(s.total)}`).join('; ')}` });
  for (const t of x.ticks) node.append(svg('line', { class: 'grid', x1: x(t), x2: x(t), y1: head - 6, y2: bottom }), svg('text', { class: 'tick', x: x(t), y: bottom + 16, 'text-anchor': t === 0 ? 'start' : 'middle' }, seconds(t).replace(/\.0+ /, ' ')));
  if (two) sides.forEach((s, k) => node.append(svg('rect', { x: gutter + k * (width - gutter) / 2, y: 3, width: 12, height: 10, class: k === 0 ? 'side-a' : 'side-b' }), svg('text', { class: 'label', x: gutter + 17 + k * (width - gutter) / 2, y: 13 }, s.label.slice(0, width < 560 ? 14 : 44))));
  const before = sides.map(() => 0);
  rows.forEach((row, r) => {
    const y = head + r * height;
    node.append(svg('text', { class: 'name', x: 0, y: y + height / 2 + 1 }, row.part.name));
    row.values.forEach((v, k) => {
      const top = y + (two ? 4 + k * (bar + 2) : (height - bar) / 2 - 3), from = before[k]!;
      before[k] = from + v;
      if (r > 0 && v > 0) node.append(svg('line', { class: 'step', x1: x(from), x2: x(from), y1: y - (two ? 8 : 10), y2: top }));
      node.append(svg('rect', { x: x(from), y: top, width: Math.max(v > 0 ? 1 : 0, x(from + v) - x(from)), height: bar, class: k === 1 ? 'second' : null, style: `fill:var(${kGroupColour[row.part.group]!})` }, svg('title', {}, `${row.part.name}: ${row.part.help}`)));
      if (v > 0) node.append(svg('text', { class: 'value', x: Math.min(x(from + v) + 6, width - right + 6), y: top + bar - (two ? 1.5 : 3.5) }, width < 560 ? seconds(v) : `${seconds(v)} · ${percent(v / sides[k]!.total)}`));
    });
  });
  const y = head + rows.length * height;
  node.append(svg('line', { class: 'rule', x1: 0, x2: width, y1: y - 1, y2: y - 1 }), svg('text', { class: 'name total', x: 0, y: y + height / 2 + 3 }, 'the step'));
  sides.forEach((s, k) => {
    const top = y + (two ? 5 + k * (bar + 2) : (height - bar) / 2);
    node.append(svg('rect', { x: x(0), y: top, width: x(s.total) - x(0), height: bar, class: 'sum' + (k === 1 ? ' second' : '') }), svg('text', { class: 'value total', x: x(s.total) + 6, y: top + bar - (two ? 1.5 : 3.5) }, seconds(s.total)));
  });
  return node;
}

/// The algorithm of each collective of a case, and what its group's other algorithms are predicted to take.
function algorithms(label: string, rows: CollectiveRow[]): Child[] {
  const others = (row: CollectiveRow): string => row[9].filter(p => p[0] !== row[7]).map(p => `${p[0]} ${seconds(p[1])}`).join(', ');
  const own = (row: CollectiveRow): string => row[9].filter(p => p[0] === row[7]).map(p => seconds(p[1])).join('');
  return [el('h3', {}, 'Algorithms of collectives: ' + label),
    el('p', { class: 'note' }, 'Predicted times are of one run, alone on the machine. Without any, the algorithm follows from kind and number of ranks.'),
    plainTable({ head: ['op', 'kind', 'among', 'buffer', 'runs in a step', 'algorithm', 'why', 'predicted', 'the others'],
      rows: rows.map(r => [r[0], r[1], `${r[3]} ranks of ${r[2]}` + (r[4] > 1 ? ` on ${r[4]} nodes` : ''), bytes(r[5]), r[6], r[7], r[8], own(r), others(r)]) }, 'Algorithms of collectives')];
}

export function waterfallSection(report: Report, state: State): void {
  let any = false;
  for (let i = 0; i < report.count && !any; ++i) any = partsOf(report, i, false) !== null || partsOf(report, i, true) !== null;
  if (!any) return;
  const node = section('why', 'Why is it slow?'), box = el('div', { class: 'chart waterfall' }), why = el('div', { class: 'prose', 'aria-live': 'polite' }), which = el('div', { class: 'algorithms' });
  let sides: Side[] = [];
  const legend = el('ul', { class: 'legend' }, ([['ideal', 'ideal compute'], ['compute', 'more compute'], ['comm', 'exposed communication'], ['bubble', 'bubble'], ['copies', 'copies'], ['idle', 'idle']] as const).map(([g, name]) => el('li', {}, el('i', { style: `background:var(${kGroupColour[g]!})` }), name)));
  const redraw = drawn(box, width => {
    sides = sidesOf(report, state);
    box.replaceChildren(sides.length === 0 ? el('p', { class: 'note' }, 'Nothing is known of this case’s step: ' + (report.text(state.selected, 'reason') || report.status(state.selected)) + '.') : picture(report, sides, width));
    refreshTwin(box);
  });
  const words = (): void => {
    const list = report.detail(state.selected)?.reasons ?? [];
    const parts: Child[] = list.length > 0 ? [el('h3', {}, 'In words: ' + report.short(state.selected)), el('ul', { class: 'why' }, list.map(r => el('li', {}, r)))] : [];
    why.replaceChildren(...(parts as Node[]));
    const rows = report.detail(state.selected)?.collectives ?? [];
    which.replaceChildren(...(rows.length > 0 ? algorithms(report.short(state.selected), rows) as Node[] : []));
  };
  state.whenSelected(() => { redraw(); words(); });
  words();
  node.append(casePicker(report, state, true), figure({
    title: 'From ideal compute to the step', label: 'Waterfall of a step', chart: [box, legend],
    note: 'Each bar begins where the one before it ends; together they are the step of the slowest rank, and nothing is left out. Choose a second case to see where two differ; without one, predicted stands beside measured.',
    table: () => ({ head: ['part', ...sides.flatMap(s => [s.label, 'share']), ...(sides.length === 2 ? ['difference'] : []), 'what it is'],
      rows: [...rowsOf(report, sides).map(r => [r.part.name, ...r.values.flatMap((v, k) => [seconds(v), percent(v / sides[k]!.total)]), ...(sides.length === 2 ? [seconds(r.values[1]! - r.values[0]!)] : []), r.part.help]),
        ['the step', ...sides.flatMap(s => [seconds(s.total), '100 %']), ...(sides.length === 2 ? [seconds(sides[1]!.total - sides[0]!.total)] : []), 'their sum']] }),
  }), why, which);
}
