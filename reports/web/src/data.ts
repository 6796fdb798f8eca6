// The data of the page: columns, each held once, and the details of the cases that have some.
import type { Value } from './format';

/// Values of a column: one for all cases, the different ones by number (words, and figures that repeat), or one a case.
export type RawValues = { c: Value } | { d: Value[]; i: number[] } | Value[];
export interface RawColumn { name: string; unit: string; heading: string; help: string; setting: boolean; values: RawValues }

export interface Statement { mood: 'answer' | 'good' | 'note' | 'bad'; text: string }
export interface Accuracy {
  ranks: number; cases: number; median_abs_pct: number; worst_abs_pct: number; within_10: number; median_unplanned: number; median_spread: number; order: number | null;
  peak_exact: number; wire_cases: number; wire_exact: number;
}
export interface LossGroup { label: string; cases: number[]; largest_deviation: number; at_step: number; steps: number; unigram: number | null }
export interface Stage { stage: number; ranks: number; memory: number[]; peak: number; moment: string; measured?: number | null; device?: string; layers?: number; budget?: number }
/// Live bytes of a rank over its step: t in microseconds, total and by class at each of them.
export interface Live { rank: number; stage: number; t: number[]; bytes: number[][]; items: [string, string, number][] }
/// [stage, label, kind, count, flops, memory, payload, predicted, measured]
export type OpRow = [number, string, string, number, number, number, number, number, number];
/// [op, kind, communicator, ranks, nodes, bytes, runs in a step, algorithm, why, predicted seconds by algorithm, the least first]
export type CollectiveRow = [string, string, string, number, number, number, number, string, string, [string, number][]];
export interface Detail { reasons: string[]; losses?: number[]; ops?: OpRow[]; stages?: Stage[]; collectives?: CollectiveRow[]; yaml?: string }
/// Runs of work of one rank in columns: micro-batch, phase, layer or part, begin and duration (us).
export interface Slots { m: number[]; phase: string[]; layer: number[]; t: number[]; d: number[] }
/// Intervals in columns: op, begin, duration, wait for a peer (us), 1 for a wait.
export interface Intervals { op: number[]; t: number[]; d: number[]; peer: number[]; wait: number[] }
/// What passes in calls of segments, in columns; then the ops of those that are placed, one shape after the other. In nanoseconds:
/// before the first op from the begin of that op, else from the origin of the call (reports/timeline_calls.h).
export interface RawShapes {
  segments: string[]; segment: number[]; lead: number[]; end: number[]; busy: number[]; count: number[]; placed: number[];
  op: number[]; t: number[]; d: number[]; peer: number[]; wait: number[];
}
/// Calls of a stream in columns: shape, nanoseconds since the end of the call before, of waiting before everything and of waiting for the
/// first op's peers, layer, micro-batch.
export interface RawCalls { shape: number[]; gap: number[]; wait: number[]; peer: number[]; layer: number[]; m: number[] }
/// Of a step that was measured intervals, else calls. `alike` ranks of the stage do the same.
export interface Lane { rank: number; stage: number; stream: string; alike: number; calls: RawCalls; measured: Intervals; predicted: Intervals }
export interface PipelineRow { rank: number; stage: number; like: number; measured: Slots; predicted: Slots }
export interface Timeline {
  index: number; label: string; step: number; left_out: number; shown_s: number; simulated: boolean;
  ops: [string, string, number, number, number][]; shapes: RawShapes; lanes: Lane[]; rows: PipelineRow[]; live: Live[];
}
export interface Next { says: string }
/// A figure of two cases, by their numbers, of a comparison. `noise`: three standard errors of the difference.
export interface Change { a: number; b: number; metric: string; unit: string; before: number; after: number; noise: number; verdict: string }
export interface RawDocument {
  changes: Change[];
  title: string; kind: 'run' | 'search' | 'comparison'; count: number; left_out: number; rounded: boolean;
  columns: RawColumn[]; classes: string[]; parts: string[]; metadata: Record<string, string | number | null>;
  statements: Statement[]; next: Next[]; lost: { layouts: number; says: string; nearest: string }[]; price: { usd: number; note: string };
  summary: { fastest: number; smallest: number; fastest_by_model: number[]; by_measurement: boolean; accuracy: Accuracy[]; losses: LossGroup[] };
  details: Record<string, Detail>; timelines: Timeline[];
}

export class Column {
  readonly name: string;
  readonly unit: string;
  readonly heading: string;
  readonly help: string;
  /// Whether it says what a case is, not what came of it.
  readonly setting: boolean;
  readonly numeric: boolean;
  /// Whether some case has a value.
  readonly used: boolean;
  private readonly constant: Value | undefined;
  private readonly words: Value[] | null = null;
  private readonly index: ArrayLike<number> = [];
  private readonly values: Value[] = [];
  private readonly count: number;
  private found: Value[] | null = null;

