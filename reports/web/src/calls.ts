// A simulated step by calls of segments: each call an interval, its ops stored once for all calls in which the same passes.
import type { RawCalls, RawShapes, Timeline } from './data';

/// An op or a wait: number of the op, begin and duration, of it waiting for a peer (us).
export type Mark = (op: number, t: number, d: number, peer: number, wait: boolean) => void;

/// What passes in the calls of a timeline.
export class Shapes {
  /// Of shape `s`: seconds (us) of each group of ops, and last of waits within, but for what each call waits by itself.
  readonly shares: Float64Array[];
  readonly first: Int32Array;  // op of each shape
  private readonly raw: RawShapes;
  private readonly firstOp: Int32Array;  // the first that is no wait, counted from `first`

  constructor(timeline: Timeline, groups: number[], readonly waiting: number) {
    this.raw = timeline.shapes;
    const n = this.raw.placed.length;
    this.first = new Int32Array(n + 1);
    this.firstOp = new Int32Array(n);
    this.shares = [];
    for (let s = 0; s < n; ++s) {
      const shares = new Float64Array(waiting + 1), from = this.first[s]!, to = from + this.raw.placed[s]!;
      let first = from;
      while (first < to && this.raw.wait[first] === 1) ++first;
      this.first[s + 1] = to;
      this.firstOp[s] = first - from;
      for (let k = from; k < to; ++k) {
        const peer = this.raw.peer[k]! * 1e-3, works = this.raw.d[k]! * 1e-3 - peer, group = groups[this.raw.op[k]!] ?? waiting - 1;
        shares[this.raw.wait[k] === 1 ? waiting : group]! += works;
        shares[waiting]! += peer;
      }
      if (from === to) shares[waiting - 1] = this.raw.busy[s]! * 1e-3;
      this.shares.push(shares);
    }
  }
  segment = (s: number): string => (this.raw.segment[s]! < 0 ? '' : this.raw.segments[this.raw.segment[s]!]!);
  count = (s: number): number => this.raw.count[s]!;
  placed = (s: number): boolean => this.raw.placed[s]! > 0;
  lead = (s: number): number => this.raw.lead[s]! * 1e-3;
  end = (s: number): number => this.raw.end[s]! * 1e-3;
  /// The ops of a call of shape `s` whose origin is at `origin`, in order of begin.
  each(s: number, origin: number, wait: number, peer: number, mark: Mark): void {
    const from = this.first[s]!, first = from + this.firstOp[s]!;
    for (let k = from; k < this.first[s + 1]!; ++k) {
      const t = this.raw.t[k]! * 1e-3, d = this.raw.d[k]! * 1e-3, isWait = this.raw.wait[k] === 1;
      if (k === first) mark(this.raw.op[k]!, origin - peer, peer + d, peer, false);
      else if (k === from && isWait) mark(this.raw.op[k]!, origin - peer + t - wait, wait, 0, true);
      else mark(this.raw.op[k]!, (k < first ? origin - peer : origin) + t, d, this.raw.peer[k]! * 1e-3, isWait);
    }
  }
}

/// The calls of a stream, in order of time (us).
export class Calls {
  readonly n: number;
  /// When the call waits first or begins; when its first op begins; when its last op ends.
  readonly enters: Float64Array;
  readonly begins: Float64Array;
  readonly ends: Float64Array;
  /// Ops before each call, waits among them.
  readonly before: Int32Array;

  constructor(private readonly shapes: Shapes, private readonly raw: RawCalls) {
    this.n = raw.shape.length;
    this.enters = new Float64Array(this.n);
    this.begins = new Float64Array(this.n);
    this.ends = new Float64Array(this.n);
    this.before = new Int32Array(this.n + 1);
    let end = 0;  // in whole nanoseconds, so that nothing adds up
    for (let k = 0; k < this.n; ++k) {
      const s = raw.shape[k]!, enters = end + raw.gap[k]!, lead = Math.round(shapes.lead(s) * 1e3), begins = enters + raw.wait[k]! + lead;
      end = begins + raw.peer[k]! + Math.round(shapes.end(s) * 1e3);
      this.enters[k] = enters * 1e-3;
      this.begins[k] = begins * 1e-3;
      this.ends[k] = end * 1e-3;
      this.before[k + 1] = this.before[k]! + Math.max(1, shapes.first[s + 1]! - shapes.first[s]!);
    }
  }
  shape = (k: number): number => this.raw.shape[k]!;
  wait = (k: number): number => this.raw.wait[k]! * 1e-3;
  peer = (k: number): number => this.raw.peer[k]! * 1e-3;
  /// "layers.3 m2 layer.F"
  name(k: number): string {
    const layer = this.raw.layer[k]!, m = this.raw.m[k]!;
    return [layer >= 0 ? 'layers.' + layer : '', m >= 0 ? 'm' + m : '', this.shapes.segment(this.raw.shape[k]!)].filter(w => w !== '').join(' ');
  }
  each(k: number, mark: Mark): void {
    this.shapes.each(this.shape(k), this.begins[k]! + this.peer(k), this.wait(k), this.peer(k), mark);
  }
  /// The first call that ends after `us`.
  at(us: number): number {
    let a = 0, b = this.n;
    while (a < b) { const m = (a + b) >> 1; if (this.ends[m]! < us) a = m + 1; else b = m; }
    return a;
  }
  /// Ops of the calls between two times.
  opsWithin(from: number, to: number): number {
    let a = this.at(from), b = this.n;
    const first = a;
    while (a < b) { const m = (a + b) >> 1; if (this.enters[m]! < to) a = m + 1; else b = m; }
    return this.before[a]! - this.before[first]!;
  }
}
