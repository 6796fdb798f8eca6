// 1. The answer in words: best layout, what bounds it, what to try next; claims; what did not run.
import { append, el, type Child } from './dom';
import type { Report } from './data';
import { plainTable } from './figure';
import { bytes, count, money, percent, seconds, whole } from './format';
import type { State } from './state';
import { partsOf, kPartWords } from './parts';

const join = (words: string[]): string => words.length < 2 ? words.join('') : words.slice(0, -1).join(', ') + ' and ' + words[words.length - 1];

/// "Llama-3.1-70B on 64 devices of h100-sxm": the model and the device, named, of the cases that ran; of all where none did.
export function subject(report: Report): string {
  const ran = [...report.ranking()].sort((a, b) => a - b);
  const of = <T>(name: string, is: (v: unknown) => v is T): T[] => {
    const column = report.column(name);
    return ((ran.length > 0 ? column.among(ran) : column.distinct()) as unknown[]).filter(is);
  };
  const text = (v: unknown): v is string => typeof v === 'string' && v !== '', number = (v: unknown): v is number => typeof v === 'number';
  const models = of('model', text), machines = of('machine', text), ranks = of('world_size', number).sort((a, b) => a - b);
  if (report.count === 0 || models.length === 0) return '';
  const words = (list: string[], many: string): string => list.length <= 3 ? join(list) : `${list.length} ${many}`;
  const sizes = ranks.length === 0 ? '' : ranks.length === 1 ? `${ranks[0]} ${ranks[0] === 1 ? 'rank' : 'ranks'} of ` : `${ranks[0]} to ${ranks[ranks.length - 1]} ranks of `;
  return `${words(models, 'models')} on ${sizes}${words(machines, 'machines')}`;
}

function fact(label: string, value: string, note?: string): Child {
  return el('div', { class: 'fact' }, el('dt', {}, label), el('dd', {}, value, note && el('small', {}, note)));
}

/// Why a prediction stands without an interval: intervals are learnt from measured runs, of other frameworks.
function whyNoInterval(report: Report, i: number): string {
  return !report.measured && report.text(i, 'profile') === 'shardlab' ? `; no interval: of shardlab’s own executor no run on ${report.text(i, 'machine')} was measured to learn its error from` : '';
}

/// The figures of the best case, large.
function facts(report: Report, i: number): Child {
  const how = report.measured ? 'measured' : 'predicted', rows: Child[] = [];
  const step = report.step(i), mfu = report.figure(i, 'mfu'), peak = report.peak(i), budget = report.budget(i), hours = report.deviceHours(i);
  const spread = report.num(i, 'step_spread'), error = report.doc.summary.accuracy.find(a => a.ranks === 0);
  const range = report.measured && spread > 0 ? `${how}; half of the steps' spread ±${percent(spread / 2)}`
    : report.num(i, 'step_low_s') > 0 ? `${how}; 90 % between ${seconds(report.num(i, 'step_low_s'))} and ${seconds(report.num(i, 'step_high_s'))}` : error && error.cases > 0 ? `${how}; this run's predictions missed by ${error.median_abs_pct.toFixed(1)} % in the median` : how + whyNoInterval(report, i);
  if (step > 0) rows.push(fact('a step', seconds(step), range));
  if (report.rate(i) > 0) rows.push(fact('tokens per second', count(report.rate(i)), `${count(report.rate(i) / report.ranks(i))} a rank`));
  if (mfu > 0) rows.push(fact('MFU', percent(mfu), 'of the peak in ' + report.text(i, 'precision')));
  if (peak > 0) rows.push(fact('memory', bytes(peak), budget > 0 ? `${percent(peak / budget)} of the ${bytes(budget)} of a device` : 'of the fullest rank'));
  if (report.price > 0 && hours > 0) rows.push(fact('a billion tokens', money(hours * report.price), `${count(hours)} device-hours`));
  else if (hours > 0 && report.ranks(i) > 1) rows.push(fact('a billion tokens', count(hours) + ' h', 'device-hours'));
  return el('dl', { class: 'facts' }, rows);
}