  constructor(raw: RawColumn, count: number) {
    this.name = raw.name;
    this.unit = raw.unit;
    this.heading = raw.heading;
    this.help = raw.help;
    this.setting = raw.setting;
    this.count = count;
    const v = raw.values;
    if (Array.isArray(v)) {
      this.values = v;
      this.used = v.some(x => x !== null);
      this.numeric = v.some(x => typeof x === 'number');
    } else if ('d' in v) {
      this.words = v.d;
      this.index = v.i;
      this.used = true;
      this.numeric = v.d.some(x => typeof x === 'number');
    } else {
      this.constant = v.c;
      this.used = v.c !== null && count > 0;
      this.numeric = typeof v.c === 'number';
    }
  }
  at(i: number): Value {
    if (this.constant !== undefined) return this.constant;
    if (this.words !== null) return this.words[this.index[i]!] ?? null;
    return this.values[i] ?? null;
  }
  /// NaN where there is no number.
  num(i: number): number {
    const v = this.at(i);
    return typeof v === 'number' ? v : NaN;
  }
  /// The different values in order, or, of more than `most`, as many as were met first.
  distinct(most = 64): Value[] {
    if (this.found !== null) return this.found;
    if (this.constant !== undefined) return (this.found = this.count > 0 ? [this.constant] : []);
    if (this.words !== null) return (this.found = sorted(this.words.slice(0, most + 1)));
    const seen = new Set<Value>();
    for (let i = 0; i < this.count && seen.size <= most; ++i) seen.add(this.at(i));
    return (this.found = sorted([...seen]));
  }
  /// The different values that some of `cases` have, as they are met.
  among(cases: ArrayLike<number>): Value[] {
    if (this.constant !== undefined) return cases.length > 0 ? [this.constant] : [];
    if (this.words === null) return [...new Set(Array.from(cases, i => this.at(i)))];
    const seen = new Uint8Array(this.words.length), found: Value[] = [];
    for (let k = 0; k < cases.length && found.length < seen.length; ++k) {
      const w = this.index[cases[k]!]!;
      if (seen[w] === 0) { seen[w] = 1; found.push(this.words[w]!); }
    }
    return found;
  }
  /// For each value that some of `cases` has the largest of what `of` makes of those.
  most(cases: ArrayLike<number>, of: (i: number) => number): Map<Value, number> {
    const best = new Map<Value, number>();
    if (this.words === null) {
      for (let k = 0; k < cases.length; ++k) { const v = this.at(cases[k]!), f = of(cases[k]!); if (!(best.get(v)! >= f)) best.set(v, f); }
      return best;
    }
    const byWord = new Float64Array(this.words.length).fill(-Infinity);
    for (let k = 0; k < cases.length; ++k) { const w = this.index[cases[k]!]!, f = of(cases[k]!); if (f > byWord[w]!) byWord[w] = f; }
    this.words.forEach((v, w) => { if (byWord[w]! > -Infinity) best.set(v, byWord[w]!); });
    return best;
  }
}

export function compare(a: Value, b: Value): number {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
  if (typeof a === 'number' && typeof b === 'number') return a - b;
  return String(a).localeCompare(String(b), 'en', { numeric: true });
}
const sorted = (values: Value[]): Value[] => values.sort(compare);

/// A quantity by which cases are compared.
export interface Measure { id: string; name: string; unit: string; lower: boolean; of: (i: number) => number }

export class Report {
  readonly doc: RawDocument;
  readonly count: number;
  readonly columns: Column[];
  private readonly named: Map<string, Column>;
  readonly measured: boolean;
  /// USD for a device-hour; 0: not known.
  price: number;
  /// The case that answers: the fastest, or the first of a search; -1: none.
  readonly best: number;

  constructor(doc: RawDocument) {
    this.doc = doc;
    this.count = doc.count;
    this.columns = doc.columns.map(c => new Column(c, doc.count));
    this.named = new Map(this.columns.map(c => [c.name, c]));
    this.measured = doc.summary.by_measurement;
    this.price = doc.price.usd;
    this.best = doc.kind === 'search' && doc.count > 0 ? 0 : doc.summary.fastest;
  }
  column(name: string): Column {
    const found = this.named.get(name);
    if (found === undefined) throw new Error('no column ' + name);
    return found;
  }
  /// Null and NaN of a column that these data do not have: parts and classes that no case has are left out.
  at = (i: number, name: string): Value => this.named.get(name)?.at(i) ?? null;
  num = (i: number, name: string): number => this.named.get(name)?.num(i) ?? NaN;
  text = (i: number, name: string): string => String(this.at(i, name) ?? '');
  status = (i: number): string => this.text(i, 'status');
  private right: Uint8Array | null = null;
  ok = (i: number): boolean => (this.right ??= Uint8Array.from({ length: this.count }, (_, k) => (this.status(k) === 'ok' ? 1 : 0)))[i] === 1;
  private ran: number[] | null = null;
  /// The cases that ran, the fastest first, and of equals the first.
  ranking(): readonly number[] {
    if (this.ran !== null) return this.ran;
    const rates = Float64Array.from({ length: this.count }, (_, i) => this.rate(i) || 0), all: number[] = [];
    for (let i = 0; i < this.count; ++i) if (this.ok(i)) all.push(i);
    return (this.ran = all.sort((a, b) => rates[b]! - rates[a]! || a - b));
  }
  layout = (i: number): string => this.text(i, 'layout');
  detail = (i: number): Detail | undefined => this.doc.details[String(i)];
  /// A figure of every case, made when the first is asked for: charts sort tens of thousands of cases by it.
  private each(of: (i: number) => number): (i: number) => number {
    let all: Float64Array | null = null;
    return i => (all ??= Float64Array.from({ length: this.count }, (_, k) => of(k)))[i] ?? NaN;
  }
  /// Measured where this report's cases were measured, else predicted.
  figure = (i: number, name: string): number => this.num(i, (this.measured ? 'measured_' : 'predicted_') + name);
  step = (i: number): number => this.figure(i, 'step_s');
  rate = this.each(i => this.figure(i, 'tokens_per_s'));
  ranks = (i: number): number => this.num(i, 'world_size');
  peak = this.each(i => {
    const reserved = this.num(i, 'reserved_bytes');
    return this.measured || Number.isNaN(reserved) ? this.figure(i, 'peak_bytes') : reserved;
  });
  budget = (i: number): number => this.num(i, 'budget_bytes');
  /// Device-hours for a billion tokens.
  deviceHours = (i: number): number => (this.ranks(i) / this.rate(i)) * (1e9 / 3600);

