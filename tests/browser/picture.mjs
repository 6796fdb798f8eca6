// Takes the picture of one figure of a report: node picture.mjs REPORT.html "HEADING OF THE FIGURE" FILE.png. `./dev pictures` calls it.
import { existsSync } from 'node:fs';
import { delimiter, join, resolve } from 'node:path';
import { chromium } from 'playwright-core';

const [report, heading, file] = process.argv.slice(2);
const program = ['chromium-headless-shell', 'chromium', 'chromium-browser', 'google-chrome'].flatMap(n => (process.env.PATH ?? '').split(delimiter).map(d => join(d, n))).find(existsSync);
const browser = await chromium.launch({ executablePath: program, args: ['--no-sandbox'] });
const page = await browser.newPage({ viewport: { width: 1200, height: 900 } });
await page.goto('file://' + resolve(report));
await page.waitForSelector('[data-drawn=true]', { state: 'attached' });
await page.locator('figure', { has: page.getByRole('heading', { name: heading, exact: true }) }).screenshot({ path: file });
await browser.close();
