// The Pareto front: two measures of every case, and the cases that nothing beats in both.
import type { Column, Measure, Report } from './data';
import { axisText } from './data';
import { el, hideTip, select, showTip, svg } from './dom';
import { drawn, figure, kFont, refreshTwin, sized } from './figure';
import { human, tick, whole } from './format';
import { byteLogTicks, byteTicks, scaleOf, type Scale } from './scale';
import { category, css, kShapes } from './theme';
import type { State } from './state';

const kHeight = 420;

/// Draws a mark of about `r` pixels around (x, y) into the current path.
export function shapePath(g: CanvasRenderingContext2D, shape: string, x: number, y: number, r: number): void {
  switch (shape) {
    case 'square': g.rect(x - r, y - r, 2 * r, 2 * r); break;
    case 'triangle': g.moveTo(x, y - r * 1.2); g.lineTo(x + r * 1.15, y + r); g.lineTo(x - r * 1.15, y + r); g.closePath(); break;
    case 'down': g.moveTo(x, y + r * 1.2); g.lineTo(x + r * 1.15, y - r); g.lineTo(x - r * 1.15, y - r); g.closePath(); break;
    case 'diamond': g.moveTo(x, y - r * 1.35); g.lineTo(x + r * 1.35, y); g.lineTo(x, y + r * 1.35); g.lineTo(x - r * 1.35, y); g.closePath(); break;
    case 'cross': for (const s of [1, -1]) { g.moveTo(x - r, y - s * r); g.lineTo(x - r * 0.4, y - s * r); g.lineTo(x + r, y + s * r); g.lineTo(x + r * 0.4, y + s * r); g.closePath(); } break;
    case 'bar': g.rect(x - r * 1.4, y - r * 0.5, 2.8 * r, r); break;
    case 'plus': g.rect(x - r * 1.3, y - r * 0.4, 2.6 * r, 0.8 * r); g.rect(x - r * 0.4, y - r * 1.3, 0.8 * r, 2.6 * r); break;
    default: g.moveTo(x + r, y); g.arc(x, y, r, 0, 2 * Math.PI);
  }
}

export function paretoOf(cases: number[], x: Measure, y: Measure): number[] {
  const sign = (m: Measure): number => (m.lower ? 1 : -1);
  const sorted = [...cases].sort((a, b) => sign(x) * (x.of(a) - x.of(b)) || sign(y) * (y.of(a) - y.of(b)) || a - b), front: number[] = [];
  let best = Infinity;
  for (const i of sorted) { const v = sign(y) * y.of(i); if (v < best) { best = v; front.push(i); } }
  return front;
}

