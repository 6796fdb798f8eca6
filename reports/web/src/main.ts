// The report's page. Reads the data beside it and draws every section; no library, no network.
import { answerSection } from './answer';
import { aboutSection } from './about';
import { predictionSection } from './accuracy';
import { casesSection } from './cases';
import { changesSection } from './changes';
import { read, Report } from './data';
import { byId, el, hideTip } from './dom';
import { drawAll, drawRest, section, themed } from './figure';
import { follow, restoreTheme } from './follow';
import { heatFigure } from './heat';
import { lossSection } from './losses';
import { memorySection } from './memory';
import { parallelFigure } from './parallel';
import { scalingFigure } from './scaling';
import { scatterFigure } from './scatter';
import { State } from './state';
import { forget, isDark, setPrinting } from './theme';
import { timelineSection } from './timeline';
import { waterfallSection } from './waterfall';
import { whole } from './format';

function gridSection(report: Report, state: State): void {
  const figures = [heatFigure, scatterFigure, scalingFigure, parallelFigure].map(make => make(report, state)).filter((f): f is HTMLElement => f !== null);
  if (figures.length > 0) section('grid', 'The cases at a glance').append(...figures);
}

function navigation(): void {
  const nav = document.querySelector('nav')!, root = document.documentElement, button = byId('theme');
  byId('nav').append(...[...document.querySelectorAll('main section')].map(s => el('a', { href: '#' + s.id }, s.querySelector('h2')?.textContent ?? '')));
  nav.hidden = false;
  const name = (): void => { button.textContent = isDark() ? 'Light' : 'Dark'; };
  const change = (): void => { forget(); name(); themed(); };
  button.hidden = false;
  button.addEventListener('click', () => { root.dataset.theme = isDark() ? 'light' : 'dark'; change(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', change);
  addEventListener('beforeprint', () => { setPrinting(true); drawAll(true); });
  addEventListener('afterprint', () => { setPrinting(false); drawAll(true); });
  name();
}

/// The filters that are set, at the foot of the window, wherever the reader is.
function filterBar(state: State): void {
  const bar = el('div', { class: 'filters', role: 'status', hidden: true });
  document.body.append(bar);
  state.whenFiltered(() => {
    const words = state.filterWords();
    bar.hidden = words.length === 0;
    bar.replaceChildren(el('span', {}, `${whole(state.shown)} of ${whole(state.report.count)} cases`), ...words.map(([key, says]) => el('button', { type: 'button', class: 'chip', 'aria-label': 'Take away the filter ' + says, onclick: () => state.filter(key, '', null) }, (says.length > 48 ? says.slice(0, 46) + '…' : says) + ' ×')),
      words.length > 1 ? el('button', { type: 'button', onclick: () => state.clear() }, 'All cases') : '');
  });
}

async function main(): Promise<void> {
  restoreTheme();
  const report = new Report(await read()), state = new State(report);
  answerSection(report, state);
  if (report.doc.kind === 'comparison') changesSection(report, state);
  gridSection(report, state);
  waterfallSection(report, state);
  memorySection(report, state);
  timelineSection(report, state);
  predictionSection(report, state);
  lossSection(report, state);
  if (report.count > 0) casesSection(report, state);
  aboutSection(report, state);
  navigation();
  filterBar(state);
  document.addEventListener('keydown', e => { if (e.key === 'Escape') hideTip(); });
  document.documentElement.dataset.ready = 'true';
  setTimeout(() => drawRest(() => {
    follow(state);
    document.documentElement.dataset.drawn = 'true';
  }), 60);
}

main().catch((error: unknown) => {
  byId('app').append(el('p', { class: 'note' }, 'The page could not be drawn: ' + String(error)));
  throw error;
});
