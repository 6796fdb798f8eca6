// What a reader does with the page, in a real browser: it draws without a fault or a request, is followed by keys, filters together,
// prints, and axe-core finds nothing in it. Skipped where playwright-core, axe-core or the browser are not installed.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { createServer } from 'node:http';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';

const here = fileURLToPath(new URL('.', import.meta.url));
const program = ['chromium-headless-shell', 'chromium', 'chromium-browser', 'google-chrome'].flatMap(n => (process.env.PATH ?? '').split(delimiter).map(d => join(d, n))).find(existsSync);
const missing = !program ? 'no browser (chromium) in the PATH' : !existsSync(here + 'node_modules/playwright-core') || !existsSync(here + 'node_modules/axe-core') ? 'no playwright-core and axe-core in tests/browser/node_modules; ./dev browser fetches them'
  : !process.env.SHARDLAB_SAMPLE_PAGES ? 'no SHARDLAB_SAMPLE_PAGES: run it through ctest' : '';
if (missing !== '') {
  console.log('skipped: ' + missing);
  process.exit(0);
}
const { chromium } = await import('playwright-core');
const axe = readFileSync(here + 'node_modules/axe-core/axe.min.js', 'utf8');
let browser, folder;

before(async () => {
  folder = mkdtempSync(join(tmpdir(), 'shardlab-pages-'));
  execFileSync(process.env.SHARDLAB_SAMPLE_PAGES, [folder]);
  browser = await chromium.launch({ executablePath: program, args: ['--no-sandbox'] });
});
after(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true, force: true });
});

/// Opens a page, waits until everything is drawn, calls `act`, and holds that nothing failed and nothing was requested.
async function open(name, act, options = {}) {
  const context = await browser.newContext({ viewport: { width: options.width ?? 1280, height: 900 }, colorScheme: options.scheme ?? 'light', offline: true });
  const page = await context.newPage(), faults = [];
  page.on('pageerror', e => faults.push('error: ' + e.message));
  page.on('console', m => { if (m.type() === 'error' || m.type() === 'warning') faults.push('console: ' + m.text()); });
  page.on('request', r => { if (!/^(file|data|blob):/.test(r.url())) faults.push('request: ' + r.url()); });
  page.on('dialog', d => { faults.push('dialog: ' + d.message()); void d.dismiss(); });
  await page.goto('file://' + join(folder, name + '.html'));
  await page.waitForSelector('[data-drawn=true]', { state: 'attached', timeout: 60000 });
  await act(page);
  await context.close();
  assert.deepEqual(faults, []);
}
const shown = page => page.locator('#cases [role=status]').first().textContent();
const selected = page => page.evaluate(() => document.querySelector('#why .bar select').value);

for (const name of ['sample', 'empty', 'hostile', 'grid', 'comparison', 'data-parallel', 'simulated'])
  for (const width of [1280, 390])
    for (const scheme of ['light', 'dark'])
      test(`axe-core finds nothing in the page ${name}, ${width} wide, ${scheme}`, () => open(name, async page => {
        assert.equal(await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth), 0, 'the page overflows its window');
        await page.evaluate(() => { for (const d of document.querySelectorAll('details')) d.open = true; });
        await page.waitForTimeout(50);
        await page.evaluate(axe);
        const found = await page.evaluate(() => axe.run(document));
        assert.ok(found.passes.length > 10);
        assert.deepEqual(found.violations.map(v => `${v.id}: ${v.nodes.slice(0, 3).map(n => n.target.join(' ')).join(', ')}`), []);
      }, { width, scheme }));

test('axe-core sees what is wrong', async () => {
  const page = await browser.newPage();
  await page.setContent('<!DOCTYPE html><html lang="en"><title>x</title><body><main><h1>x</h1><img src="data:,"><button></button></main></body></html>');
  await page.evaluate(axe);
  const ids = (await page.evaluate(() => axe.run(document))).violations.map(v => v.id);
  assert.ok(ids.includes('image-alt') && ids.includes('button-name'));
  await page.close();
});