export function scatterFigure(report: Report, state: State): HTMLElement | null {
  const measures = (): Measure[] => report.measures();
  if (measures().length < 2 || report.count < 2) return null;
  let x = report.measure('peak'), y = report.measure('rate'), by: Column | null = report.axes().find(c => ['model', 'pp', 'tp', 'zero', 'schedule'].includes(c.name) && c.distinct().length <= 8) ?? null;
  if (x === y) x = measures()[1]!;
  const box = el('div', { class: 'chart', style: `height:${kHeight}px` }), canvas = el('canvas', { tabindex: 0, role: 'img' });
  const over = svg('svg', { 'aria-hidden': 'true', focusable: 'false' }), legend = el('ul', { class: 'legend' }), says = el('p', { class: 'note', role: 'status' });
  box.append(canvas, over);
  let front: number[] = [], points: number[] = [], sx: Scale, sy: Scale, brush: [number, number, number, number] | null = null;
  const margin = { left: 64, right: 14, top: 14, bottom: 42 };

  function axisTicks(m: Measure, s: Scale, low: number, high: number): number[] { return m.unit !== 'B' ? s.ticks : s.log ? byteLogTicks(low, high, 6) : byteTicks(high, 6); }
  function draw(width: number): void {
    points = [];
    for (let i = 0; i < report.count; ++i) if (report.ok(i) && x.of(i) > 0 && y.of(i) > 0) points.push(i);
    const inside = points.filter(i => state.mask[i] === 1);
    front = paretoOf(inside, x, y);
    margin.left = width < 500 ? 54 : 66;
    const range = (m: Measure): [number, number] => { let a = Infinity, b = -Infinity; for (const i of points) { const v = m.of(i); if (v < a) a = v; if (v > b) b = v; } return [a, b]; };
    const [xl, xh] = range(x), [yl, yh] = range(y);
    sx = scaleOf(xl, xh, margin.left, width - margin.right, { most: width < 500 ? 3 : 6, zero: true });
    sy = scaleOf(yl, yh, kHeight - margin.bottom, margin.top, { most: 6, zero: true });
    const g = sized(canvas, width, kHeight), groups = by === null ? [] : by.distinct();
    g.clearRect(0, 0, width, kHeight);
    g.font = `12px ${kFont}`;
    g.fillStyle = css('--soft');
    g.strokeStyle = css('--grid');
    g.lineWidth = 1;
    for (const t of axisTicks(y, sy, yl, yh)) {
      const p = Math.round(sy(t)) + 0.5;
      if (p < margin.top - 6 || p > kHeight - margin.bottom + 1) continue;
      g.beginPath(); g.moveTo(margin.left, p); g.lineTo(width - margin.right, p); g.stroke();
      g.textAlign = 'right';
      g.fillText(tick(human(t, y.unit).replace(' tok/s', '')), margin.left - 7, p + 4);
    }
    g.textAlign = 'center';
    for (const t of axisTicks(x, sx, xl, xh)) { const p = sx(t); if (p >= margin.left - 1 && p <= width - margin.right + 1) { g.beginPath(); g.moveTo(p, kHeight - margin.bottom); g.lineTo(p, kHeight - margin.bottom + 5); g.stroke(); g.fillText(tick(human(t, x.unit)), Math.min(p, width - 26), kHeight - margin.bottom + 18); } }
    g.fillText(x.name + (sx.log ? ' (logarithmic)' : ''), (margin.left + width) / 2, kHeight - 6);
    g.textAlign = 'left';
    g.fillText(y.name + (sy.log ? ' (logarithmic)' : ''), 4, 10);
    const budget = x.id === 'peak' ? report.budget(points[0] ?? 0) : 0;
    if (budget > 0 && sx(budget) < width - margin.right && sx(budget) > margin.left) {
      g.strokeStyle = css('--bad'); g.setLineDash([5, 4]); g.beginPath(); g.moveTo(sx(budget), margin.top); g.lineTo(sx(budget), kHeight - margin.bottom); g.stroke(); g.setLineDash([]);
      g.fillStyle = css('--bad'); g.textAlign = 'right'; g.fillText('memory of a device', sx(budget) - 6, margin.top + 22); g.textAlign = 'left';
    }
    const r = points.length > 4000 ? 1.8 : points.length > 400 ? 2.6 : 4.2;
    const paint = (list: number[], colour: string, shape: string, alpha: number): void => {
      g.fillStyle = colour;
      g.globalAlpha = alpha;
      if (points.length > 20000 && shape === 'circle') { for (const i of list) g.fillRect(sx(x.of(i)) - r, sy(y.of(i)) - r, 2 * r, 2 * r); }
      else for (let k = 0; k < list.length;) {  // paths of some thousand marks: longer ones are slow
        g.beginPath();
        for (const end = Math.min(list.length, k + 2000); k < end; ++k) shapePath(g, shape, sx(x.of(list[k]!)), sy(y.of(list[k]!)), r);
        g.fill();
      }
      g.globalAlpha = 1;
    };
    paint(points.filter(i => state.mask[i] === 0), css('--line'), 'circle', 0.8);
    const alpha = points.length > 4000 ? 0.55 : 0.8;
    if (groups.length === 0) paint(inside, css('--c0'), 'circle', alpha);
    else groups.forEach((v, k) => paint(inside.filter(i => by!.at(i) === v), category(k), kShapes[k % kShapes.length]!, alpha));
    g.strokeStyle = css('--ink'); g.lineWidth = 1.5; g.lineJoin = 'round'; g.beginPath();
    front.forEach((i, k) => { const px = sx(x.of(i)), py = sy(y.of(i)); if (k === 0) g.moveTo(px, py); else { g.lineTo(px, sy(y.of(front[k - 1]!))); g.lineTo(px, py); } });
    g.stroke();
    g.fillStyle = css('--page');
    for (const i of front) { g.beginPath(); g.arc(sx(x.of(i)), sy(y.of(i)), 4.2, 0, 7); g.fill(); g.stroke(); }
    legend.replaceChildren(...groups.map((v, k) => el('li', {}, swatch(k), `${by!.heading} ${axisText(by!, v)}`)), el('li', {}, el('i', { class: 'ring' }), 'Pareto front'));
    says.textContent = `${front.length} of ${whole(inside.length)} cases are on the front: nothing is better in one without being worse in the other.`;
    canvas.setAttribute('aria-label', `${y.name} against ${x.name} of ${inside.length} cases, ${front.length} of them on the Pareto front. Arrow keys walk along the front, Enter selects.`);
    marks(width);
    refreshTwin(box);
  }
  function marks(width: number): void {
    over.setAttribute('viewBox', `0 0 ${width} ${kHeight}`);
    over.replaceChildren();
    const put = (i: number, cls: string): void => { if (i >= 0 && report.ok(i) && x.of(i) > 0 && y.of(i) > 0) over.append(svg('circle', { class: cls, cx: sx(x.of(i)), cy: sy(y.of(i)), r: 8 })); };
    put(state.selected, 'halo');
    if (at >= 0 && at < front.length) put(front[at]!, 'walk');
    if (brush !== null) over.append(svg('rect', { class: 'brush', x: Math.min(brush[0], brush[2]), y: Math.min(brush[1], brush[3]), width: Math.abs(brush[2] - brush[0]), height: Math.abs(brush[3] - brush[1]) }));
  }
  function nearest(px: number, py: number): number {
    let best = -1, least = 14 * 14;
    for (const i of points) { if (state.mask[i] === 0) continue; const d = (sx(x.of(i)) - px) ** 2 + (sy(y.of(i)) - py) ** 2; if (d < least) { least = d; best = i; } }
    return best;
  }
  const lines = (i: number): string[] => [report.title(i), `${x.name}: ${human(x.of(i), x.unit)}`, `${y.name}: ${human(y.of(i), y.unit)}`, ...(report.count > 60 ? [report.differing(i, 8)] : [])];
  let from: [number, number] | null = null, at = -1;
  canvas.addEventListener('pointerdown', e => { from = [e.offsetX, e.offsetY]; });
  canvas.addEventListener('pointermove', e => {
    if (from !== null && (e.buttons & 1) === 1 && Math.hypot(e.offsetX - from[0], e.offsetY - from[1]) > 6) {
      canvas.setPointerCapture(e.pointerId);
      brush = [from[0], from[1], e.offsetX, e.offsetY];
      hideTip();
      return marks(canvas.clientWidth);
    }
    const i = nearest(e.offsetX, e.offsetY);
    if (i >= 0) showTip(lines(i), e.clientX, e.clientY); else hideTip();
  });
  canvas.addEventListener('pointerleave', hideTip);
  canvas.addEventListener('pointerup', e => {
    if (brush !== null && from !== null) {
      const [a, b, c, d] = brush, [x0, x1] = [sx.invert(Math.min(a, c)), sx.invert(Math.max(a, c))], [y0, y1] = [sy.invert(Math.max(b, d)), sy.invert(Math.min(b, d))], mx = x, my = y;
      brush = null;
      state.filter('scatter', `${mx.name} ${human(x0, mx.unit)} to ${human(x1, mx.unit)}, ${my.name} ${human(y0, my.unit)} to ${human(y1, my.unit)}`, i => mx.of(i) >= x0 && mx.of(i) <= x1 && my.of(i) >= y0 && my.of(i) <= y1);
    } else {
      const i = nearest(e.offsetX, e.offsetY);
      if (i >= 0) state.select(i);
    }
    from = null;
  });
  canvas.addEventListener('keydown', e => {
    if (front.length === 0) return;
    if (e.key === 'ArrowRight' || e.key === 'ArrowUp') at = Math.min(front.length - 1, at + 1);
    else if (e.key === 'ArrowLeft' || e.key === 'ArrowDown') at = Math.max(0, at - 1);
    else if (e.key === 'Enter' && at >= 0) state.select(front[at]!);
    else return;
    e.preventDefault();
    const i = front[Math.max(0, at)]!, b = canvas.getBoundingClientRect();
    marks(canvas.clientWidth);
    showTip(lines(i), b.left + sx(x.of(i)), b.top + sy(y.of(i)));
  });
  canvas.addEventListener('blur', hideTip);
  const redraw = drawn(box, draw);
  state.whenFiltered(redraw);
  state.whenSelected(() => { if (points.length > 0) marks(canvas.clientWidth); });
  const menu = (): [string, string][] => measures().map(m => [m.id, m.name]);
  const controls = el('div', { class: 'bar' });
  const fill = (): void => {
    controls.replaceChildren(select('Across', menu(), x.id, v => { x = report.measure(v); redraw(); }), select('Up', menu(), y.id, v => { y = report.measure(v); redraw(); }),
      select('Colour', [['', 'none'], ...report.axes().filter(c => c.distinct().length <= 8).map((c): [string, string] => [c.name, c.heading])], by?.name ?? '', v => { by = v === '' ? null : report.column(v); redraw(); }));
  };
  fill();
  state.whenPriced(() => { fill(); redraw(); });
  return figure({
    title: 'What can be had for what', label: 'Pareto front', chart: [controls, box, legend, says],
    note: 'Every case that ran, by two measures. Drag a rectangle to keep only what is in it, in every chart and the table.',
    table: () => ({ head: ['case on the front', x.name, y.name, 'layout'], rows: front.map(i => [report.text(i, 'name') || report.layout(i), human(x.of(i), x.unit), human(y.of(i), y.unit), report.layout(i)]) }),
  });
}

/// The mark of a category in a legend: its colour and its shape.
export function swatch(k: number): SVGElement {
  const path: Record<string, string> = { circle: 'M11 6a5 5 0 1 1-10 0a5 5 0 1 1 10 0', square: 'M1 1h10v10H1z', triangle: 'M6 0l6 11H0z', down: 'M6 12L12 1H0z', diamond: 'M6 0l6 6l-6 6l-6-6z', cross: 'M0 0h3l9 12H9zM12 0H9L0 12h3z', bar: 'M0 4h12v4H0z', plus: 'M0 4h4V0h4v4h4v4H8v4H4V8H0z' };
  return svg('svg', { class: 'swatch', viewBox: '0 0 12 12', 'aria-hidden': 'true' }, svg('path', { d: path[kShapes[k % kShapes.length]!]!, style: `fill:var(--c${k % 8})` }));
}
