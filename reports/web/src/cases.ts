// 7. The ranked table: virtual, so that any number of cases scrolls; sort, filter, columns, CSV.
import { compare, type Column, type Report } from './data';
import { el } from './dom';
import { section } from './figure';
import { human, whole, type Value } from './format';
import { kStatusWords } from './answer';
import type { State } from './state';

const kRow = 31, kWindow = 620, kPrinted = 200, kSettings = 16;
const kFigures = ['predicted_step_s', 'measured_step_s', 'step_error_pct', 'measured_tokens_per_s', 'predicted_tokens_per_s', 'predicted_mfu', 'measured_mfu', 'reserved_bytes', 'predicted_peak_bytes', 'measured_peak_bytes', 'predicted_bubble_fraction',
  'predicted_exposed_comm_s', 'predicted_wire_bytes', 'measured_wire_bytes', 'unplanned_time_s', 'loss_last', 'tokens_to_loss', 'measured_s_to_loss', 'energy_j', 'usd', 'rank', 'pareto', 'verdict'];

/// Whether a case passes one word of the filter: "tp=2", "predicted_step_s<0.1", or text that its row holds.
export function passes(report: Report, i: number, term: string): boolean {
  const m = /^([a-z_0-9]+)(<=|>=|!=|=|<|>)(.*)$/.exec(term), column = m === null ? undefined : report.columns.find(c => c.name === m[1] || c.heading === m[1]);
  if (m === null || column === undefined) return report.columns.some(c => { const v = c.at(i); return v !== null && String(v).toLowerCase().includes(term); });
  const v = column.at(i);
  if (v === null) return false;
  const a: string | number = typeof v === 'number' ? v : String(v).toLowerCase(), b: string | number = typeof v === 'number' ? +m[3]! : m[3]!;
  switch (m[2]) {
    case '=': return a === b;
    case '!=': return a !== b;
    case '<': return a < b;
    case '>': return a > b;
    case '<=': return a <= b;
    default: return a >= b;
  }
}

/// A field of CSV as reports/escape.cpp writes it: a text that a spreadsheet would take for a formula begins with an apostrophe.
export function csvField(v: Value): string {
  if (v === null) return '';
  if (typeof v !== 'string') return String(v);
  const text = /^[=+\-@\t\r]/.test(v) && Number.isNaN(Number(v)) ? "'" + v : v;
  return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}