test('every section is there, and the answer names model, device and layout', () => open('sample', async page => {
  for (const id of ['answer', 'grid', 'why', 'memory', 'timeline', 'prediction', 'losses', 'cost', 'cases', 'environment']) assert.equal(await page.locator('section#' + id).count(), 1, id);
  const answer = await page.locator('#answer').innerText();
  for (const words of ['quick-gpt', 'local', 'What bounds it.', 'What to try next.', '4 of 19 cases did not run', 'heads 6 is not divisible by tp 5']) assert.ok(answer.includes(words), words);
}));

test('the bars of the waterfall add up to the step, to the pixel', () => open('sample', async page => {
  const ends = await page.evaluate(() => [...document.querySelectorAll('#why svg')].map(svg => {
    const rects = [...svg.querySelectorAll('rect[height]:not(.side-a):not(.side-b)')].map(r => ({ x: +r.getAttribute('x'), end: +r.getAttribute('x') + +r.getAttribute('width'), sum: r.classList.contains('sum'), second: r.classList.contains('second') }));
    return [false, true].map(second => ({ bars: Math.max(...rects.filter(r => !r.sum && r.second === second).map(r => r.end)), sum: Math.max(...rects.filter(r => r.sum && r.second === second).map(r => r.end)) }));
  }).flat());
  assert.equal(ends.length, 2);  // predicted and measured
  for (const e of ends) assert.ok(Math.abs(e.bars - e.sum) < 1.01, JSON.stringify(e));
}));

test('the algorithm of each collective stands under the waterfall of its case', () => open('sample', async page => {
  assert.equal(await page.locator('#why .algorithms table').count(), 0);
  await page.locator('#why .bar select').first().selectOption({ value: '9' });
  const rows = await page.locator('#why .algorithms tbody tr').allInnerTexts();
  assert.equal(rows.length, 2);
  for (const words of ['layer.F attn.out', '2 ranks of tp on 2 nodes', 'direct', 'least predicted time', 'ring 2.000 ms, tree 2.500 ms']) assert.ok(rows[1].includes(words), words + ' in ' + rows[1]);
  assert.ok(rows[0].includes('rule by kind and ranks'), rows[0]);
}));

test('a filter, a brush and a chip change every chart and the table together', () => open('grid', async page => {
  assert.match(await shown(page), /^3\u202f000 cases$/);
  await page.locator('#cases input[type=search]').fill('tp=4');
  await page.waitForFunction(() => /^750 of/.test(document.querySelector('#cases [role=status]').textContent.replace('\u202f', '')));
  assert.ok(await page.locator('.heat td.empty').filter({ hasText: 'filtered out' }).count() > 0);
  await page.locator('#cases .chip').first().click();
  assert.match(await shown(page), /^3\u202f000 cases$/);
  // A rectangle on the scatter plot.
  const canvas = page.locator('figure[aria-label="Pareto front"] canvas'), box = await (await canvas.scrollIntoViewIfNeeded(), canvas.boundingBox());
  await page.mouse.move(box.x + box.width * 0.4, box.y + box.height * 0.3);
  await page.mouse.down();
  await page.mouse.move(box.x + box.width * 0.7, box.y + box.height * 0.7, { steps: 6 });
  await page.mouse.up();
  assert.match(await shown(page), / of /);
  await page.locator('.filters .chip').first().click();
  // The value of an axis of the parallel coordinates, by keyboard.
  await page.locator('figure[aria-label="Parallel coordinates"] summary').click();
  await page.locator('figure[aria-label="Parallel coordinates"] .sliders select').first().selectOption({ index: 1 });
  assert.match(await shown(page), / of /);
}));

test('a refusal’s line opens its cases and filters by them', () => open('grid', async page => {
  const line = page.locator('.refusals details').first();
  assert.match(await line.locator('summary').innerText(), /600 does not fit .*80\.\d+ GiB to 1\d\d\.\d+ GiB/);
  await line.locator('summary').click();
  await line.locator('button').click();
  assert.match((await shown(page)).replace('\u202f', ''), /^600 of 3000/);
}));

