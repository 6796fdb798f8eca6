// A page that `report --serve` sends follows its run: once there is more, it loads itself again, where the reader was.
import { byId, el } from './dom';
import type { State } from './state';

const kAsk_ms = 2000, kKept = 'shardlab-reader';

/// Where the reader was: cases by their id, as numbers of cases change.
interface Reader { selected: string; other: string; scroll: number; theme: string }

function keep(state: State): void {
  const id = (i: number): string => (i < 0 ? '' : state.report.text(i, 'case_id'));
  // A reader who chose no case keeps the best.
  const reader: Reader = { selected: state.selected === Math.max(0, state.report.best) ? '' : id(state.selected), other: id(state.other), scroll: scrollY, theme: document.documentElement.dataset.theme ?? '' };
  sessionStorage.setItem(kKept, JSON.stringify(reader));
}

const kept = (): Reader | null => JSON.parse(document.documentElement.dataset.revision === undefined ? 'null' : sessionStorage.getItem(kKept) ?? 'null') as Reader | null;

/// Before anything is drawn.
export function restoreTheme(): void {
  const theme = kept()?.theme ?? '';
  if (theme !== '') document.documentElement.dataset.theme = theme;
}

function restore(state: State): void {
  const reader = kept();
  if (reader === null || state.report.count === 0) return;
  sessionStorage.removeItem(kKept);
  const ids = state.report.column('case_id');
  for (let i = 0; i < state.report.count; ++i) {
    if (ids.at(i) === reader.selected) state.select(i);
    if (ids.at(i) === reader.other) state.compareWith(i);
  }
  scrollTo({ top: reader.scroll, behavior: 'instant' });
}

/// Whether loading the page again would take something from the reader.
const isBusy = (state: State): boolean =>
  state.filterWords().length > 0 || document.querySelector('dialog[open], input:focus, select:focus, textarea:focus') !== null || (getSelection()?.toString() ?? '') !== '';

/// To be called once everything is drawn.
export function follow(state: State): void {
  const revision = document.documentElement.dataset.revision;
  if (revision === undefined) return;
  const note = el('p', { class: 'follow', role: 'status' }, 'Asking how the run goes.');
  byId('answer').before(note);
  restore(state);
  const again = (): void => { keep(state); location.reload(); };
  const ask = async (): Promise<void> => {
    let now: { revision: string; live: boolean };
    try {
      now = (await (await fetch('/state', { cache: 'no-store' })).json()) as typeof now;
    } catch {
      note.replaceChildren('`shardlab report --serve` has ended: this page stays as it is.');
      return;
    }
    if (now.revision !== revision && !isBusy(state)) return again();
    const goes = now.live ? `The run goes on: ${state.report.count} cases so far.` : 'No run goes on.';
    note.replaceChildren(goes, ...(now.revision !== revision ? [' ', el('button', { type: 'button', onclick: again }, 'Load what is new')] : []));
    setTimeout(() => void ask(), kAsk_ms);
  };
  void ask();
}
