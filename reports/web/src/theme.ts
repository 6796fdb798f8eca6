// Colours: those of the style sheet, and scales of our own.
const cache = new Map<string, string>();

export function isDark(): boolean {
  if (printing) return false;
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

/// While a page is printed its colours are the light ones.
let printing = false;
export function setPrinting(on: boolean): void {
  printing = on;
  forget();
}
export const forget = (): void => cache.clear();

/// The colour that the style sheet calls `name`.
export function css(name: string): string {
  let value = cache.get(name);
  if (value === undefined) cache.set(name, (value = getComputedStyle(document.documentElement).getPropertyValue(name).trim()));
  return value;
}

export type Rgb = [number, number, number];
const rgb = (hex: string): Rgb => [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16)) as Rgb;
const linear = (c: number): number => { const s = c / 255; return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; };
const luminance = ([r, g, b]: Rgb): number => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);

// One hue from pale to deep, so that it reads without colour too; in the dark from deep to bright.
const kLight = ['#f2efe7', '#d3e0e4', '#a5c5d3', '#6fa5c0', '#3f81a8', '#1f5d8b', '#103f69'].map(rgb);
const kDark = ['#232528', '#24384a', '#285171', '#316d98', '#4a8cbb', '#77aed6', '#b3d5ee'].map(rgb);

/// The colour of `t` in [0, 1], 1 the most.
export function sequential(t: number): Rgb {
  const stops = isDark() ? kDark : kLight;
  const at = Math.max(0, Math.min(1, Number.isFinite(t) ? t : 0)) * (stops.length - 1), k = Math.min(stops.length - 2, Math.floor(at));
  return stops[k]!.map((v, c) => Math.round(v + (stops[k + 1]![c]! - v) * (at - k))) as Rgb;
}
export const cssOf = (c: Rgb): string => `rgb(${c[0]} ${c[1]} ${c[2]})`;
/// Black or white, whichever is easier to read on `c`: at least 4.5 to 1.
export const inkOn = (c: Rgb): string => (luminance(c) > 0.179 ? '#000000' : '#ffffff');

export const kCategories = 8;
export const category = (k: number): string => css('--c' + (k % kCategories));
/// Marks differ in shape as well as in colour.
export const kShapes = ['circle', 'square', 'triangle', 'diamond', 'cross', 'down', 'bar', 'plus'] as const;