test('bars of memory name each case by what tells it apart, beside its bar', () => open('grid', async page => {
  const labels = page.locator('figure[aria-label="Memory of cases"] svg text.name');
  await labels.first().waitFor({ timeout: 10000 });
  const texts = await labels.allTextContents();
  assert.ok(texts.length >= 20, String(texts.length));
  assert.equal(new Set(texts).size, texts.length);
  assert.ok(texts.every(t => /repetition=\d+$/.test(t) && !t.includes('overlap=true') && !t.includes('recompute=none')), texts[0]);
  assert.match(await page.locator('figure[aria-label="Memory of cases"]').innerText(), /In all of them: .*overlap=true\./);
  const beyond = await labels.evaluateAll(list => list.map(t => t.getBoundingClientRect().right - t.parentNode.querySelector('rect').getBoundingClientRect().left));
  assert.ok(beyond.every(b => b <= 0), String(Math.max(...beyond)));
}));

test('tables of long names keep their figures in sight', () => open('grid', async page => {
  const scroller = page.locator('#cost .scroll');
  await scroller.scrollIntoViewIfNeeded();
  assert.deepEqual(await scroller.evaluate(s => [s.querySelectorAll('td.words').length > 0, s.scrollWidth - s.clientWidth]), [true, 0]);
}));

test('every section is in the navigation of a window of 1280 pixels', () => open('sample', async page => {
  assert.equal(await page.evaluate(() => { const bar = document.querySelector('#nav'); return bar.scrollWidth - bar.clientWidth; }), 0);
}));

test('a prediction without an interval says why', async () => {
  await open('simulated', async page => assert.match(await page.locator('#answer .facts').innerText(), /predicted; no interval: of shardlab’s own executor no run on local was measured to learn its error from/));
  await open('sample', async page => assert.doesNotMatch(await page.locator('#answer .facts').innerText(), /no interval/));
});

test('a layout whose dp is all of its ranks is not told to have more', () => open('data-parallel', async page => {
  assert.match(await page.locator('#answer').innerText(), /dp8/);
  assert.doesNotMatch(await page.locator('#answer').innerText(), /Try a larger one/);
}));

test('a simulated step is drawn by calls, and by ops where the window has room for them, as its table says', () => open('simulated', async page => {
  const streams = page.locator('figure[aria-label="Timeline of one step"]'), status = streams.locator('[role=status]').first();
  await streams.scrollIntoViewIfNeeded();
  await page.waitForFunction(() => /by calls of segments: zoom in for ops/.test(document.querySelector('figure[aria-label="Timeline of one step"] [role=status]').textContent));
  assert.match(await status.textContent(), /^0 s to 93\.\d+ ms of 93\.\d+ ms/);
  await streams.locator('summary').click();
  const head = () => streams.locator('thead').innerText(), rows = () => streams.locator('tbody tr').allInnerTexts();
  await streams.locator('tbody tr').first().waitFor();
  assert.match(await head(), /call\s+ops\s+begins/);
  // 200 calls on each of two streams; the 30 ops of a call last 465 us.
  assert.equal((await rows()).length, 400);
  assert.match((await rows())[1], /^0\s+compute\s+predicted\s+layers\.1 m0 layer\.F\s+30\s+469\.0 us\s+465\.0 us/);
  const canvas = await streams.locator('canvas').boundingBox();
  await page.mouse.move(canvas.x + canvas.width / 2, canvas.y + 34);
  assert.match(await page.locator('#tip').innerText(), /layer\.F\n.*rank 0, compute, predicted at .*\n30 ops in 4(65|70)\.0 us/);
  for (let i = 0; i < 6; ++i) await streams.getByRole('button', { name: 'Zoom in' }).click();
  assert.match(await status.textContent(), /, by ops$/);
  await page.waitForFunction(() => !document.querySelector('figure[aria-label="Timeline of one step"] thead').textContent.includes('call'));
  // Call 100 begins after 100 calls of 465 us, of which ten took 5 us more, and 100 waits of 4 us and n halves of a nanosecond.
  const tenth = (await rows()).find(r => r.includes('layers.0 m25 layer.F op0 fill'));
  assert.match(tenth, /46\.95 ms\s+1\.000 us/);
  const now = await streams.locator('canvas').boundingBox();
  await page.mouse.move(now.x + now.width / 2 + 5, now.y + 34);
  assert.match(await page.locator('#tip').innerText(), /layers\.\d m\d+ layer\.F op\d+ fill\n.*\nfill: .*\npredicted /s);
}));

