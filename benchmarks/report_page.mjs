// How fast the report's page is at size: node benchmarks/report_page.mjs SAMPLE_PAGES (build/test/tests/browser/sample_pages).
// Prints when a page of 25,000 cases is ready and drawn, its size, and how long 100,000 marks take to paint. Needs what
// `./dev browser` installs. Measured times are no tests: they are read by people.
import { execFileSync } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';

const { chromium } = await import(new URL('../tests/browser/node_modules/playwright-core/index.mjs', import.meta.url));
const program = ['chromium-headless-shell', 'chromium'].flatMap(n => (process.env.PATH ?? '').split(delimiter).map(d => join(d, n))).find(existsSync);
const folder = mkdtempSync(join(tmpdir(), 'shardlab-bench-')), median = list => [...list].sort((a, b) => a - b)[list.length >> 1];
const browser = await chromium.launch({ executablePath: program, args: ['--no-sandbox'] });
try {
  for (const cases of [1000, 25000, 100000]) {
    execFileSync(process.argv[2], [folder, String(cases)]);
    const ready = [], drawn = [], paint = [];
    for (let i = 0; i < 5; ++i) {
      const page = await (await browser.newContext({ viewport: { width: 1280, height: 900 } })).newPage();
      await page.goto('file://' + join(folder, 'grid.html'));
      await page.waitForSelector('[data-ready=true]', { state: 'attached', timeout: 120000 });
      ready.push(await page.evaluate(() => performance.now()));
      await page.waitForSelector('[data-drawn=true]', { state: 'attached', timeout: 120000 });
      drawn.push(await page.evaluate(() => performance.now()));
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
    console.log(`${cases} cases: ${(statSync(join(folder, 'grid.html')).size / 1e6).toFixed(2)} MB, ready ${median(ready).toFixed(0)} ms, all charts drawn ${median(drawn).toFixed(0)} ms, scatter repainted in ${median(paint).toFixed(0)} ms`);
  }
} finally {
  await browser.close();
  rmSync(folder, { recursive: true, force: true });
}
