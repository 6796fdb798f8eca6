// The heat map: any two settings, and in each cell the best of all cases that have them.
import { axisText, compare, type Column, type Report } from './data';
import { el, select } from './dom';
import { drawn, figure, refreshTwin } from './figure';
import { human, percent, type Value } from './format';
import { cssOf, inkOn, sequential } from './theme';
import type { State } from './state';

interface Cell { best: number; count: number; nofit: number; refused: number; masked: number }

/// The two settings whose values move the best rate most: what a reader asks for first. Of models on devices of different numbers, those two.
function telling(report: Report): [Column, Column] | null {
  const axes = report.axes().filter(c => c.distinct().length <= 16);
  if (axes.length < 2) return null;
  const models = axes.find(c => c.name === 'model'), ranks = axes.find(c => c.name === 'world_size');
  if (models !== undefined && ranks !== undefined) return [models, ranks];
  const preferred = ['tp', 'pp', 'dp', 'world_size', 'model', 'micro_batch', 'zero', 'seq_len', 'cp', 'ep', 'schedule', 'recompute'];
  const weight = (c: Column): number => {
    const rates = [...c.most(report.ranking(), report.rate).values()].filter(r => r > 0);
    const place = preferred.indexOf(c.name), spread = rates.length > 1 ? Math.log(Math.max(...rates) / Math.min(...rates)) : 0;
    return spread + (place < 0 ? 0 : 0.4 - place * 0.02) + (c.distinct().length > 2 ? 0.2 : 0);
  };
  const sorted = axes.map(c => [c, weight(c)] as const).sort((a, b) => b[1] - a[1]).map(([c]) => c);
  const first = sorted.find(c => c.distinct().length > 2) ?? sorted[0]!, second = sorted.find(c => c !== first)!;
  return first.distinct().length > second.distinct().length ? [second, first] : [first, second];
}

/// The words that the layout of every case that ran has.
function wordsOfAll(report: Report): Set<string> {
  let all: string[] = [];
  for (let i = 0, first = true; i < report.count; ++i) {
    if (!report.ok(i)) continue;
    const words = report.layout(i).split(' ');
    all = first ? words : all.filter(w => words.includes(w));
    first = false;
  }
  return new Set(all);
}