test('a timeline that begins a step does not pass for the whole of it', () => open('hostile', async page => {
  const streams = page.locator('figure[aria-label="Timeline"], #timeline figure').last();
  await streams.scrollIntoViewIfNeeded();
  assert.match(await streams.innerText(), / of the first /);
  assert.equal(await streams.getByRole('button', { name: 'All that is shown' }).count(), 1);
  assert.equal(await streams.getByRole('button', { name: 'Whole step' }).count(), 0);
}));

test('bytes of an axis are whole powers of two or their multiples, logarithmic or not', async () => {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 } }), page = await context.newPage();
  await page.addInitScript(() => {
    const written = CanvasRenderingContext2D.prototype.fillText;
    window.written = [];
    CanvasRenderingContext2D.prototype.fillText = function (text, ...at) { window.written.push(text); return written.call(this, text, ...at); };
  });
  for (const name of ['grid', 'sample', 'comparison']) {
    await page.goto('file://' + join(folder, name + '.html'));
    await page.waitForSelector('[data-drawn=true]', { state: 'attached', timeout: 60000 });
    const bytes = (await page.evaluate(() => window.written)).filter(t => /^[\d.]+ [KMGT]?i?B$/.test(t));
    assert.ok(bytes.length > 0);
    for (const t of bytes) assert.match(t, /^\d+(\.[257]5?)? [KMGT]?i?B$/, name);
  }
  await context.close();
});

test('the table is sorted, walked and selected by keys, and holds only the rows in the window', () => open('grid', async page => {
  assert.ok(await page.locator('#cases tbody tr.pick').count() < 60);
  await page.locator('#cases [data-sort=predicted_step_s]').click();
  assert.equal(await page.locator('#cases th[aria-sort]').getAttribute('aria-sort'), 'ascending');
  const table = page.locator('#cases [role=region]');
  await table.focus();
  for (const key of ['ArrowDown', 'ArrowDown', 'End', 'Enter']) await page.keyboard.press(key);
  const last = await page.locator('#cases tr.selected').getAttribute('aria-rowindex');
  assert.equal(last, '3001');
  assert.equal(await page.evaluate(() => document.querySelector('#cases table').getAttribute('aria-rowcount')), '3001');
}));

test('the heat map and the front are walked by arrow keys', () => open('grid', async page => {
  const before = await selected(page);
  await page.locator('.heat td button').first().focus();
  await page.keyboard.press('ArrowRight');
  await page.keyboard.press('Enter');
  const cell = await page.evaluate(() => document.activeElement.dataset.case);
  assert.equal(await selected(page), cell);
  await page.locator('figure[aria-label="Pareto front"] canvas').focus();
  for (const key of ['ArrowRight', 'ArrowRight', 'Enter']) await page.keyboard.press(key);
  assert.notEqual(await selected(page), cell);
  assert.ok(before !== undefined);
}));

test('every chart has a table twin with rows', () => open('sample', async page => {
  await page.locator('#why .bar select').first().selectOption({ label: 'pp4 1f1b' });  // which has figures of its stages
  const twins = page.locator('details.twin:has(> summary:text-is("As a table"))');
  const n = await twins.count();
  assert.ok(n >= 9, String(n));
  for (let i = 0; i < n; ++i) {
    await twins.nth(i).locator('> summary').click();
    // A chart is drawn, and its twin filled, once it is near the window.
    await twins.nth(i).locator('tbody tr').first().waitFor({ state: 'attached', timeout: 10000 })
      .catch(async () => assert.fail(await twins.nth(i).locator('xpath=..').getAttribute('aria-label')));
  }
}));

