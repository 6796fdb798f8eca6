// How fast the report's page is at size: node benchmarks/report_page.mjs SAMPLE_PAGES (build/test/tests/browser/sample_pages).
// Prints, for pages of 1,000, 25,000 and 125,000 cases (of which a fifth does not fit, so that the last has 100,000 marks): the size, when the
// page is ready and all charts are drawn, by the page's own clock from its navigation on; the processor time of its main thread until then;
// and how long the marks take to paint. Each is the median of seven loads, and the least. Needs what `./dev browser` installs. Measured
// times are no tests: they are read by people, and on a machine that does nothing else.
import { execFileSync } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';

const { chromium } = await import(new URL('../tests/browser/node_modules/playwright-core/index.mjs', import.meta.url));
const program = ['chromium-headless-shell', 'chromium'].flatMap(n => (process.env.PATH ?? '').split(delimiter).map(d => join(d, n))).find(existsSync);
const folder = mkdtempSync(join(tmpdir(), 'shardlab-bench-')), median = list => [...list].sort((a, b) => a - b)[list.length >> 1];
const browser = await chromium.launch({ executablePath: program, args: ['--no-sandbox'] });
try {
  for (const cases of [1000, 25000, 125000]) {
    execFileSync(process.argv[2], [folder, String(cases)]);
    const ready = [], drawn = [], busy = [], paint = [];
    for (let i = 0; i < 7; ++i) {
      const page = await (await browser.newContext({ viewport: { width: 1280, height: 900 } })).newPage();
      const session = await page.context().newCDPSession(page);
      await session.send('Performance.enable', { timeDomain: 'threadTicks' });
      // The page's own clock: what the driver asks is answered a frame or more later.
      await page.addInitScript(() => {
        window.times = {};
        new MutationObserver(changes => { for (const c of changes) window.times[c.attributeName] ??= performance.now(); })
          .observe(document, { attributes: true, subtree: true, attributeFilter: ['data-ready', 'data-drawn'] });
      });
      await page.goto('file://' + join(folder, 'grid.html'));
      await page.waitForSelector('[data-drawn=true]', { state: 'attached', timeout: 120000 });
      const times = await page.evaluate(() => window.times);
      ready.push(times['data-ready']);
      drawn.push(times['data-drawn']);
      busy.push(1000 * (await session.send('Performance.getMetrics')).metrics.find(m => m.name === 'ThreadTime').value);
      // A change of an axis repaints every mark of the scatter plot.
      paint.push(await page.evaluate(async () => {
        const figure = document.querySelector('figure[aria-label="Pareto front"]'), box = figure.querySelector('select'), canvas = figure.querySelector('canvas');
        canvas.scrollIntoView({ behavior: 'instant' });
        await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
        box.selectedIndex = (box.selectedIndex + 1) % box.options.length;
        const begin = performance.now();
        box.dispatchEvent(new Event('change'));
        await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
        canvas.getContext('2d').getImageData(0, 0, 1, 1);  // waits for what is queued
        return performance.now() - begin;
      }));
      await page.context().close();
    }
    const says = list => `${median(list).toFixed(0)} (${Math.min(...list).toFixed(0)}) ms`;
    console.log(`${cases} cases: ${(statSync(join(folder, 'grid.html')).size / 1e6).toFixed(2)} MB, ready ${says(ready)}, all charts drawn ${says(drawn)}, main thread ${says(busy)}, scatter repainted in ${says(paint)}`);
  }
} finally {
  await browser.close();
  rmSync(folder, { recursive: true, force: true });
}