/// The parts of a case's step, the largest first, with their shares of it.
function bounds(report: Report, i: number): (readonly [string, string])[] {
  const parts = partsOf(report, i, report.measured);
  if (parts === null) return [];
  const groups = new Map<string, number>();
  for (const p of parts) groups.set(p.group, (groups.get(p.group) ?? 0) + p.seconds);
  const sorted = [...groups].filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1]), total = parts.reduce((sum, p) => sum + p.seconds, 0);
  return total > 0 ? sorted.map(([group, s]) => [kPartWords[group] ?? group, percent(s / total)] as const) : [];
}

/// "Compute is 61 % of the step; exposed communication 22 %, ...": what bounds a case.
export function bound(report: Report, i: number): string {
  const [first, ...rest] = bounds(report, i);
  if (first === undefined) return '';
  const others = rest.filter(([, share]) => parseFloat(share) >= 1).slice(0, 4).map(([name, share]) => `${name} ${share}`);
  return `${first[0][0]!.toUpperCase()}${first[0].slice(1)} bounds it: ${first[1]} of the step${others.length > 0 ? '; ' + join(others) : ''}.`;
}

// ---- Refusals -------------------------------------------------------------------------------------------------------------------

const kNumber = /\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?: ?[KMGTP]iB| ?B\b)?/g;
const kUnits: Record<string, number> = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, PiB: 2 ** 50 };
const worth = (text: string): number => parseFloat(text.replaceAll(',', '')) * (kUnits[text.slice(-3)] ?? 1);

export interface Refusal { status: string; says: string; code: string; cases: number[] }

/// Cases that are not ok by what their reasons say, numbers apart: of a number that differs, the range is said.
export function refusals(report: Report): Refusal[] {
  interface Group { status: string; first: string; code: string; low: string[]; high: string[]; cases: number[] }
  const groups = new Map<string, Group>(), met = new Map<string, Group>();  // by all but numbers; by every word of it
  for (let i = 0; i < report.count; ++i) {
    if (report.ok(i)) continue;
    const status = report.status(i), reason = report.text(i, 'reason') || 'no reason given', code = report.text(i, 'code'), whole = status + '|' + code + '|' + reason;
    const known = met.get(whole);
    if (known !== undefined) { known.cases.push(i); continue; }
    const numbers = reason.match(kNumber) ?? [], key = status + '|' + code + '|' + reason.replace(kNumber, '#');
    let group = groups.get(key);
    if (group === undefined) groups.set(key, (group = { status, first: reason, code, low: [...numbers], high: [...numbers], cases: [] }));
    met.set(whole, group);
    group.cases.push(i);
    const { low, high } = group;
    numbers.forEach((n, k) => {
      if (worth(n) < worth(low[k]!)) low[k] = n;
      if (worth(n) > worth(high[k]!)) high[k] = n;
    });
  }
  return [...groups.values()].sort((a, b) => b.cases.length - a.cases.length).map(g => {
    let k = 0;
    const says = g.first.replace(kNumber, n => { const low = g.low[k] ?? n, high = g.high[k++] ?? n; return low === high ? low : `${low} to ${high}`; });
    return { status: g.status, says, code: g.code, cases: g.cases };
  });
}

export const kStatusWords: Record<string, string> = { refused: 'refused', oom: 'does not fit', timeout: 'timed out', failed: 'failed' };
const kReasons = 12, kExamples = 60;