test('the pipeline has a row a stage, and a bubble under the pointer', () => open('sample', async page => {
  await page.locator('#timeline .bar select').first().selectOption({ label: 'pp4 1f1b' });
  const canvas = page.locator('figure[aria-label="Pipeline grid"] canvas').first();
  await canvas.scrollIntoViewIfNeeded();
  await page.locator('figure[aria-label="Pipeline grid"] canvas[aria-label*="4 stages"]').first().waitFor({ timeout: 10000 });
  const box = await canvas.boundingBox();
  await page.mouse.move(box.x + 80, box.y + 26 + 3 * 30 + 10);  // the last stage waits for the first
  assert.match(await page.locator('#tip').innerText(), /bubble\nstage 3 waits/);
}));

test('phases of the pipeline differ in colour for every kind of sight, in both schemes and on paper', async () => {
  // Severe colour blindness in linear RGB (Machado, Oliveira, Fernandes 2009), and distances in OKLab.
  const sights = { all: [1, 0, 0, 0, 1, 0, 0, 0, 1], protan: [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
    deutan: [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881], tritan: [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900] };
  const times = (m, v) => [0, 1, 2].map(r => m[3 * r] * v[0] + m[3 * r + 1] * v[1] + m[3 * r + 2] * v[2]);
  const linear = hex => [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16) / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const lab = c => times([0.2104542553, 0.793617785, -0.0040720468, 1.9779984951, -2.428592205, 0.4505937099, 0.0259040371, 0.7827717662, -0.808675766],
    times([0.4122214708, 0.5363325363, 0.0514459929, 0.2119034982, 0.6806995451, 0.1073969566, 0.0883024619, 0.2817188376, 0.6299787005], c).map(Math.cbrt));
  for (const [scheme, media] of [['light', 'screen'], ['dark', 'screen'], ['dark', 'print']]) await open('sample', async page => {
    await page.emulateMedia({ media, colorScheme: scheme });
    const colours = await page.evaluate(() => ['f', 'b', 'i', 'w', 'u'].map(p => getComputedStyle(document.documentElement).getPropertyValue('--phase-' + p).trim()));
    for (const [sight, matrix] of Object.entries(sights)) {
      const seen = colours.map(c => lab(times(matrix, linear(c)).map(v => Math.max(0, Math.min(1, v)))));
      for (let a = 0; a < seen.length; ++a) for (let b = 0; b < a; ++b) assert.ok(Math.hypot(...seen[a].map((v, k) => v - seen[b][k])) > 0.13, `${colours[a]} and ${colours[b]}, ${sight}, ${scheme}, ${media}`);
    }
  }, { scheme });
});

test('a comparison shows what changed beyond noise first, and a row opens both cases side by side', () => open('comparison', async page => {
  const rows = page.locator('#changes svg .row');
  assert.equal(await rows.count(), 2);  // the third pair is the same
  assert.match(await rows.first().getAttribute('aria-label'), /\+25 % worse: .* to .*, noise ±2.0 %$/);
  await rows.first().focus();
  await page.keyboard.press('Enter');
  const [one, other] = await page.locator('#why .bar select').evaluateAll(boxes => boxes.map(b => b.selectedOptions[0].textContent));
  assert.ok(one.startsWith('A: ') && other.startsWith('B: ') && one.slice(3) === other.slice(3), one + ' / ' + other);
  await page.locator('#changes .bar select').selectOption('peak_bytes');
  await page.locator('#changes .note', { hasText: 'peak_bytes is the same in all 3 cases.' }).waitFor({ timeout: 10000 });
}));

test('the CSV of the shown rows is what the table shows', () => open('sample', async page => {
  await page.locator('#cases input[type=search]').fill('tp=2 status=ok');
  const wait = page.waitForEvent('download');
  await page.getByRole('button', { name: 'Save as CSV' }).click();
  const lines = readFileSync(await (await wait).path(), 'utf8').trim().split('\n');
  assert.equal(lines.length, 1 + 4);
  assert.ok(lines[0].startsWith('name,'));
}));

test('a printed page is light, has tables in full and no controls', () => open('sample', async page => {
  await page.emulateMedia({ media: 'print', colorScheme: 'dark' });
  assert.equal(await page.evaluate(() => getComputedStyle(document.body).backgroundColor), 'rgb(255, 255, 255)');
  assert.equal(await page.evaluate(() => getComputedStyle(document.querySelector('nav')).display), 'none');
  assert.ok((await page.pdf({ format: 'A4' })).length > 50000);
}, { scheme: 'dark' }));

test('a window that gets narrower makes no page that is wider than it', () => open('grid', async page => {
  await page.setViewportSize({ width: 390, height: 844 });
  await page.waitForTimeout(300);
  assert.equal(await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth), 0);
}));