  /// A case in words that no other case has, as far as its layout says it.
  title(i: number): string {
    const name = this.text(i, 'name'), layout = this.layout(i);
    if (name === '' || name.replaceAll('-', ' ') === layout.replaceAll('-', ' ')) return layout;
    return layout === '' || name.includes(layout) ? name : name + ' (' + layout + ')';
  }
  /// The case by the keys in which this report's cases differ: "tp 4, pp 2, micro-batch 1".
  differing(i: number, most = 12): string {
    return this.axes().slice(0, most).map(c => c.heading + ' ' + (c.at(i) === null ? 'none' : axisText(c, c.at(i)))).join(', ');
  }
  short(i: number): string {
    const name = this.text(i, 'name');
    return name !== '' && name.length <= 34 ? name : this.layout(i) || name;
  }

  private axesFound: Column[] | null = null;
  /// Settings in which cases differ, and in which a chart has room for every value.
  axes(): Column[] {
    if (this.axesFound === null)
      this.axesFound = this.columns.filter(c => c.setting && c.used && c.name !== 'name' && c.name !== 'layout' && c.distinct().length > 1 && c.distinct().length <= 48);
    return this.axesFound;
  }
  measures(): Measure[] {
    const all: Measure[] = [
      { id: 'rate', name: 'tokens per second', unit: 'tokens/s', lower: false, of: this.rate },
      { id: 'step', name: 'step time', unit: 's', lower: true, of: this.step },
      { id: 'mfu', name: 'MFU', unit: 'fraction', lower: false, of: i => this.figure(i, 'mfu') },
      { id: 'peak', name: 'peak memory of a device', unit: 'B', lower: true, of: this.peak },
      { id: 'hours', name: 'device-hours for a billion tokens', unit: 'count', lower: true, of: this.deviceHours },
      { id: 'wire', name: 'bytes on the wire in a step', unit: 'B', lower: true, of: i => this.figure(i, 'wire_bytes') },
      { id: 'energy', name: 'energy of a step', unit: 'J', lower: true, of: i => this.num(i, 'energy_j') },
      { id: 'loss', name: 'last loss', unit: 'nat', lower: true, of: i => this.num(i, 'loss_last') },
    ];
    if (this.price > 0) all.splice(4, 0, { id: 'usd', name: 'money for a billion tokens', unit: 'usd', lower: true, of: i => this.deviceHours(i) * this.price });
    return all.filter(m => { for (let i = 0; i < this.count; ++i) if (m.of(i) > 0) return true; return false; });
  }
  measure(id: string): Measure {
    const all = this.measures();
    return all.find(m => m.id === id) ?? all[0]!;
  }
}

/// A value of a setting, as an axis shows it.
export function axisText(column: Column, v: Value): string {
  if (v === null) return 'none';
  if (typeof v === 'boolean') return v ? 'yes' : 'no';
  if (typeof v === 'number' && column.unit === '' && v >= 100000) return String(+(v / 1e6).toPrecision(3)) + ' M';
  if (typeof v === 'number' && column.unit !== '') return v === 0 ? '0' : v.toPrecision(3);
  return String(v);
}

/// The data beside the page, unpacked if they are packed.
export async function read(): Promise<RawDocument> {
  const node = document.getElementById('data')!;
  const text = node.textContent ?? '';
  if (node.dataset.packed !== 'deflate') return JSON.parse(text) as RawDocument;
  const bytes = atob(text.trim()), packed = new Uint8Array(bytes.length);
  for (let i = 0; i < bytes.length; ++i) packed[i] = bytes.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate'));
  return JSON.parse(await new Response(stream).text()) as RawDocument;
}
