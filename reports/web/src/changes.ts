// A comparison: how each figure of each case changed from one run to the other, beside its noise.
import type { Change, Report } from './data';
import { el, hideTip, select, showTip, svg } from './dom';
import { drawn, figure, refreshTwin, section } from './figure';
import { human, percent, whole } from './format';
import { scaleOf } from './scale';
import type { State } from './state';

const kShown = 40, kRow = 26;
const kColour: Record<string, string> = { better: 'var(--good)', worse: 'var(--bad)', changed: 'var(--accent)', unsure: 'var(--c3)' };

/// (after - before) / |before|; 0 where nothing changed, infinite where the figure was 0.
const relative = (c: Change): number => c.after === c.before ? 0 : (c.after - c.before) / Math.abs(c.before);
const signedPercent = (v: number): string => Number.isFinite(v) ? (v > 0 ? '+' : v < 0 ? '−' : '') + percent(Math.abs(v)) : 'from 0';
const noiseOf = (c: Change): number => c.before !== 0 ? c.noise / Math.abs(c.before) : 0;

export function changesSection(report: Report, state: State): void {
  const all = report.doc.changes;
  if (all.length === 0) return;
  const metrics = [...new Set(all.map(c => c.metric))], box = el('div', { class: 'chart changes' }), says = el('p', { class: 'note', role: 'status' });
  // A figure that all cases kept says nothing.
  let metric = metrics.find(m => all.some(c => c.metric === m && c.verdict !== 'same' && c.verdict !== 'noise')) ?? metrics[0]!;
  const name = (c: Change): string => report.short(c.b).replace(/^B: /, '');
  const isNoise = (c: Change): number => c.verdict === 'noise' || c.verdict === 'same' ? 1 : 0;
  const sorted = (): Change[] => all.filter(c => c.metric === metric).sort((p, q) => isNoise(p) - isNoise(q) || Math.abs(relative(q)) - Math.abs(relative(p)) || p.b - q.b);
  const choose = (c: Change): void => {
    state.select(c.a);
    state.compareWith(c.b);
    document.getElementById('why')?.scrollIntoView();
  };

  function picture(list: Change[], width: number): SVGElement {
    const gutter = Math.min(260, width * 0.36), right = width < 560 ? 70 : 190, bottom = 24 + list.length * kRow;
    const reach = Math.max(0.001, ...list.map(c => Math.abs(relative(c)) + noiseOf(c)).filter(Number.isFinite)), x = scaleOf(-reach, reach, gutter, width - right, { most: width < 560 ? 3 : 6, log: false });
    const node = svg('svg', { width, height: bottom + 8, role: 'group', 'aria-label': `Change of ${metric}, case by case` });
    for (const t of x.ticks) node.append(svg('line', { class: t === 0 ? 'rule' : 'grid', x1: x(t), x2: x(t), y1: 20, y2: bottom }), svg('text', { class: 'tick', x: x(t), y: 13, 'text-anchor': 'middle' }, signedPercent(t)));
    list.forEach((c, k) => {
      const y = 24 + k * kRow + kRow / 2, change = relative(c), at = Number.isFinite(change) ? x(change) : x(reach), noise = noiseOf(c), colour = kColour[c.verdict] ?? 'var(--soft)';
      const most = Math.floor(gutter / 7.2), shown = name(c).length > most ? name(c).slice(0, most - 1) + '…' : name(c), sum = `${signedPercent(change)} ${c.verdict}`;
      const figures = `${human(c.before, c.unit)} to ${human(c.after, c.unit)}${noise > 0 ? `, noise ±${percent(noise)}` : ''}`;
      const row = svg('g', { class: 'row', tabindex: 0, role: 'button', 'aria-label': `${shown} ${sum}: ${figures}`, onclick: () => choose(c), onpointermove: (e: PointerEvent) => showTip([name(c), sum, figures], e.clientX, e.clientY), onpointerleave: hideTip, onkeydown: (e: KeyboardEvent) => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); choose(c); } } });
      row.append(svg('rect', { class: 'hit', x: 0, y: y - kRow / 2, width, height: kRow }));
      row.append(svg('text', { class: 'name', x: 0, y: y + 4 }, shown), svg('line', { x1: x(0), x2: at, y1: y, y2: y, style: `stroke:${colour};stroke-width:3` }));
      if (noise > 0) row.append(svg('line', { x1: x(Math.max(-reach, change - noise)), x2: x(Math.min(reach, change + noise)), y1: y, y2: y, style: 'stroke:var(--soft);stroke-width:1.5' }));
      row.append(svg('circle', { cx: at, cy: y, r: 5, style: `fill:${colour}` }), svg('text', { class: 'value', x: width - right + 12, y: y + 4 }, width < 560 ? signedPercent(change) : sum));
      node.append(row);
    });
    return node;
  }

  const redraw = drawn(box, width => {
    const list = sorted(), moved = list.filter(c => c.verdict !== 'same');
    box.replaceChildren(moved.length === 0 ? el('p', { class: 'note' }, `${metric} is the same in all ${whole(list.length)} cases.`) : picture(moved.slice(0, kShown), width));
    says.textContent = moved.length > kShown ? `The first ${kShown} of ${whole(moved.length)} changes, those beyond noise before the others; ${whole(list.length - moved.length)} cases are the same.` : `${whole(moved.length)} of ${whole(list.length)} cases differ.`;
    refreshTwin(box);
  });
  section('changes', 'What changed').append(figure({
    title: 'From A to B, case by case', label: 'Changes', chart: [box, says],
    note: 'A line ends at the change of a case; the thin line is its noise, three standard errors. A row opens both cases side by side under “Why is it slow?”.',
    controls: select('Figure', metrics.map(m => [m, m]), metric, value => { metric = value; redraw(); }),
    table: () => ({ head: ['case', 'A', 'B', 'change', 'noise', 'verdict'],
      rows: sorted().map(c => [name(c), human(c.before, c.unit), human(c.after, c.unit), signedPercent(relative(c)), noiseOf(c) > 0 ? '±' + percent(noiseOf(c)) : '', c.verdict]) }),
  }));
}