test('numbers of a table keep to one line on paper', () => open('sample', async page => {
  await page.emulateMedia({ media: 'print' });
  const numbers = await page.evaluate(() => [...document.querySelectorAll('td.n')].map(cell => getComputedStyle(cell).whiteSpace));
  assert.ok(numbers.length > 0 && numbers.every(w => w === 'nowrap'), String(numbers));
}));

test('the answer’s table is whole on paper', () => open('sample', async page => {
  await page.setViewportSize({ width: 720, height: 900 });
  await page.emulateMedia({ media: 'print' });
  const beyond = await page.evaluate(() => [...document.querySelectorAll('main > section:first-of-type table')].map(t => t.getBoundingClientRect().right - document.documentElement.clientWidth));
  assert.ok(beyond.length > 0 && beyond.every(b => b <= 0), String(beyond));
}));

test('a page that is served follows its run, where the reader is, and waits for a reader who filters', async t => {
  let revision = 'first';
  const text = readFileSync(join(folder, 'followed.html'), 'utf8');
  const server = createServer((request, response) => request.url === '/state' ? response.end(JSON.stringify({ revision, live: revision === 'first' }))
    : response.setHeader('Content-Type', 'text/html').end(text.replace('data-revision="first"', `data-revision="${revision}"`)));
  await new Promise(done => server.listen(0, '127.0.0.1', done));
  t.after(() => { server.close(); server.closeAllConnections(); });
  const page = await browser.newPage({ viewport: { width: 1280, height: 900 } }), faults = [], here = () => page.evaluate(() => [document.documentElement.dataset.revision, document.querySelector('#why .bar select').selectedIndex, scrollY]);
  page.on('pageerror', e => faults.push(e.message));
  page.on('console', m => { if (m.type() === 'error') faults.push(m.text()); });
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  const note = page.locator('.follow');
  await note.filter({ hasText: /^The run goes on: [0-9]+ cases so far\.$/ }).waitFor();
  await page.locator('#why .bar select').first().selectOption({ index: 2 });
  await page.evaluate(() => { scrollTo({ top: 900, behavior: 'instant' }); document.activeElement.blur(); });
  revision = 'second';
  await page.waitForSelector('[data-revision=second][data-drawn=true]', { state: 'attached', timeout: 10000 });
  assert.deepEqual(await here(), ['second', 2, 900]);
  await note.filter({ hasText: 'No run goes on.' }).waitFor();
  await page.locator('#cases input[type=search]').fill('tp=2');
  revision = 'third';
  await note.getByRole('button', { name: 'Load what is new' }).waitFor({ timeout: 10000 });
  assert.equal((await here())[0], 'second');
  await note.getByRole('button').click();
  await page.waitForSelector('[data-revision=third][data-drawn=true]', { state: 'attached', timeout: 10000 });
  assert.deepEqual(faults, []);
  await page.close();
});