export function casesSection(report: Report, state: State): void {
  const node = section('cases', 'Every case', 'Press a heading to sort and a row to select it everywhere. The filter takes words and comparisons: tp=2 predicted_step_s<0.1');
  const few = report.axes().filter(c => !['machine', 'seed'].includes(c.name));
  const mixed = report.column('predicted_by').distinct().filter(v => v !== null).length > 1;
  let shown: Column[] = [report.column('name'), ...(few.length === 0 || report.count < 40 ? [report.column('layout')] : []), report.column('status'), ...(mixed ? [report.column('predicted_by')] : []), ...few.slice(0, kSettings),
    ...kFigures.map(n => report.columns.find(c => c.name === n)).filter((c): c is Column => c !== undefined && c.used), report.column('reason')].filter(c => c.used);
  if (report.count >= 40 && few.length > 2) shown = shown.filter(c => c.name !== 'name');  // what its name says stands in the columns
  if (report.column('measured_tokens_per_s').used) shown = shown.filter(c => c.name !== 'predicted_tokens_per_s');
  shown = [...new Set(shown)];
  let sort: { column: Column | null; up: boolean } = { column: null, up: true }, rows: number[] = [], active = 0;
  const filter = el('input', { type: 'search', placeholder: 'Filter', 'aria-label': 'Filter cases' }), tally = el('span', { class: 'note', role: 'status' });
  const chips = el('div', { class: 'chips' }), table = el('table', { class: 'cases', 'aria-label': 'Cases' }), scroller = el('div', { class: 'scroll tall', tabindex: 0, role: 'region', 'aria-label': 'Table of cases' }, table);
  const head = el('thead', {}), body = el('tbody', {});
  table.append(head, body);
  let waiting = 0;
  filter.addEventListener('input', () => { clearTimeout(waiting); waiting = window.setTimeout(() => {
    const terms = filter.value.toLowerCase().split(/\s+/).filter(t => t !== '');
    state.filter('text', '“' + filter.value + '”', terms.length === 0 ? null : i => terms.every(t => passes(report, i, t)));
  }, report.count > 2000 ? 180 : 0); });
  const statuses = new Map<string, number>();
  for (let i = 0; i < report.count; ++i) statuses.set(report.status(i), (statuses.get(report.status(i)) ?? 0) + 1);
  const off = new Set<string>();
  const boxes = statuses.size < 2 ? [] : [...statuses].map(([s, n]) => el('label', {}, el('input', { type: 'checkbox', checked: true, onchange: (e: Event) => {
    if ((e.target as HTMLInputElement).checked) off.delete(s); else off.add(s);
    state.filter('status', 'without ' + [...off].map(o => kStatusWords[o] ?? o).join(', '), off.size === 0 ? null : i => !off.has(report.status(i)));
  } }), ` ${kStatusWords[s] ?? s} ${whole(n)}`));
  const used = report.columns.filter(c => c.used);
  const chooser = el('details', { class: 'twin' }, el('summary', {}, 'Columns'), el('div', { class: 'chooser' }, used.map(c => el('label', { title: c.help }, el('input', { type: 'checkbox', checked: shown.includes(c), onchange: (e: Event) => {
    shown = (e.target as HTMLInputElement).checked ? report.columns.filter(d => d === c || shown.includes(d)) : shown.filter(d => d !== c);
    layout();
  } }), ' ' + c.heading))));
  node.append(el('div', { class: 'bar' }, filter, boxes, el('button', { type: 'button', onclick: saveCsv }, 'Save as CSV'), tally), chips, chooser, scroller,
    el('p', { class: 'note' }, (report.doc.rounded ? 'Numbers of this page have six digits; results.csv has all of them. ' : '') + 'A CSV from here has the rows and columns that are shown' + (report.doc.left_out > 0 ? `; ${whole(report.doc.left_out)} further cases are in results.csv alone.` : '.')));

  function collect(): void {
    rows = [];
    for (let i = 0; i < report.count; ++i) if (state.mask[i] === 1) rows.push(i);
    if (sort.column !== null) {
      const c = sort.column, sign = sort.up ? 1 : -1;
      rows.sort((a, b) => { const x = c.at(a), y = c.at(b); if (x === null || y === null) return x === y ? a - b : x === null ? 1 : -1; return sign * compare(x, y) || a - b; });
    } else {
      if (report.count >= 40) rows = [...report.ranking().filter(i => state.mask[i] === 1), ...rows.filter(i => !report.ok(i))];
    }
    tally.textContent = rows.length === report.count ? `${whole(report.count)} cases` : `${whole(rows.length)} of ${whole(report.count)} cases`;
    chips.replaceChildren(...state.filterWords().map(([key, says]) => el('button', { type: 'button', class: 'chip', 'aria-label': 'Take away the filter ' + says, onclick: () => { if (key === 'text') filter.value = ''; state.filter(key, '', null); } }, says + ' ×')));
    table.setAttribute('aria-rowcount', String(rows.length + 1));
  }
  function heading(c: Column, k: number): HTMLElement {
    const on = sort.column === c;
    return el('th', { scope: 'col', class: (c.numeric ? 'n' : '') + (k === 0 ? ' first' : ''), title: c.name + ': ' + c.help, 'aria-sort': on ? (sort.up ? 'ascending' : 'descending') : null },
      el('button', { type: 'button', 'data-sort': c.name, onclick: () => { sort = { column: c, up: on ? !sort.up : true }; layout(); head.querySelector<HTMLElement>(`[data-sort="${c.name}"]`)?.focus(); } }, c.heading.replaceAll('_', ' '), on ? (sort.up ? ' ▲' : ' ▼') : ''));
  }
  function cell(c: Column, i: number, k: number): HTMLElement {
    const v = c.at(i), text = human(v, c.unit), name = c.name;
    if (k === 0) return el('td', { class: 'first', title: report.title(i) }, el('button', { type: 'button', class: 'link', tabindex: -1, 'aria-pressed': String(i === state.selected), onclick: () => state.select(i) }, text || report.layout(i) || report.text(i, 'case_id')));
    if (name === 'status') return el('td', {}, el('span', { class: 'status ' + v }, kStatusWords[String(v)] ?? text));
    if (name === 'reason') return el('td', { class: 'long', title: text }, text);
    if (name === 'step_error_pct' && typeof v === 'number') return el('td', { class: 'n ' + (Math.abs(v) <= 10 ? 'near' : 'far') }, text);
    return el('td', { class: typeof v === 'number' ? 'n' : null, title: text.length > 34 ? text : null }, text);
  }
  const row = (i: number, at: number): HTMLElement => el('tr', { class: 'pick' + (i === state.selected ? ' selected' : '') + (at === active ? ' active' : ''), 'data-case': i, 'aria-rowindex': at + 2, onclick: () => { active = at; state.select(i); } }, shown.map((c, k) => cell(c, i, k)));
  const spacer = (height: number): HTMLElement => el('tr', { class: 'spacer', 'aria-hidden': 'true', style: `height:${height}px` });
  let first = -1, last = -1, top = 0;  // as scrolled; asking the scroller would lay out the whole page
  /// Only the rows in the window are there, between two rows as high as all others.
  function paint(force: boolean): void {
    const from = Math.max(0, Math.floor(top / kRow) - 8), to = Math.min(rows.length, from + Math.ceil(kWindow / kRow) + 18);
    if (!force && from === first && to === last) return;
    first = from;
    last = to;
    body.replaceChildren(...(from > 0 ? [spacer(from * kRow)] : []), ...rows.slice(from, to).map((i, k) => row(i, from + k)), ...(to < rows.length ? [spacer((rows.length - to) * kRow)] : []));
  }
  function layout(): void {
    collect();
    head.replaceChildren(el('tr', { 'aria-rowindex': 1 }, shown.map(heading)));
    paint(true);
  }
  scroller.addEventListener('scroll', () => { top = scroller.scrollTop; requestAnimationFrame(() => paint(false)); });
  scroller.addEventListener('keydown', e => {
    if (e.target !== scroller) return;
    const move: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -rows.length, End: rows.length };
    if (e.key in move) active = Math.max(0, Math.min(rows.length - 1, active + move[e.key]!));
    else if (e.key === 'Enter' && rows[active] !== undefined) state.select(rows[active]!);
    else return;
    e.preventDefault();
    const at = active * kRow;
    if (at < scroller.scrollTop) scroller.scrollTop = at;
    if (at + 3 * kRow > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = at + 3 * kRow - scroller.clientHeight;
    top = scroller.scrollTop;
    paint(true);
  });
  state.whenFiltered(() => { scroller.scrollTop = top = 0; active = 0; layout(); });
  state.whenPriced(layout);
  state.whenSelected(() => paint(true));
  addEventListener('beforeprint', () => { body.replaceChildren(...rows.slice(0, kPrinted).map((i, k) => row(i, k))); });
  addEventListener('afterprint', () => paint(true));

  function saveCsv(): void {
    const columns = shown.length === used.length ? report.columns : shown;
    const text = [columns.map(c => c.name).join(','), ...rows.map(i => columns.map(c => csvField(c.at(i))).join(','))].join('\n') + '\n';
    const link = el('a', { href: URL.createObjectURL(new Blob([text], { type: 'text/csv' })), download: 'results.csv' });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  layout();
}
