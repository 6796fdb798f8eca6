// Quantities as reports/format.cpp writes them.

export type Value = string | number | boolean | null;

export function digits(v: number): string {
  const m = Math.abs(v);
  return v.toFixed(m >= 999.95 ? 0 : m >= 99.995 ? 1 : m >= 9.9995 ? 2 : 3);
}

type Scale = [number, string][];
function scaled(v: number, scales: Scale): string {
  const [size, name] = scales.find(([s]) => Math.abs(v) >= s) ?? scales[scales.length - 1]!;
  return digits(v / size) + ' ' + name;
}
const kBytes: Scale = [[2 ** 50, 'PiB'], [2 ** 40, 'TiB'], [2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [1024, 'KiB']];
const kSeconds: Scale = [[1, 's'], [1e-3, 'ms'], [1e-6, 'us'], [1e-9, 'ns']];
const kCounts: Scale = [[1e18, 'E'], [1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']];

export const bytes = (v: number): string => (Math.abs(v) < 1024 ? Math.round(v) + ' B' : scaled(v, kBytes));
export const seconds = (v: number): string => (v === 0 ? '0 s' : scaled(v, kSeconds));
export const count = (v: number): string => (Math.abs(v) < 1000 ? (Number.isInteger(v) ? String(v) : digits(v)) : scaled(v, kCounts));
export const signed = (v: number): string => (v > 0 ? '+' : '') + v.toFixed(2) + ' %';
export const percent = (fraction: number): string => (fraction * 100).toFixed(Math.abs(fraction) < 0.0995 ? 1 : 0) + ' %';
export const money = (v: number): string => '$' + (v >= 1000 ? count(v) : v >= 10 ? v.toFixed(1) : v.toPrecision(3));
/// A whole number with thin spaces between its thousands.
export const whole = (v: number): string => v.toLocaleString('en').replaceAll(',', '\u202f');

/// "1.20 s" as "1.2 s": what stands at a tick.
export function tick(text: string): string {
  return text.replace(/(\.\d*?)0+(?= |$)/, '$1').replace(/\.(?= |$)/, '');
}

export function human(v: Value | undefined, unit: string): string {
  if (v === null || v === undefined) return '';
  if (typeof v === 'boolean') return v ? 'yes' : 'no';
  if (typeof v !== 'number') return v;
  switch (unit) {
    case 'B': return bytes(v);
    case 's': return seconds(v);
    case '%': return signed(v);
    case 'fraction': return (v * 100).toFixed(2) + ' %';
    case 'tokens/s': return count(v) + ' tok/s';
    case 'count': return count(v);
    case 'flop': return count(v) + (Math.abs(v) < 1000 ? ' ' : '') + 'flop';
    case 'J': return v.toPrecision(4) + ' J';
    case 'nat': return v.toFixed(4);
    case 'usd': return money(v);
  }
  return Number.isInteger(v) ? String(v) : String(+v.toPrecision(4));
}
