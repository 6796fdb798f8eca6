// What is selected and what is filtered; every chart and the table follow it.
import type { Report } from './data';

type Listener = () => void;

export class State {
  selected: number;
  /// The case beside the selected one, or -1.
  other = -1;
  /// 1 for cases that every filter lets through.
  readonly mask: Uint8Array;
  shown: number;
  private readonly filters = new Map<string, { says: string; passes: (i: number) => boolean }>();
  private readonly onSelect: Listener[] = [];
  private readonly onFilter: Listener[] = [];
  private readonly onTheme: Listener[] = [];
  private readonly onPrice: Listener[] = [];

  constructor(readonly report: Report) {
    this.selected = Math.max(0, report.best);
    this.mask = new Uint8Array(report.count).fill(1);
    this.shown = report.count;
  }
  select(i: number): void {
    if (i === this.selected || i < 0 || i >= this.report.count) return;
    this.selected = i;
    for (const react of this.onSelect) react();
  }
  compareWith(i: number): void {
    this.other = i;
    for (const react of this.onSelect) react();
  }
  /// Sets or, by null, takes away the filter called `key`.
  filter(key: string, says: string, passes: ((i: number) => boolean) | null): void {
    if (passes === null) {
      if (!this.filters.delete(key)) return;
    } else {
      this.filters.set(key, { says, passes });
    }
    const all = [...this.filters.values()];
    this.shown = 0;
    for (let i = 0; i < this.mask.length; ++i) this.shown += this.mask[i] = all.every(f => f.passes(i)) ? 1 : 0;
    for (const react of this.onFilter) react();
  }
  filterWords(): [string, string][] {
    return [...this.filters].map(([key, f]) => [key, f.says]);
  }
  clear(): void {
    for (const key of [...this.filters.keys()]) this.filter(key, '', null);
  }
  whenSelected(react: Listener): void { this.onSelect.push(react); }
  whenFiltered(react: Listener): void { this.onFilter.push(react); }
  whenThemed(react: Listener): void { this.onTheme.push(react); }
  whenPriced(react: Listener): void { this.onPrice.push(react); }
  themed(): void { for (const react of this.onTheme) react(); }
  priced(): void { for (const react of this.onPrice) react(); }
}