export function refusalList(report: Report, state: State, most = kReasons): Child {
  const all = refusals(report);
  if (all.length === 0) return null;
  const total = all.reduce((sum, r) => sum + r.cases.length, 0);
  const line = (r: Refusal): HTMLElement => {
    const body = el('div', {});
    const node = el('details', { ontoggle: () => { if (node.open && body.childElementCount === 0) body.append(examples(r)); } },
      el('summary', {}, el('b', { class: 'count' }, whole(r.cases.length)), ' ', el('span', { class: 'status ' + r.status }, kStatusWords[r.status] ?? r.status), ' ', el('span', {}, r.says)), body);
    return node;
  };
  const examples = (r: Refusal): Node => el('div', {},
    r.code !== '' && el('p', { class: 'note' }, 'What it means and what to do: ', el('code', {}, `shardlab explain ${r.code}`)),
    plainTable({ head: ['case', 'layout', 'reason'], rows: r.cases.slice(0, kExamples).map(i => [report.text(i, 'name') || report.text(i, 'case_id'), report.layout(i), report.text(i, 'reason')]) }, 'Cases: ' + r.says),
    r.cases.length > kExamples && el('p', { class: 'note' }, `${kExamples} of ${whole(r.cases.length)}.`),
    el('button', { type: 'button', onclick: () => {
      const set = new Set(r.cases);
      state.filter('refusal', (kStatusWords[r.status] ?? r.status) + ': ' + r.says, i => set.has(i));
      document.getElementById('cases')?.scrollIntoView();
    } }, 'Show these in every chart and the table'));
  const rest = all.slice(most), more = rest.length > 0 && el('details', {}, el('summary', {}, `${whole(rest.reduce((s, r) => s + r.cases.length, 0))} more for ${rest.length} further reasons`), rest.map(line));
  return el('div', { class: 'refusals' }, el('h3', {}, `${whole(total)} of ${whole(report.count)} cases did not run`), all.slice(0, most).map(line), more || null);
}

/// Why the other layouts of a search lost.
function lostList(report: Report): Child {
  const lost = report.doc.lost;
  if (lost.length === 0) return null;
  const line = (l: typeof lost[number]): Child => el('details', {}, el('summary', {}, el('b', { class: 'count' }, l.layouts < 1e5 ? whole(l.layouts) : count(l.layouts)), ' ', el('span', {}, l.says)), el('p', { class: 'note' }, 'The nearest: ' + l.nearest + '.'));
  return el('div', { class: 'refusals' }, el('h3', {}, 'Why the others lost'), lost.slice(0, kReasons).map(line), lost.length > kReasons && el('details', {}, el('summary', {}, `${lost.length - kReasons} further reasons`), lost.slice(kReasons).map(line)));
}

// ---- The section ----------------------------------------------------------------------------------------------------------------

function accuracy(report: Report): Child {
  const rows = report.doc.summary.accuracy;
  if (rows.length === 0) return null;
  return el('details', { open: rows.length <= 6 && report.doc.kind !== 'comparison' }, el('summary', {}, 'How good the predictions were'), plainTable({
    head: ['ranks', 'cases', 'median |error|', 'worst |error|', 'within 10 %', 'order (tau)', 'median spread', 'median unplanned', 'peak exact', 'wire exact'],
    rows: rows.map(a => [a.ranks === 0 ? 'all' : String(a.ranks), a.cases, a.median_abs_pct.toFixed(2) + ' %', a.worst_abs_pct.toFixed(2) + ' %', `${a.within_10} of ${a.cases}`,
      a.order === null ? '' : a.order.toFixed(2), (a.median_spread * 100).toFixed(1) + ' %', (a.median_unplanned * 100).toFixed(2) + ' %', `${a.peak_exact} of ${a.cases}`, `${a.wire_exact} of ${a.wire_cases}`]) }, 'Accuracy by ranks'));
}

