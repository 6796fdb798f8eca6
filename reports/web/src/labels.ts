// Labels of cases that stand beside one another in a chart: what all of them have in common is said once, what tells them apart stays.
import type { Report } from './data';

export interface Labels { of: string[]; common: string }

/// The names of cases (the layout, where a case has no name) without the words that all of them have, which are `common`. Of a
/// setting that some cases have and others have not ("recompute=none"), those alone say it that have it.
export function labelsOf(report: Report, cases: number[]): Labels {
  const words = cases.map(i => (report.text(i, 'name') || report.layout(i)).split(' ').filter(w => w !== ''));
  const sets = words.map(list => new Set(list)), common = words.length < 2 ? [] : [...new Set(words[0]!)].filter(w => sets.every(s => s.has(w)));
  const left = words.map(list => list.filter(w => !common.includes(w) && !/=(none|false)$/.test(w)).join(' '));
  // No case is left without a word, nor two with the same words.
  if (left.some(text => text === '') || new Set(left).size < new Set(words.map(list => list.join(' '))).size) return { of: words.map(list => list.join(' ')), common: '' };
  return { of: left, common: common.join(' ') };
}

/// `text` in lines of at most `width` characters, broken between words; of what needs more than `most` lines the last ends with "…".
export function wrapped(text: string, width: number, most: number): string[] {
  const lines: string[] = [];
  for (const word of text.split(' ')) {
    const last = lines[lines.length - 1];
    if (last !== undefined && last.length + 1 + word.length <= width) lines[lines.length - 1] = last + ' ' + word;
    else lines.push(word);
  }
  const shown = lines.slice(0, most).map(line => (line.length > width ? line.slice(0, width - 1) + '…' : line)), last = shown.length - 1;
  if (lines.length > most && !shown[last]!.endsWith('…')) shown[last] = shown[last]!.slice(0, width - 1) + '…';
  return shown;
}
