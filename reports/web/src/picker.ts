// The choice of the case, and of a second one to hold against it.
import type { Report } from './data';
import { el } from './dom';
import type { State } from './state';

const kListed = 300;

/// Cases that ran, the fastest first; of very many, the fastest alone, and those that are chosen.
function listed(report: Report, state: State): number[] {
  const all: number[] = report.ranking().slice(0, kListed);
  if (report.ranking().length <= kListed) all.sort((a, b) => a - b);
  for (const i of [state.selected, state.other]) if (i >= 0 && i < report.count && !all.includes(i)) all.unshift(i);
  return all;
}

export function casePicker(report: Report, state: State, second: boolean): HTMLElement {
  const main = el('select', { onchange: () => state.select(+main.value) }), other = el('select', { onchange: () => state.compareWith(+other.value) });
  const fill = (): void => {
    const cases = listed(report, state), option = (i: number): HTMLOptionElement => el('option', { value: i }, report.title(i));
    main.replaceChildren(...cases.map(option));
    main.value = String(state.selected);
    other.replaceChildren(el('option', { value: -1 }, 'nothing'), ...cases.map(option));
    other.value = String(state.other);
  };
  state.whenSelected(fill);
  fill();
  return el('div', { class: 'bar cases' }, el('label', {}, el('span', {}, 'Case'), main), second && el('label', {}, el('span', {}, 'against'), other));
}