export function heatFigure(report: Report, state: State): HTMLElement | null {
  const axes = telling(report);
  if (axes === null) return null;
  // Rates of different models, and of different numbers of devices, are no better or worse than one another.
  let [down, across] = axes, measure = report.measure([down.name, across.name].some(n => n === 'model' || n === 'world_size') ? 'mfu' : 'rate');
  const all = report.axes(), box = el('div', { class: 'heat' });
  const options = (): [string, string][] => all.map(c => [c.name, c.heading]);
  let cells: Map<string, Cell> = new Map();
  const key = (i: number): string => String(down.at(i)) + '|' + String(across.at(i));

  function collect(): void {
    cells = new Map();
    for (let i = 0; i < report.count; ++i) {
      const k = key(i);
      let cell = cells.get(k);
      if (cell === undefined) cells.set(k, (cell = { best: -1, count: 0, nofit: 0, refused: 0, masked: 0 }));
      ++cell.count;
      if (report.status(i) === 'oom') ++cell.nofit;
      if (report.status(i) === 'refused') ++cell.refused;
      if (state.mask[i] === 0) { ++cell.masked; continue; }
      if (!report.ok(i) || !(measure.of(i) > 0)) continue;
      if (cell.best < 0 || (measure.lower ? measure.of(i) < measure.of(cell.best) : measure.of(i) > measure.of(cell.best))) cell.best = i;
    }
  }
  /// 1 for the best value of all, 0 for the worst.
  function goodness(): (i: number) => number {
    const values = [...cells.values()].filter(c => c.best >= 0).map(c => measure.of(c.best)), low = Math.min(...values), high = Math.max(...values);
    const log = low > 0 && high / low > 8, f = (v: number): number => log ? Math.log(v) : v;
    return i => { const t = high > low ? (f(measure.of(i)) - f(low)) / (f(high) - f(low)) : 1; return measure.lower ? 1 - t : t; };
  }
  function why(cell: Cell | undefined): [string, string] {
    if (cell === undefined) return ['', 'not tried'];
    if (cell.masked === cell.count) return ['', 'filtered out'];
    if (cell.nofit > 0) return ['nofit', 'does not fit'];
    return ['none', cell.refused > 0 ? 'refused' : 'none ran'];
  }
  function cellNode(cell: Cell | undefined, good: (i: number) => number, top: number): HTMLElement {
    if (cell === undefined || cell.best < 0) { const [cls, says] = why(cell); return el('td', { class: 'empty ' + cls }, says); }
    const i = cell.best, colour = sequential(good(i)), budget = report.budget(i), peak = report.peak(i);
    return el('td', { class: i === top ? 'best' : null }, el('button', {
      type: 'button', style: `background:${cssOf(colour)};color:${inkOn(colour)}`, 'aria-pressed': String(i === state.selected), 'data-case': i, onclick: () => state.select(i),
      title: report.title(i) + '\n' + cell.count + ' cases' }, el('b', {}, human(measure.of(i), measure.unit)), el('span', {}, rest(i)),
      budget > 0 && peak > 0 && el('span', { class: 'share', style: `--share:${Math.min(1, peak / budget)}` }, 'memory ' + percent(peak / budget))));
  }
  const common = wordsOfAll(report);
  /// The layout without what rows and columns say already, and without what every case has.
  function rest(i: number): string {
    const said = new Set([down, across].map(c => c.name + String(c.at(i))));
    const words = report.layout(i).split(' ').filter(w => !said.has(w) && !common.has(w) && !(w === 'seq' && said.has('sequence_parallel')));
    return words.join(' ').replace('sequence-parallel', 'sp') || report.layout(i);
  }
  /// Numbers of devices at which every case was refused are those of layouts that the devices do not divide into.
  const cellsOf = (c: Column): Value[] => {
    const tried = new Set<Value>();
    for (let i = 0; i < report.count; ++i) if (c.name !== 'world_size' || report.status(i) !== 'refused') tried.add(c.at(i));
    return [...c.distinct()].filter(v => tried.has(v)).sort(compare);
  };
  function draw(): void {
    collect();
    const good = goodness(), rows = cellsOf(down), columns = cellsOf(across);
    let top = -1;
    for (const cell of cells.values()) if (cell.best >= 0 && (top < 0 || (measure.lower ? measure.of(cell.best) < measure.of(top) : measure.of(cell.best) > measure.of(top)))) top = cell.best;
    box.replaceChildren(el('div', { class: 'scroll bare', tabindex: 0, role: 'region', 'aria-label': 'Heat map' }, el('table', { class: columns.length > 6 ? 'tight' : null },
      el('thead', {}, el('tr', {}, el('td', { class: 'corner' }, `${down.heading} ↓   ${across.heading} →`), columns.map(v => el('th', { scope: 'col' }, axisText(across, v))))),
      el('tbody', {}, rows.map(r => el('tr', {}, el('th', { scope: 'row' }, axisText(down, r)), columns.map(c => cellNode(cells.get(String(r) + '|' + String(c)), good, top))))))));
    refreshTwin(box);
  }
  function mark(): void {
    for (const b of box.querySelectorAll('button')) b.setAttribute('aria-pressed', String(+b.dataset.case! === state.selected));
  }
  box.addEventListener('keydown', e => {
    const from = (e.target as Element).closest('td');
    const step: Record<string, [number, number]> = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const move = step[e.key];
    if (from === null || move === undefined) return;
    const row = from.parentElement as HTMLTableRowElement, body = row.parentElement as HTMLTableSectionElement;
    for (let r = row.sectionRowIndex + move[0], c = from.cellIndex + move[1]; r >= 0 && r < body.rows.length && c > 0 && c < row.cells.length; r += move[0], c += move[1]) {
      const button = body.rows[r]!.cells[c]!.querySelector('button');
      if (button !== null) { e.preventDefault(); button.focus(); return; }
    }
  });
  const redraw = drawn(box, draw);
  state.whenFiltered(redraw);
  state.whenPriced(redraw);
  state.whenSelected(mark);
  return figure({
    title: 'The best of each cell', label: 'Heat map of two settings',
    note: 'For every pair of settings the best of all cases that have it: its value, the rest of its layout, and the part of a device’s memory that it takes. Deeper is better; the outlined cell is the best. Choose a cell to see the case everywhere below.',
    controls: [select('Rows', options(), down.name, v => { down = report.column(v); redraw(); }), select('Columns', options(), across.name, v => { across = report.column(v); redraw(); }),
      select('Colour', report.measures().map(m => [m.id, m.name]), measure.id, v => { measure = report.measure(v); redraw(); })],
    chart: box,
  });
}