/// The keys of the best case at the edge of what was tried, where going on could help.
export function edges(report: Report, i: number): string[] {
  const out: string[] = [];
  for (const c of report.axes()) {
    if (!c.numeric || !['micro_batch', 'tp', 'pp', 'dp', 'cp', 'ep', 'vpp', 'zero', 'grad_accumulation'].includes(c.name)) continue;
    const values = c.distinct().filter((v): v is number => typeof v === 'number'), own = c.num(i);
    if (values.length < 3 || own !== values[values.length - 1] || (c.name === 'zero' && own >= 3)) continue;
    if (['dp', 'tp', 'pp', 'cp'].includes(c.name) && own === report.ranks(i)) continue;  // no axis of the mesh is longer than all ranks
    const before = values[values.length - 2]!;
    let best = -1;
    for (let k = 0; k < report.count; ++k)
      if (report.ok(k) && c.num(k) === before && report.ranks(k) === report.ranks(i) && report.at(k, 'model') === report.at(i, 'model') && (best < 0 || report.rate(k) > report.rate(best))) best = k;
    if (best >= 0 && report.rate(i) > report.rate(best) * 1.01)
      out.push(`The best ${c.heading} is ${own}, the largest that was tried; the best with ${before} has ${percent(1 - report.rate(best) / report.rate(i))} less tokens per second. Try a larger one.`);
  }
  return out;
}

const kModels = 12;

/// The fastest layout of each model, where a page has several: their tokens per second cannot be compared.
function bestOfEach(report: Report, state: State, cases: number[]): HTMLElement {
  const head = ['model', 'layout', 'step', 'tokens per second', 'MFU', 'memory', 'what bounds it'];
  const rows = cases.slice(0, kModels).map(i => el('tr', {}, el('th', { scope: 'row' }, report.text(i, 'model')),
    el('td', {}, el('button', { type: 'button', class: 'link', onclick: () => { state.select(i); document.getElementById('why')?.scrollIntoView(); } }, report.layout(i) || report.short(i))),
    [seconds(report.step(i)), count(report.rate(i)), report.figure(i, 'mfu') > 0 ? percent(report.figure(i, 'mfu')) : '', bytes(report.peak(i)), bounds(report, i).slice(0, 2).map(([name, share]) => `${name} ${share}`).join(', ')].map(v => el('td', { class: v.length > 16 ? 'words' : null }, v))));
  return el('div', {}, el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'The fastest layout of each model' },
    el('table', {}, el('thead', {}, el('tr', {}, head.map(h => el('th', { scope: 'col' }, h)))), el('tbody', {}, rows))),
    cases.length > kModels && el('p', { class: 'note' }, `${cases.length - kModels} further models stand in the table of cases.`));
}

export function answerSection(report: Report, state: State): void {
  const node = document.getElementById('answer')!, best = report.best, body = document.getElementById('answer-more')!;
  const top = document.getElementById('best');
  const models = report.doc.kind === 'search' ? [] : report.doc.summary.fastest_by_model;
  if (report.doc.kind === 'comparison') {
    if (top !== null) append(top, [el('p', { class: 'kicker' }, `Two runs of ${subject(report)}`)]);
  } else if (models.length > 1 && top !== null) {
    append(top, [el('p', { class: 'kicker' }, `The fastest layout ${report.measured ? 'measured' : 'predicted'} of each model, ${subject(report)}`), bestOfEach(report, state, models)]);
  } else if (best >= 0 && top !== null) {
    const what = report.doc.kind === 'search' ? 'The best layout found' : report.measured ? 'The fastest layout measured' : 'The fastest layout predicted';
    const name = report.text(best, 'name'), subjects = subject(report);
    append(top, [el('p', { class: 'kicker' }, what + (subjects !== '' ? ' for ' + subjects : '')), el('p', { class: 'winner' }, report.layout(best) || report.short(best)),
      name !== '' && name !== report.layout(best) && el('p', { class: 'note' }, name), facts(report, best)]);
    const says = bound(report, best), steps: Child[] = [];
    if (says !== '') steps.push(el('p', {}, el('b', {}, 'What bounds it. '), says));
    const next = [...report.doc.next.map(n => n.says), ...edges(report, best)].slice(0, 4);
    if (next.length > 0) steps.push(el('p', {}, el('b', {}, 'What to try next. '), next.join(' ')));
    top.append(el('div', { class: 'prose' }, steps));
  }
  body.append(...[accuracy(report), refusalList(report, state), lostList(report)].filter((n): n is HTMLElement => n instanceof Node));
  if (node.querySelector('.statements')?.childElementCount === 0) node.querySelector('.statements')!.remove();
}
