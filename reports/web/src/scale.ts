// From quantities to pixels.

export interface Scale { (v: number): number; invert: (p: number) => number; ticks: number[]; log: boolean }

export function linearTicks(low: number, high: number, most: number): number[] {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(k => k * power).find(s => s >= rough)!;
  const ticks: number[] = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return ticks;
}

function logTicks(low: number, high: number, most: number): number[] {
  const ticks: number[] = [];
  for (const digits of [[1, 2, 5], [1, 3], [1]]) {
    ticks.length = 0;
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); ++p)
      for (const d of digits) if (d * 10 ** p >= low * 0.999 && d * 10 ** p <= high * 1.001) ticks.push(d * 10 ** p);
    if (ticks.length <= most + 2) break;
  }
  return ticks.length > 1 ? ticks : [low, high];
}

/// Of `values`, linear or, where the largest is many times the smallest, logarithmic.
export function scaleOf(low: number, high: number, from: number, to: number, options: { most?: number; log?: boolean; zero?: boolean } = {}): Scale {
  const log = options.log ?? (low > 0 && high / low > 24);
  if (options.zero && !log) low = Math.min(0, low);
  if (!(high > low)) { const pad = Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
  else if (!log) { const pad = 0.04 * (high - low); high += pad; if (!(options.zero && low === 0)) low -= pad; }
  else { low /= 1.08; high *= 1.08; }
  const a = log ? Math.log(low) : low, b = log ? Math.log(high) : high;
  const scale = ((v: number): number => from + ((log ? Math.log(v) : v) - a) / (b - a) * (to - from)) as Scale;
  scale.invert = p => { const v = a + (p - from) / (to - from) * (b - a); return log ? Math.exp(v) : v; };
  scale.ticks = (log ? logTicks : linearTicks)(low, high, options.most ?? 6).filter(v => v >= low && v <= high);
  scale.log = log;
  return scale;
}

/// Ticks of bytes fall on powers of two.
export function byteTicks(high: number, most: number): number[] {
  const unit = 1024 ** Math.floor(Math.log2(Math.max(1, high)) / 10);
  return linearTicks(0, high / unit, most).map(v => v * unit);
}

/// The same on a logarithmic axis.
export function byteLogTicks(low: number, high: number, most: number): number[] {
  const first = Math.ceil(Math.log2(low) - 1e-9), last = Math.floor(Math.log2(high) + 1e-9), step = Math.max(1, Math.ceil((last - first + 1) / most));
  const ticks: number[] = [];
  for (let p = first; p <= last; p += step) ticks.push(2 ** p);
  return ticks.length > 1 ? ticks : [low, high];
}
