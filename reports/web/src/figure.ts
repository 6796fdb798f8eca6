// What every picture has: a heading in words, controls, a table twin; and when it is drawn.
import { append, el, type Child } from './dom';

/// `more`: what is said under rows that are not all.
export interface Table { head: string[]; rows: (string | number)[][]; more?: string }
export const kTwinRows = 400;
const kLong = 40;  // characters of a cell that takes several lines

/// A section of the page, with a place in the navigation.
export function section(id: string, title: string, note?: Child): HTMLElement {
  const node = el('section', { id, 'aria-labelledby': 'h-' + id }, el('h2', { id: 'h-' + id }, title));
  if (note) node.append(el('p', { class: 'lead' }, note));
  document.getElementById('app')!.append(node);
  return node;
}

export function plainTable(table: Table, label: string): HTMLElement {
  const number = (c: number): boolean => table.rows.length > 0 && table.rows.every(r => /^[-+$−]?[\d.]|^$/.test(String(r[c] ?? '')));
  const numeric = table.head.map((_, c) => number(c));
  const shown = table.rows.slice(0, kTwinRows);
  return el('div', {},
    el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': label },
      el('table', {}, el('thead', {}, el('tr', {}, table.head.map((h, c) => el('th', { scope: 'col', class: numeric[c] ? 'n' : null }, h)))),
        el('tbody', {}, shown.map(row => el('tr', {}, row.map((v, c) => el('td', { class: numeric[c] ? 'n' : String(v).length > kLong ? 'words' : null }, String(v)))))))),
    table.more && el('p', { class: 'note' }, table.more),
    table.rows.length > kTwinRows && el('p', { class: 'note' }, `The first ${kTwinRows} of ${table.rows.length} rows; the table of cases has all.`));
}

/// The same figures as a table, made when it is opened.
function twin(label: string, table: () => Table): HTMLElement {
  const body = el('div', {});
  const make = (): void => { body.replaceChildren(plainTable(table(), label + ', as a table')); };
  const node = el('details', { class: 'twin', ontoggle: () => { if (node.open) make(); } }, el('summary', {}, 'As a table'), body);
  node.addEventListener('refresh', () => { if (node.open) make(); });
  return node;
}

export interface FigureParts { title: Child; note?: Child; controls?: Child; chart: Child; legend?: Child; table?: () => Table; label: string }

export function figure(parts: FigureParts): HTMLElement {
  const caption = el('figcaption', {}, el('h3', {}, parts.title));
  if (parts.note) caption.append(el('p', { class: 'note' }, parts.note));
  const node = el('figure', { 'aria-label': parts.label }, caption);
  if (parts.controls) node.append(el('div', { class: 'bar' }, parts.controls));
  append(node, [parts.chart, parts.legend]);
  if (parts.table) node.append(twin(parts.label, parts.table));
  return node;
}

/// Tells the table twin of the figure around `node` that its figures have changed.
export function refreshTwin(node: Element): void {
  node.closest('figure')?.querySelector('details.twin')?.dispatchEvent(new Event('refresh'));
}

// ---- Drawing ------------------------------------------------------------------------------------------------------------------

interface Drawn { node: Element; draw: (width: number) => void; width: number; near: boolean; stale: boolean }
const all: Drawn[] = [];
const near = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const found = all.find(d => d.node === entry.target);
    if (found === undefined) continue;
    found.near = entry.isIntersecting;
    if (found.near && found.stale) refresh(found);
  }
}, { rootMargin: '600px' });
const resized = new ResizeObserver(entries => {
  for (const entry of entries) {
    const found = all.find(d => d.node === entry.target);
    if (found !== undefined && Math.abs(found.node.clientWidth - found.width) > 1) mark(found);
  }
});

function refresh(d: Drawn): void {
  const width = d.node.clientWidth;
  if (width === 0) return;
  d.width = width;
  d.stale = false;
  d.draw(width);
}

const pending = new Set<Drawn>();
function mark(d: Drawn): void {
  d.stale = true;
  if (!d.near) return;
  if (pending.size === 0) requestAnimationFrame(() => { const some = [...pending]; pending.clear(); for (const p of some) if (p.stale) refresh(p); });
  pending.add(d);
}

/// Draws `node` when it comes near to the window and whenever its width has changed; the returned function draws it anew.
export function drawn(node: Element, draw: (width: number) => void): () => void {
  const d: Drawn = { node, draw, width: 0, near: false, stale: true };
  all.push(d);
  near.observe(node);
  resized.observe(node);
  return () => mark(d);
}

/// Draws what has not been drawn yet. `anew`: and all that has.
export function drawAll(anew: boolean): void {
  for (const d of all) if (anew || d.stale) refresh(d);
}
/// Draws what is left, a chart at a time, and then calls `done`.
export function drawRest(done: () => void): void {
  const next = all.find(d => d.stale && d.node.clientWidth > 0);
  if (next === undefined) return done();
  refresh(next);
  setTimeout(() => drawRest(done), 0);
}
export function themed(): void {
  for (const d of all) mark(d);
}

/// A canvas as large as its box, for sharp lines on any screen.
export function sized(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = Math.min(3, devicePixelRatio || 1);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = width + 'px';
  canvas.style.height = height + 'px';
  const g = canvas.getContext('2d')!;
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  return g;
}
export const kFont = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
